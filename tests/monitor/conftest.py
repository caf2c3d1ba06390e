"""A small run directory that looks like a real one, written by the monitor's own code."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.monitor.dump import dump_rollout
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.rollout_metrics import rollout_metrics, throughput
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId, pack_json

HOSTILE = "</script><script>document.title='taken'</script><!-- <b>bold</b> & \u2028"
STAGES = {  # seconds, share of the memory
    "reshard": (0.12, 0.62),
    "generate": (2.1, 0.85),
    "reward": (0.15, 0.30),
    "swap_back": (0.1, 0.55),
    "logp_old": (0.5, 0.7),
    "logp_ref": (0.45, 0.72),
    "advantage": (0.02, 0.5),
    "update": (1.3, 1.0),
}


class FakeMeter:
    """A memory meter whose peak the builder sets."""

    measures = "memory of the builder"

    def __init__(self) -> None:
        self.value = 0

    def peak(self) -> int:
        return self.value

    def reset_peak(self) -> None:
        self.value = 0


class Clock:
    """Wall time that only moves when told."""

    def __init__(self, at: float = 1.7e9) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def decode(tokens) -> str:
    """Characters by code point."""
    return "".join(map(chr, tokens))


def encode(text: str) -> torch.Tensor:
    """Inverse of decode, `[L]` int32."""
    return torch.tensor([ord(c) for c in text], dtype=torch.int32)


def make_rows(
    epoch: int, skill: float, *, groups: int = 8, members: int = 4, seed: int = 0, hostile: bool = False
) -> Rows:
    """Rows of one arithmetic rollout: each response is right with the chance `skill`."""
    draw = random.Random(seed * 1000 + epoch)
    ids, texts, meta, rewards = [], [], [], []
    for g in range(groups):
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        for m in range(members):
            right = draw.random() < skill
            answer = a + b if right else a + b + draw.choice([-10, -1, 1, 10])
            work = f"Let me add: {a} + {b}.\nTens: {a // 10 * 10 + b // 10 * 10}. Ones: {a % 10 + b % 10}.\n"
            response = work * draw.randint(1, 3) + f"Answer: {answer}"
            if hostile and (g, m) == (0, 0):
                response = HOSTILE
            ids.append(SampleId(epoch, g, m))
            texts.append((f"What is {a}+{b}?", response))
            meta.append({"text": f"What is {a}+{b}?", "answer": str(a + b)})
            rewards.append(float(right))
    prompts, responses = ([encode(t[k]) for t in texts] for k in (0, 1))
    mask = [torch.cat([torch.zeros(len(p)), torch.ones(len(r))]) for p, r in zip(prompts, responses, strict=True)]
    generator = torch.Generator().manual_seed(epoch)
    old = [-torch.rand(len(m), generator=generator) * m for m in mask]
    noise = [torch.randn(len(m), generator=generator) * 1e-6 * m for m in mask]
    reward = torch.tensor(rewards)
    grouped = reward.view(groups, members)
    std = grouped.std(1, keepdim=True) if members > 1 else torch.zeros(groups, 1)
    advantage = ((grouped - grouped.mean(1, keepdim=True)) / (std + 1e-6)).flatten()
    columns = {
        "prompt": Ragged.from_rows(prompts),
        "meta": pack_json(meta),
        "tokens": Ragged.from_rows([torch.cat(pair) for pair in zip(prompts, responses, strict=True)]),
        "loss_mask": Ragged.from_rows(mask, torch.uint8),
        "reward": reward,
        "reward_parts": torch.stack([reward, torch.ones_like(reward)], 1),
        "advantages": Ragged.from_rows([a * m for a, m in zip(advantage, mask, strict=True)]),
        "length": torch.tensor([len(m) for m in mask]),
        "response_length": torch.tensor([len(r) for r in responses]),
        "finish": torch.tensor([int(len(r) > 150) for r in responses], dtype=torch.int8),
        "version": torch.full((len(ids),), epoch),
        "logp_rollout": Ragged.from_rows([o + n for o, n in zip(old, noise, strict=True)]),
        "logp_old": Ragged.from_rows(old),
    }
    return Rows(tuple(ids), columns)


def build_run(
    run_dir: Path,
    *,
    iterations: int = 60,
    ranks: int = 2,
    evaluate: bool = True,
    dumps: bool = True,
    events: bool = True,
) -> Path:
    """Write a whole run: metrics, stage events of every rank, dumps. Returns the directory."""
    wall = Clock()
    meters = [FakeMeter() for _ in range(ranks)]
    monitors = []
    for rank in range(ranks):
        info = {"algorithm": "grpo", "model": "qwen2 2 layers", "dump_dir": str(run_dir / "dump") if dumps else None}
        monitor = Monitor(
            run_dir,
            rank,
            ranks,
            is_terminal=False,
            total_iterations=iterations,
            meter=meters[rank],
            info=info,
            stream=io.StringIO(),
        )
        monitor.clock._now = monitor.clock._tick = wall
        monitors.append(monitor)
    draw = random.Random(7)
    if evaluate:
        _evaluate(monitors, meters, wall, 0, 0.31)
    for k in range(1, iterations + 1):
        skill = 0.31 + 0.62 * (1 - math.exp(-k / (iterations / 2.5)))
        rows = make_rows(k - 1, skill, hostile=k == 1)
        _run_stages(monitors, meters, wall, draw, k)
        update = {
            "loss": draw.gauss(0, 0.01),
            "grad_norm": 0.8 * math.exp(-k / iterations) + 0.1 * draw.random(),
            "lr": 1e-4 * min(1, k / 10),
            "kl/ref": 2e-3 * k / iterations * (1 + 0.3 * draw.random()),
            "ratio/mean": 1.0,
            "ratio/max": 1 + 0.4 * draw.random(),
            "clip_fraction": 0.02 * draw.random(),
            "logp_diff/mean": 1e-6 * draw.random(),
            "logp_diff/max": 1e-5 * draw.random(),
            "entropy": 0.9 * math.exp(-k / iterations) + 0.02 * draw.random(),
        }
        stages = monitors[0].stage_metrics()
        speed = throughput(int(rows["length"].sum()), devices=ranks, seconds=stages["seconds/iteration"])
        monitors[0].log(k, rollout_metrics(rows, rows["reward"].bool().tolist()) | update | speed | stages)
        if dumps:
            dump_rollout(run_dir / "dump", rows, decode, iteration=k, graders=("math", "format"))
        if evaluate and k % 10 == 0:
            _evaluate(monitors, meters, wall, k, skill + draw.gauss(0, 0.01))
    for monitor in monitors:
        monitor.close()
    if not events:
        for path in run_dir.glob("events-rank*.jsonl"):
            path.unlink()
    return run_dir


def _run_stages(monitors, meters, wall, draw, iteration) -> None:
    start = wall.at
    finish = start
    for monitor, meter in zip(monitors, meters, strict=True):
        wall.at = start
        monitor.begin(iteration)
        for stage, (seconds, memory) in STAGES.items():
            with monitor.stage(stage):
                wall.at += seconds * (1 + 0.25 * draw.random())
                meter.value = int(memory * (1 + 0.02 * draw.random()) * 3 * 2**30)
            wall.at += 0.02
        finish = max(finish, wall.at)
    wall.at = finish


def _evaluate(monitors, meters, wall, iteration, accuracy) -> None:
    start = wall.at
    for monitor, meter in zip(monitors, meters, strict=True):
        wall.at = start
        with monitor.stage("evaluate"):
            wall.at += 0.8
            meter.value = 2 * 2**30
    monitors[0].log_eval(
        iteration, {"accuracy": accuracy, "reward_mean": accuracy - 0.1, "pass@8": min(1, accuracy + 0.2)}
    )


@pytest.fixture(scope="session")
def run_builder():
    """The function that writes a run directory."""
    return build_run


@pytest.fixture(scope="session")
def rows_builder():
    """The function that makes the rows of a rollout."""
    return make_rows
