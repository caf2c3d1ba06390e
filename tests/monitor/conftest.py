"""A small run directory that looks like a real one, written by the monitor's own code; a clock and a meter to set."""

import io
import math
import random
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.algorithms import spread
from mindspeed_rl_plugin.monitor.dump import dump_rollout
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.rollout_metrics import rollout_metrics, throughput
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId, pack_json

HOSTILE = "</script><script>document.title='taken'</script><!-- <b>bold</b> & \u2028"
STAGES = {"reshard": (0.12, 0.62), "generate": (2.1, 0.85), "reward": (0.15, 0.3), "update": (1.3, 1.0)}  # s, of 3 GiB


# Of a rollout with engines apart; here each between 0 and 1.
OF_APART = (
    *("idle/trainers_starved", "idle/engines_back_pressure", "idle/engines_version", "lag/mean", "lag/token_mean"),
    "rollout/kl",
    *("segments/mean", "engines/length_mean", "seconds/publish", "weights/pull_seconds", "weights/pause_seconds"),
)


class Meter:
    """Counts up to what the test allocates; knows only one peak, as a device does."""

    measures = "memory of the builder"

    def __init__(self) -> None:
        self.now = self.top = 0

    def use(self, level: int) -> None:
        """Allocate, or free, up to `level`."""
        self.now, self.top = level, max(self.top, level)

    def peak(self) -> int:
        return self.top

    def reset_peak(self) -> None:
        self.top = self.now


