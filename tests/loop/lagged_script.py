"""The oracle of the strict order: a synchronous run whose rollout e is sampled with the weights of rollout e - LAG."""

import os
import runpy
from pathlib import Path

from mindspeed_rl_plugin.loop.schedules import schedule


class Lagged(schedule.SyncSchedule):
    """Keeps what the engine had in each rollout."""

    past = []

    def _sample(self):
        engine = self.colocation.engine
        live = engine.parameters()
        self.past.append((engine.version, {name: tensor.clone() for name, tensor in live.items()}))
        version, weights = self.past[max(0, len(self.past) - 1 - int(os.environ["LAG"]))]
        for name, tensor in live.items():
            tensor.copy_(weights[name])
        engine.update_weights(version)
        return super()._sample()


if __name__ == "__main__":
    schedule.SCHEDULES["sync"] = Lagged
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"), run_name="__main__")
