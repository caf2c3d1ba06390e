"""Padding, the shift by one, and its inverse."""

import argparse
import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.forward import router_replay
from mindspeed_rl_plugin.forward.call import swapped
from mindspeed_rl_plugin.forward.collate import collate, to_rows
from mindspeed_rl_plugin.forward.fragments import row_sizes
from mindspeed_rl_plugin.forward.settings import ForwardSettings
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

pytestmark = pytest.mark.quick


def rows_of(lengths, **more):
    tokens = Ragged.from_rows([torch.arange(n, dtype=torch.int32) + 10 * i for i, n in enumerate(lengths)])
    return Rows(tuple(SampleId(0, 0, i) for i in range(len(lengths))), {"tokens": tokens, **more})


def test_position_t_holds_the_event_of_token_t_plus_1():
    mask = Ragged.from_rows([torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1])], dtype=torch.uint8)
    logp = Ragged.from_rows([torch.tensor([0.0, 0.0, -2.0, -3.0]), torch.tensor([0.0, -11.0])])
    rows = rows_of([4, 2], loss_mask=mask, logp_old=logp)
    batch = collate(rows, ForwardSettings(micro_batch_size=2, seq_length=8, vocab_size=99), columns=["logp_old"])
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [10, 11, 0, 0]]
    assert batch.labels.tolist() == [[1, 2, 3, 0], [11, 0, 0, 0]]
    assert batch.mask.tolist() == [[False, True, True, False], [True, False, False, False]]
    assert batch.columns["logp_old"].tolist() == [[0, -2, -3, 0], [-11, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(batch.attention_mask, one_mask(4)[None, None])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([1, 2, 4]), st.booleans())
def test_back_to_rows_is_the_inverse(lengths, multiple, fixed):
    values = Ragged.from_rows([torch.cat([torch.zeros(1), torch.rand(n - 1)]) for n in lengths])
    shape = ForwardSettings(len(lengths), seq_length=12, vocab_size=99, multiple=multiple, fixed_length=fixed)
    batch = collate(rows_of(lengths, x=values), shape, columns=["x"])
    assert batch.tokens.shape[1] == (12 if fixed else -(-max(lengths) // multiple) * multiple)
    back = to_rows(batch.columns["x"], batch)
    assert torch.equal(back.values, values.values) and torch.equal(back.offsets, values.offsets)
    # Without a mask every token but the first is trained.
    assert batch.mask.sum(-1).tolist() == [n - 1 for n in lengths]


@pytest.mark.parametrize(
    ("lengths", "more"),
    [([3, 9], {}), ([3], {}), ([3, 3], {"x": Ragged.from_rows([torch.zeros(3), torch.zeros(2)])})],
)
def test_a_row_too_long_another_number_of_rows_and_other_lengths_are_refused(lengths, more):
    with pytest.raises(ValueError):
        collate(rows_of(lengths, **more), ForwardSettings(2, seq_length=8, vocab_size=99), columns=list(more))


PARALLEL = {"context_parallel_size": 1, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
ARGS = {**PARALLEL, "sequence_parallel": True, "padded_vocab_size": 256, "micro_batch_size": 2, "seq_length": 64}
ARGS |= {"variable_seq_lengths": False, "create_attention_mask_in_dataloader": True}


def made(changes, temperature=1.0, **more):
    args = argparse.Namespace(**{**ARGS, **changes})
    return ForwardSettings.from_args(args, vocab_size=250, temperature=temperature, **more)


def test_settings_follow_megatrons_arguments():
    assert made({}, temperature=0.7) == ForwardSettings(2, 64, 250, 0.7, multiple=2)
    stages = {"pipeline_model_parallel_size": 2, "sequence_parallel": False}
    piped = made(stages)
    assert piped.fixed_length and piped.padded_length(3) == 64
    for schedule, fixed in ((None, False), ("dualpipev", True)):
        assert made({**stages, "variable_seq_lengths": True, "schedules_method": schedule}).fixed_length == fixed
    split = made({"context_parallel_size": 3, "seq_length": 60})
    assert split.padded_length(3) == 12 and split.padded_length(13) == 24, "two pieces per rank, in two parts each"
    assert not split.causal_mask, "attention over context parallel ranks is handed no mask"
    for changes in ({"context_parallel_size": 2, "seq_length": 68}, {"seq_length": 63}):
        with pytest.raises(ValueError, match="is not a multiple of"):
            made(changes)


NO_MASK, MINDSPEED = {"create_attention_mask_in_dataloader": False}, {"pre_tockens": 65536}


@pytest.mark.parametrize(
    ("changes", "mask"),
    [
        ({}, True),
        (NO_MASK, False),
        ({**NO_MASK, **MINDSPEED, "use_flash_attn": True}, False),
        ({**NO_MASK, **MINDSPEED, "use_flash_attn": False}, True),
    ],
)
def test_a_mask_is_made_where_the_script_or_mindspeed_needs_one(changes, mask):
    assert made(changes).causal_mask == mask


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([1, 2, 4]))
def test_packed_rows_stand_behind_each_other_and_come_back(lengths, multiple):
    values = Ragged.from_rows([torch.cat([torch.zeros(1), torch.rand(n - 1)]) for n in lengths])
    shape = ForwardSettings(1, seq_length=12, vocab_size=99, multiple=multiple, max_tokens=100, packed=True)
    rows = rows_of(lengths, x=values)
    batch = collate(rows, shape, columns=["x"])
    total = sum(lengths)
    assert batch.tokens.shape == (1, -(-total // multiple) * multiple)
    assert torch.equal(batch.tokens[0, :total], rows["tokens"].values.long())
    back = to_rows(batch.columns["x"], batch)
    assert torch.equal(back.values, values.values) and torch.equal(back.offsets, values.offsets)
    # As rows of their own: labels, trained positions, places, boundaries.
    alone = [collate(rows.take([i]), ForwardSettings(1, 12, 99)) for i in range(len(lengths))]
    at = 0
    for i, one in enumerate(alone):
        here = slice(at, at + lengths[i])
        assert torch.equal(batch.labels[0, here], one.labels[0]) and torch.equal(batch.mask[0, here], one.mask[0])
        assert torch.equal(batch.position_ids[0, here], one.position_ids[0])
        at += lengths[i]
        assert batch.branches.queries[i] == at and batch.attention_mask is None
    assert batch.sequence.tolist() == [i for i, n in enumerate(lengths) for _ in range(n - 1)]
    moved = batch.to("cpu")
    assert torch.equal(moved.segments, batch.segments)


LAYOUTS = {
    "padded": ForwardSettings(2, 64, 99, max_tokens=999),
    "packed": ForwardSettings(2, 64, 99, max_tokens=999, packed=True),
    "tree": ForwardSettings(2, 64, 99, max_tokens=999, packed=True, shared=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
def test_paths_run_as_rows_of_their_own_and_count_for_their_row(layout, lengths):
    every = [n for of_row in lengths for n in of_row]
    names, columns = ("loss_mask", "x"), ("tokens", "labels", "mask", "position_ids")
    some = [torch.arange(n, dtype=torch.int32) + 10 * (i % 2) for i, n in enumerate(every)]
    alone = rows_of(every)
    alone = alone.with_columns(
        tokens=Ragged.from_rows(some),
        loss_mask=Ragged(torch.arange(sum(every)).remainder(3).gt(0).byte(), alone["tokens"].offsets),
        x=Ragged(torch.rand(sum(every)), alone["tokens"].offsets),
        routes=Ragged(torch.randint(4, (sum(every), 1, 1)), alone["tokens"].offsets),
        segments=Ragged.from_rows([torch.tensor([[0, n % 2]]) for n in every]),
    )
    offsets = torch.tensor([0, *[sum(of_row) for of_row in lengths]]).cumsum(0)
    starts = [torch.tensor([0, *of_row[:-1]]).cumsum(0) for of_row in lengths]
    parts = [
        [[at, n % 2] for at, n in zip(s.tolist(), of_row, strict=True)]
        for s, of_row in zip(starts, lengths, strict=True)
    ]
    rows = Rows(
        tuple(SampleId(0, 0, i) for i in range(len(lengths))),
        {name: Ragged(alone[name].values, offsets) for name in ("tokens", "routes", *names)}
        | {
            "paths": Ragged.from_rows([torch.stack([s, torch.ones_like(s)], 1) for s in starts]),
            "segments": Ragged.from_rows([torch.tensor(p) for p in parts]),
        },
    )
    shape = dataclasses.replace(LAYOUTS[layout], routed=(1,), experts=4)
    with swapped(vars(router_replay), weights_version=[1]):
        batch, expected = (collate(given, shape, columns=["x"]) for given in (rows, alone))
    for name in columns:
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    for name in ("ids", "part"):
        assert torch.equal(getattr(batch.routes, name), getattr(expected.routes, name)), name
    assert torch.equal(batch.columns["x"], expected.columns["x"])
    assert torch.equal(batch.branches.queries, expected.branches.queries)
    assert (batch.tree is None) == (expected.tree is None)
    whose = torch.arange(len(lengths)).repeat_interleave(torch.tensor([len(of_row) for of_row in lengths]))
    assert torch.equal(batch.sequence, whose[expected.sequence])
    back, by_path = to_rows(batch.columns["x"], batch), to_rows(expected.columns["x"], expected)
    assert torch.equal(back.values, by_path.values) and torch.equal(back.offsets, offsets)
    tokens = rows["tokens"].values.tolist()
    sizes = row_sizes(rows, shape.shared)
    bounds = [[*(o + s).tolist(), e] for o, e, s in zip(offsets, offsets[1:].tolist(), starts, strict=False)]
    of_rows = [[tokens[a:b] for a, b in pairwise(of_row)] for of_row in bounds]
    distinct = [len({tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}) for paths in of_rows]
    assert sizes == (distinct if shape.shared else offsets.diff().tolist())


@pytest.mark.parametrize(
    ("changes", "bounded"),
    [
        ({}, False),
        ({"transformer_impl": "transformer_engine"}, True),
        ({"transformer_impl": "transformer_engine", "masked_softmax_fusion": True}, True),
        ({**MINDSPEED, "use_flash_attn": True}, True),
        ({**MINDSPEED, "transformer_impl": "transformer_engine"}, False),
    ],
)
def test_packed_rows_are_told_apart_as_the_attention_allows(changes, bounded):
    """MindSpeed puts Megatron's own attention in TransformerEngine's place, its flash attention where asked for."""
    packed = made(changes, max_tokens=64, packed=True)
    assert packed.packed and packed.bounded == bounded and not made(changes).bounded


def test_bounded_rows_come_with_their_boundaries_and_no_mask():
    shape = ForwardSettings(1, seq_length=12, vocab_size=99, multiple=4, max_tokens=100, packed=True, bounded=True)
    padded = collate(rows_of([3, 1, 2]), shape)
    assert padded.attention_mask is None and padded.branches.queries.tolist() == [3, 4, 6, 8], (
        "padding is a row of its own"
    )
    assert collate(rows_of([3, 1, 4]), shape).to("cpu").branches.keys.tolist() == [3, 4, 8]


def one_mask(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def test_a_budget_of_tokens_takes_any_number_of_rows():
    batch = collate(rows_of([3, 1, 2]), ForwardSettings(2, 8, 99, max_tokens=20))
    assert batch.tokens.shape == (3, 3) and batch.sequence.tolist() == [0, 0, 2]
