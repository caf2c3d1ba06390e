"""A synthetic rollout on disk, and a way to run a script of `ranks/` under torchrun."""

import json
from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

HERE = Path(__file__).parent
VOCAB = 250
# Two groups of four: a one-token response, a fully masked row, and one row longer than the rest together.
RESPONSES = (3, 1, 20, 0, 2, 2, 1, 9)
HOLES = {2: ((4, 9), (15, 16)), 7: ((3, 6),)}  # row -> what the model sees between its turns, in response tokens


def make_rollout(seed: int = 0) -> Rows:
    """Rows as the update reads them, with log-probs far enough from the model's for the clip to bite."""
    g = torch.Generator().manual_seed(seed)
    columns: dict[str, list[torch.Tensor]] = {}
    for i, response in enumerate(RESPONSES):
        prompt = 2 + i % 4
        mask = torch.zeros(prompt + max(response, 1), dtype=torch.uint8)
        mask[prompt : prompt + response] = 1
        for first, end in HOLES.get(i, ()):
            mask[prompt + first : prompt + end] = 0
        old = -5.0 + 0.7 * torch.randn(len(mask), generator=g)
        row = {
            "tokens": torch.randint(0, VOCAB, (len(mask),), generator=g, dtype=torch.int32),
            "loss_mask": mask,
            "logp_old": old * mask,
            "logp_ref": (old + 0.3 * torch.randn(len(mask), generator=g)) * mask,
            "logp_rollout": (old + 0.01 * torch.randn(len(mask), generator=g)) * mask,
            "advantages": torch.randn(1, generator=g) * mask,
        }
        for name, column in row.items():
            columns.setdefault(name, []).append(column)
    ids = tuple(SampleId(0, i // 4, i % 4) for i in range(len(RESPONSES)))
    return Rows(ids, {name: Ragged.from_rows(rows) for name, rows in columns.items()})


@pytest.fixture(scope="session")
def rollout() -> Rows:
    return make_rollout()


@pytest.fixture(scope="session")
def run_cases(rollout, tmp_path_factory, torchrun):
    """`run_cases(script, ranks, cases, checkout=None)` -> {case: what the script saved}."""

    def run(script, ranks, cases, checkout=None):
        folder = tmp_path_factory.mktemp(Path(script).stem)
        columns = {k: vars(c) for k, c in rollout.columns.items()}
        torch.save({"ids": torch.tensor(rollout.ids), **columns}, folder / "rollout.pt")
        (folder / "cases.json").write_text(json.dumps(cases))
        other = {"PYTHONPATH": str(checkout), "cold": True} if checkout else {}
        torchrun(HERE / "ranks" / script, folder, ranks=ranks, **other)
        return {name: torch.load(folder / f"{name}.pt") for name in cases}

    return run


@pytest.fixture
def assert_same():
    """`assert_same(got, want, where)`: metrics, gradient norm and every gradient of a step agree to 1e-4."""

    def check(got, want, where=""):
        for name, value in want["metrics"].items():
            assert got["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (where, name)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4), where
        assert set(got["gradients"]) == set(want["gradients"])
        for name, gradient in want["gradients"].items():
            limit = 1e-4 * float(gradient.abs().max())
            torch.testing.assert_close(
                got["gradients"][name], gradient, rtol=1e-4, atol=limit, msg=lambda m, n=(where, name): f"{n}: {m}"
            )

    return check
