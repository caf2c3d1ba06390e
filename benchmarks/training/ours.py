"""The script that this project's arm launches: Megatron's GPT pretraining, with the length of each response imposed.

torchrun ... benchmarks/training/ours.py --workload DIR [--discard-stale] ...

--discard-stale, with `--rl-inflight recompute`: a response in the making begins anew under new weights, so that each is
sampled by one version, as where what is stale is thrown away.

Engines apart are ranks of it too, so lengths are imposed before the plugin's import line, at which these leave.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import workload  # noqa: E402

from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine  # noqa: E402
from mindspeed_rl_plugin.generators import engine_loop  # noqa: E402

at = sys.argv.index("--workload")
LENGTHS = workload.lengths(workload.read(Path(sys.argv[at + 1])))
del sys.argv[at : at + 2]
submit = VllmEngine.submit


def imposed(self, requests):
    """Each request with its own limit, which `--rl-ignore-eos` makes its length."""
    submit(
        self,
        [
            dataclasses.replace(
                request,
                sampling=dataclasses.replace(
                    request.sampling,
                    max_tokens=LENGTHS[workload.prompt_of(request.prompt_tokens)][request.id.member],
                ),
            )
            for request in requests
        ],
    )


VllmEngine.submit = imposed
if "--discard-stale" in sys.argv:
    sys.argv.remove("--discard-stale")
    engine_loop.continued = lambda job, request, begun: request

import mindspeed_rl_plugin.adaptor  # noqa: E402, F401, I001 - before Megatron
from megatron.training import training  # noqa: E402

# TRL's arm writes no checkpoint; Megatron's last one would gather all optimizer state on one rank.
for name in ("save_checkpoint", "save_checkpoint_and_time"):
    setattr(training, name, lambda *_, **__: None)
runpy.run_path(str(HERE.parents[1] / "examples" / "pretrain_gpt.py"), run_name="__main__")