class Clock:
    """Time that a test sets."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def decode(tokens) -> str:
    """Characters by code point."""
    return "".join(map(chr, tokens))


def make_rows(epoch: int, skill: float, *, groups: int = 8, members: int = 4, hostile: bool = False) -> Rows:
    """Rows of one arithmetic rollout: each response is right with the chance `skill`."""
    rng = random.Random(epoch)
    ids = tuple(SampleId(epoch, g, m) for g in range(groups) for m in range(members))
    reward = torch.tensor([float(rng.random() < skill) for _ in ids])
    meta = [{"text": f"What is {i.group}+{epoch}?", "answer": str(i.group + epoch)} for i in ids]
    answers = [int(m["answer"]) + int(not right) for m, right in zip(meta, reward.tolist(), strict=True)]
    texts = [f"Let me add: {'one by one, ' * rng.randint(1, 15)}done.\nAnswer: {answer}" for answer in answers]
    texts[0] = HOSTILE if hostile else texts[0]
    prompts, responses = (
        [torch.tensor(list(map(ord, text)), dtype=torch.int32) for text in column]
        for column in ([m["text"] for m in meta], texts)
    )
    pairs = list(zip(prompts, responses, strict=True))
    mask = Ragged.from_rows([torch.cat([torch.zeros(len(p)), torch.ones(len(r))]) for p, r in pairs], torch.uint8)
    generator = torch.Generator().manual_seed(epoch)
    old = -torch.rand(len(mask.values), generator=generator) * mask.values
    noise = torch.randn(len(mask.values), generator=generator) * 1e-6 * mask.values
    grouped = reward.view(groups, members)
    advantage = (grouped - grouped.mean(1, keepdim=True)).flatten()
    columns = {
        "prompt": Ragged.from_rows(prompts),
        "meta": pack_json(meta),
        "tokens": Ragged.from_rows([torch.cat(pair) for pair in pairs]),
        "loss_mask": mask,
        "reward": reward,
        "reward_parts": torch.stack([reward, torch.ones_like(reward)], 1),
        "advantages": spread(advantage, mask),
        "length": mask.lengths,
        "response_length": torch.tensor([len(r) for r in responses]),
        "finish": torch.tensor([int(len(r) > 150) for r in responses], dtype=torch.int8),
        "version": torch.full((len(ids),), epoch),
        "segments": Ragged.from_rows([torch.tensor([[len(p), epoch], [len(p) + 3, epoch + 1]]) for p in prompts]),
        "logp_rollout": Ragged(old + noise, mask.offsets),
        "logp_old": Ragged(old, mask.offsets),
    }
    return Rows(ids, columns)


def make_episodes() -> Rows:
    """Two episodes: of the first the response is a turn of 8 tokens, an observation of 4 and a turn of what is left;
    its environment failed, so its rewards count nothing. The second is one turn, in a group that is not trained."""
    rows = make_rows(0, 0.5, groups=2, members=1)
    before, lengths = rows["prompt"].lengths.tolist(), rows["response_length"].tolist()
    turns, rewards = [[[0, 8], [12, lengths[0]]], [[0, lengths[1]]]], [[0.0, 0.0], [0.25]]
    asked = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": "What is 0+0? Begin."}]
    asked[-1]["seconds"] = 0.25  # of reset
    spoken = [{"role": "assistant", "content": "<call>", "turn": turns[0][0], "reward": 0.5}]
    spoken += [{"role": "tool", "name": "add", "content": HOSTILE, "seconds": 0.125}]
    spoken += [{"role": "user", "content": "go on"}]
    spoken += [{"role": "assistant", "content": "Answer: 0", "turn": turns[0][1], "reward": 0.0}]
    spoken += [{"role": "user", "content": "right", "seconds": 1.5}]
    alone = {"role": "assistant", "content": "Answer: 1", "turn": turns[1][0], "reward": 0.25, "seconds": 0.75}
    mask = rows["loss_mask"].rows()
    mask[0][before[0] + 8 : before[0] + 12] = 0
    mask[1][:] = 0
    columns = {
        "loss_mask": Ragged.from_rows(mask),
        "prompt_length": torch.tensor(before),
        "turns": Ragged.from_rows([torch.tensor(t) + start for t, start in zip(turns, before, strict=True)]),
        "turn_reward": Ragged.from_rows([torch.tensor(r) for r in rewards]),
        "conversation": pack_json([asked + spoken, [{"role": "user", "content": asked[1]["content"]}, alone]]),
    }
    return rows.with_columns(**columns)


class Builder:
    """A run in the making: its monitors, one per rank, and their meters, by one clock."""

    def __init__(self, run_dir: Path, iterations: int, ranks: int, dumps: bool) -> None:
        self.wall, self.rng = Clock(1.7e9), random.Random(7)
        info = {"algorithm": "grpo", "model": "qwen2 2 layers", "dump_dir": str(run_dir / "dump") if dumps else None}
        info |= {"flags": {"--rl-reward": ["math", "exact"]}, "arguments": {"lr": 1e-4}, "versions": {"torch": "2.x"}}
        more = dict(is_terminal=False, total_iterations=iterations, info=info, stream=io.StringIO())
        self.meters = [Meter() for _ in range(ranks)]
        self.monitors = [Monitor(run_dir, rank, ranks, meter=m, **more) for rank, m in enumerate(self.meters)]
        for monitor in self.monitors:
            monitor.clock._now = monitor.clock._tick = self.wall

    def run_stages(self, iteration: int) -> None:
        """Every rank's stages from the same time on; the clock goes to the last one's end."""
        start = finish = self.wall.at
        for monitor, meter in zip(self.monitors, self.meters, strict=True):
            self.wall.at = start
            monitor.begin(iteration)
            for stage, (seconds, memory) in STAGES.items():
                with monitor.stage(stage):
                    self.wall.at += seconds * (1 + 0.25 * self.rng.random())
                    meter.use(int(memory * (1 + 0.02 * self.rng.random()) * 3 * 2**30))
                self.wall.at += 0.02
            finish = max(finish, self.wall.at)
        self.wall.at = finish

    def generate_apart(self) -> None:
        """Two engines that are no ranks, and weights that go out, in the last second."""
        log, end = self.monitors[0].log_apart, self.wall.at
        for engine in ("generator rank 4", "joined engine, process 78 on machine-2"):
            log(engine, "generate", end - 1.0, end - 0.4)
            log(engine, "pull", end - 0.6, end - 0.4)
            log(engine, "back-pressure", end - 0.4, end)
        log("weights", "version 5", end - 0.7, end - 0.7)

    def evaluate(self, iteration: int, accuracy: float) -> None:
        """An evaluation of 0.8 s on every rank."""
        start = self.wall.at
        for monitor in self.monitors:
            self.wall.at = start
            with monitor.stage("evaluate"):
                self.wall.at += 0.8
        result = {"accuracy": accuracy, "reward_mean": accuracy - 0.1, "pass@8": min(1, accuracy + 0.2)}
        self.monitors[0].log_eval(iteration, result)
        rows = [[0, "1+1=", HOSTILE, "2", 0.0], [1, "2+2=", f"4 ({iteration})", "4", 1.0]]
        self.monitors[0].log_held_out(iteration, rows)

    def update(self, progress: float) -> dict[str, float]:
        """What an update measures after this share of the run."""
        rng = self.rng
        return {
            "loss": rng.gauss(0, 0.01),
            "kl/ref": 2e-3 * progress * (1 + 0.3 * rng.random()),
            "clip_fraction": 0.02 * rng.random(),
            "logp_diff/max": 1e-5 * rng.random(),
            "entropy": 0.9 * math.exp(-progress) + 0.02 * rng.random(),
        }


def build_run(
    run_dir: Path,
    *,
    iterations: int,
    ranks: int = 2,
    evaluate: bool = True,
    dumps: bool = True,
    events: bool = True,
    apart: bool = False,
) -> Path:
    """Write a whole run: metrics, stage events of every rank, dumps. Returns the directory."""
    run = Builder(run_dir, iterations, ranks, dumps)
    leader = run.monitors[0]
    if evaluate:
        run.evaluate(0, 0.31)
    for k in range(1, iterations + 1):
        skill = 0.31 + 0.62 * (1 - math.exp(-k / (iterations / 2.5)))
        rows = make_rows(k - 1, skill, hostile=k == 1)
        run.run_stages(k)
        if apart:
            run.generate_apart()
        stages = leader.stage_metrics()
        speed = throughput(int(rows["length"].sum()), devices=ranks, seconds=stages["seconds/iteration"])
        measured = rollout_metrics(rows, rows["reward"].bool().tolist())
        if apart:
            measured |= {"lag/max": 1.0, **{name: run.rng.random() for name in OF_APART}}
        leader.log(k, measured | run.update(k / iterations) | speed | stages)
        if dumps:
            dump_rollout(run_dir / "dump", rows, decode, iteration=k, graders=("math", "format"))
        if evaluate and k % 10 == 0:
            run.evaluate(k, skill + run.rng.gauss(0, 0.01))
    for monitor in run.monitors:
        monitor.close()
    for path in [] if events else list(run_dir.glob("events-rank*.jsonl")):
        path.unlink()
    return run_dir


@pytest.fixture(scope="session")
def run_builder():
    """The function that writes a run directory."""
    return build_run


@pytest.fixture(scope="session")
def rows_builder():
    """The function that makes the rows of a rollout."""
    return make_rows


@pytest.fixture
def episode_dump(tmp_path) -> Path:
    """A folder with the dump of two episodes."""
    return dump_rollout(tmp_path / "dump", make_episodes(), decode, iteration=1, graders=("math", "format")).parent


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def time() -> Clock:
    return Clock(100.0)
