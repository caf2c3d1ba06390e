"""A small run directory that looks like a real one, written by the monitor's own code; a clock and a meter to set."""

import io
import math
import random
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.monitor.dump import dump_rollout
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.rollout_metrics import rollout_metrics, throughput
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId, pack_json, spread

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
        **dict.fromkeys(("graded", "valid"), torch.ones(len(ids), dtype=torch.int8)),
        "weights_digest": torch.arange(len(ids)) - 5,
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
        "episode_counts": torch.tensor([[1, 0], [0, 0]]),
        "conversation": pack_json([asked + spoken, [{"role": "user", "content": asked[1]["content"]}, alone]]),
    }
    return rows.with_columns(**columns)


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
    """Write a whole run by one clock: metrics, stage events of every rank, dumps. Returns the directory."""
    wall, rng, meters = Clock(1.7e9), random.Random(7), [Meter() for _ in range(ranks)]
    info = {"algorithm": "grpo", "model": "qwen2 2 layers", "dump_dir": str(run_dir / "dump") if dumps else None}
    info |= {"flags": {"--rl-reward": ["math", "exact"]}, "arguments": {"lr": 1e-4}, "versions": {"torch": "2.x"}}
    more = dict(is_terminal=False, total_iterations=iterations, info=info, stream=io.StringIO())
    monitors = [Monitor(run_dir, rank, ranks, meter=m, **more) for rank, m in enumerate(meters)]
    leader = monitors[0]
    for monitor in monitors:
        monitor.clock._now = monitor.clock._tick = wall

    def stages(named, iteration=None):
        """Every rank's stages from the same time on; the clock goes to the last one's end."""
        start = finish = wall.at
        for monitor, meter in zip(monitors, meters, strict=True):
            wall.at = start
            if iteration:
                monitor.begin(iteration)
            for stage, (seconds, memory) in named.items():
                with monitor.stage(stage):
                    wall.at += seconds * (1 + (0.25 * rng.random() if iteration else 0.0))
                    meter.use(int(memory * (1 + 0.02 * rng.random()) * 3 * 2**30))
                wall.at += 0.02
            finish = max(finish, wall.at)
        wall.at = finish

    def evaluated(iteration, accuracy):
        stages({"evaluate": (0.8, 0.1)})
        leader.log_eval(
            iteration, {"accuracy": accuracy, "reward_mean": accuracy - 0.1, "pass@8": min(1, accuracy + 0.2)}
        )
        rows = [[0, "1+1=", HOSTILE, "2", 0.0], [1, "2+2=", f"4 ({iteration})", "4", 1.0]]
        leader.log_held_out(iteration, rows)

    def generated_apart(end):
        """Two engines that are no ranks, and weights that go out, in the last second."""
        for engine in ("generator rank 4", "joined engine, process 78 on machine-2"):
            for what, start, until in (("generate", 1.0, 0.4), ("pull", 0.6, 0.4), ("back-pressure", 0.4, 0.0)):
                leader.log_apart(engine, what, end - start, end - until)
        leader.log_apart("weights", "version 5", end - 0.7, end - 0.7)
        return {"lag/max": 1.0, **{name: rng.random() for name in OF_APART}}

    if evaluate:
        evaluated(0, 0.31)
    for k in range(1, iterations + 1):
        skill = 0.31 + 0.62 * (1 - math.exp(-k / (iterations / 2.5)))
        rows = make_rows(k - 1, skill, hostile=k == 1)
        stages(STAGES, k)
        measured = rollout_metrics(rows, rows["reward"].bool().tolist())
        measured |= generated_apart(wall.at) if apart else {}
        measured |= {"loss": rng.gauss(0, 0.01), "kl/ref": 2e-3 * k / iterations * (1 + 0.3 * rng.random())}
        measured |= {"clip_fraction": 0.02 * rng.random(), "logp_diff/max": 1e-5 * rng.random()}
        measured |= {"entropy": 0.9 * math.exp(-k / iterations) + 0.02 * rng.random()} | leader.stage_metrics()
        speed = throughput(int(rows["length"].sum()), devices=ranks, seconds=measured["seconds/iteration"])
        leader.log(k, measured | speed)
        if dumps:
            dump_rollout(run_dir / "dump", rows, decode, iteration=k, graders=("math", "format"))
        if evaluate and k % 10 == 0:
            evaluated(k, skill + rng.gauss(0, 0.01))
    for monitor in monitors:
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
    own = ("turn_reward", "episode_counts", "tool_calls")
    return dump_rollout(
        tmp_path / "dump", make_episodes(), decode, iteration=1, graders=("math", "format"), own=own
    ).parent


@pytest.fixture
def two_episodes() -> Rows:
    """The rows of that dump."""
    return make_episodes()


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def time() -> Clock:
    return Clock(100.0)
