"""The example's script, which says what came from its engine's prefix cache."""

import runpy
from pathlib import Path

from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine

init, update = VllmEngine.__init__, VllmEngine.update_weights
CACHED = [0]


def counting(self, *args, **named):
    init(self, *args, **named)
    step = self._engine.step

    def counted():
        outputs = step()
        CACHED[0] += sum(output.num_cached_tokens or 0 for output in outputs if output.finished)
        return outputs

    self._engine.step = counted


def saying(self, *args, **named):
    update(self, *args, **named)
    print(f"{CACHED[0]} tokens came from the prefix cache", flush=True)


if __name__ == "__main__":
    VllmEngine.__init__, VllmEngine.update_weights = counting, saying
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"), run_name="__main__")
