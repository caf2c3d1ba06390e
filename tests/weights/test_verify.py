"""Digests do not depend on the split, see every change, and a mismatch names tensor, ranks and range."""

import pytest
import torch

from mindspeed_rl_plugin.layout.layout import Canonical, Segment
from mindspeed_rl_plugin.weights import verify as module
from mindspeed_rl_plugin.weights.verify import (
    RankDigests,
    WeightMismatch,
    compare,
    layout_digests,
    segment_digest,
    weights_digest,
)

pytestmark = pytest.mark.quick


def whole(name, values, axis=0):
    return Segment(name, axis, 0, values.shape[axis], 0)


@pytest.mark.parametrize("axis", [0, 1])
def test_any_split_adds_up(axis, monkeypatch):
    monkeypatch.setattr(module, "_DIGESTED_AT_ONCE", 10)  # several chunks
    values, tensor = torch.randn(12, 8), Canonical((12, 8), axis)
    total = int(segment_digest(values, whole("a", values, axis), tensor, torch.float32))
    for sizes in ([4, 4, tensor.slices - 8], [1, tensor.slices - 1]):
        at, parts = 0, 0
        for size in sizes:
            segment = Segment("a", axis, at, size, 0)
            parts += int(segment_digest(values.narrow(axis, at, size), segment, tensor, torch.float32))
            at += size
        assert (parts - total) % (1 << 64) == 0


def test_every_change_shows():
    values, tensor = torch.randn(6, 4), Canonical((6, 4), 0)

    def digest(t):
        return int(segment_digest(t, whole("a", t), tensor, torch.float32))

    seen = {digest(values), digest(values.roll(1, 0)), digest(values.roll(1, 1)), digest(-values), digest(0 * values)}
    flipped = values.clone()
    flipped.view(torch.int32)[3, 2] ^= 1  # the lowest bit of one element
    assert len(seen | {digest(flipped)}) == 6


TENSORS = {"a": Canonical((8, 3), 0), "b": Canonical((4,), 0)}
TRAINER = [{"p": (Segment("a", 0, r * 4, 4, 0),), "n": (Segment("b", 0, 0, 4, 0),)} for r in range(2)]
ENGINE = [{"x": (Segment("a", 0, r * 2, 2, 0),), "n": (Segment("b", 0, 0, 4, 0),)} for r in range(4)]


def sides(damage=None, trainer_damage=None):
    """Two trainer ranks and four engine ranks that cut finer; damage = (rank, param, row) of what is overwritten."""
    model = {"a": torch.arange(24.0).view(8, 3), "b": torch.randn(4)}
    out = []
    for layouts, hit in ((TRAINER, trainer_damage), (ENGINE, damage)):
        held = []
        for rank, layout in enumerate(layouts):
            params = {name: model[s.name][s.start : s.stop].clone() for name, (s,) in layout.items()}
            if hit and hit[0] == rank:
                params[hit[1]][hit[2]] += 1
            held.append(RankDigests(rank, layout, layout_digests(params, layout, TENSORS, torch.float32)))
        out.append(held)
    return out


def test_equal_sides_agree():
    trainer, engine = sides()
    totals = compare(trainer, engine, TENSORS)
    assert set(totals) == {"a", "b"} and len(weights_digest(totals)) == 16
    assert weights_digest(compare(engine, [], TENSORS)) == weights_digest(totals)  # however a model is cut


@pytest.mark.parametrize(
    "damage, message",
    [
        ((3, "x", 1), r"^a \[4, 8\) of axis 0: engine ranks \[2, 3\] differ from the trainer"),
        ((2, "n", 0), r"^b \[0, 4\) of axis 0: engine ranks \[2\] differ from the trainer"),
    ],
)
def test_damage_in_the_engine_is_located(damage, message):
    with pytest.raises(WeightMismatch, match=message):
        compare(*sides(damage), TENSORS)


def test_exact_rank_where_the_trainer_cuts_as_fine():
    ours, theirs = sides((3, "x", 1))
    with pytest.raises(WeightMismatch, match=r"a \[6, 8\) of axis 0: engine ranks \[3\] differ"):
        compare(sides()[1], theirs, TENSORS)


def test_replicas_of_the_trainer_that_drifted_apart():
    with pytest.raises(WeightMismatch, match=r"b \[0, 4\): trainer .* 0 \(.*1 \("):
        compare(*sides(trainer_damage=(1, "n", 2)), TENSORS)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 4096, module.BLOCK_BYTES + 12])
def test_storages_differ_by_any_bit(nbytes):
    storage = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).untyped_storage()
    before = module.storage_digests(storage)
    assert len(before) == -(-nbytes // module.BLOCK_BYTES)
    for at in {0, nbytes // 2, nbytes - 1}:
        storage[at] ^= 1
        changed = (module.storage_digests(storage) != before).nonzero().flatten().tolist()
        assert changed == [at // module.BLOCK_BYTES]
        storage[at] ^= 1
    assert torch.equal(module.storage_digests(storage), before)


def test_broken_weights_are_found_where_minimum_and_maximum_pass_over_nan(monkeypatch):
    monkeypatch.setattr(module, "_carries_nan", module._carries_nan.__wrapped__)
    monkeypatch.setattr(torch, "aminmax", lambda t, whole=torch.aminmax: whole(t.nan_to_num(0.0)))
    good, broken = torch.ones(3), torch.tensor([1.0, torch.nan])
    assert [module.first_broken([good, t]) for t in (good, broken, -broken.nan_to_num(torch.inf))] == [0, 2, 2]
