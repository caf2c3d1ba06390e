"""The example's script with lengths imposed by ids: half of the responses to one prompt in four are long."""

import dataclasses
import runpy
from pathlib import Path

from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine

submit = VllmEngine.submit


def limited(request):
    epoch, group, member = request.id
    tokens = 16 if (3 * epoch + group) % 4 == 0 and member % 2 else 2 + (epoch + 2 * group + 3 * member) % 5
    sampling = dataclasses.replace(request.sampling, max_tokens=tokens, ignore_eos=True)
    return dataclasses.replace(request, sampling=sampling)


if __name__ == "__main__":
    VllmEngine.submit = lambda self, requests: submit(self, [limited(r) if r.id.epoch >= 0 else r for r in requests])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"), run_name="__main__")
