"""How ranks and layers are divided: against Megatron and MindSpeed-LLM, and what is refused."""

import argparse

import pytest
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from refusals import VALIDATED

from mindspeed_rl_plugin.layout.parallel import Parallel, count_layers, listed_layers


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Parallel(6, tp=4), "tp x pp x cp = 4 does not divide the world of 6"),
        (lambda: Parallel(8, tp=2, ep=8, etp=2), "etp x ep x pp = 16 does not divide the world of 8"),
        (lambda: Parallel(2, vpp=2), "2 virtual stages need more than one pipeline stage"),
        (lambda: Parallel(2).coordinates(2), "rank 2 is outside the world of 2"),
        (lambda: Parallel(3, pp=3).chunk_sizes(4), "4 layers do not divide over 3 pipeline stages"),
        (lambda: Parallel(2, pp=2, vpp=2).chunk_sizes(6), "do not divide into 2 virtual stages"),
        (lambda: Parallel(2, pp=2, chunk_layers=(3, 2)).chunk_sizes(6), r"6 layers do not fit pp=2 vpp=1.*\[3, 2\]"),
        (lambda: count_layers("Ettm|L"), "may hold only layers t between"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def megatron_args(**changes):
    """16 ranks, TP2 PP2."""
    return argparse.Namespace(**VALIDATED | dict(world_size=16, pipeline_model_parallel_size=2) | changes)


def test_parallel_from_arguments():
    args = megatron_args(pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=1)
    parallel = Parallel.from_megatron_args(args)
    assert parallel.dp == 2 and parallel.chunk_sizes(10) == (1, 3, 3, 3)
    for text, sizes in (("Ettt|(tt|)*2tL", (3, 2, 2, 1)), ("E|t*3|(t|)*2L", (0, 3, 1, 1, 0)), ("Et,t|tL", (2, 1))):
        args.pipeline_model_parallel_layout = text
        assert Parallel.from_megatron_args(args).chunk_layers == sizes


@pytest.mark.parametrize(
    "words, dense, every",
    [("7,7,7,8,8,8,8,8", 3, 1), ("15,15,16,15", 3, 1), ("16,16,16,13", 3, 1), ("1,3", 0, 1), ("6,2,4", 2, 2)],
)
def test_listed_layers_are_where_mindspeed_llm_builds_them(words, dense, every):
    """Played through as MindSpeed-LLM 2.3.0 does: each stage builds its entry of the list (get_num_layers_to_build),
    numbers it from the sum of the entries before (get_layer_offset), and looks for dense layers from an offset as of
    even stages (_transformer_block_build_layers with MindSpeed's _get_layer_offset)."""
    sizes = [int(word) for word in words.split(",")]
    layers, stages = sum(sizes), len(sizes)
    args = dict(num_layers=layers, pipeline_model_parallel_size=stages)
    args = argparse.Namespace(**args, first_k_dense_replace=dense, moe_layer_freq=every)
    assert listed_layers(words, args) == listed_layers(sizes, args) == tuple(sizes)
    parallel, offset = Parallel(stages, pp=stages, chunk_layers=tuple(sizes)), 0
    for stage in range(stages):
        (mine,) = parallel.stage_layers(layers, stage)
        assert list(mine) == list(range(offset, offset + sizes[stage]))
        for local, layer in enumerate(mine, 1):
            number = stage * (layers // stages) + local
            has_experts = number - 1 >= dense and (number - 1) % every == 0
            assert has_experts == (layer >= dense and layer % every == 0)
        offset += sizes[stage]


def spread_args(**changes):
    """EP2, experts spread over the tensor parallel ranks by MindSpeed."""
    spread = dict(expert_model_parallel_size=2, moe_tp_extend_ep=True, moe_token_dispatcher_type="alltoall_seq")
    return megatron_args(**spread | changes)


@pytest.mark.parametrize("etp", [None, 2])  # as a script has it, and as Megatron's validation leaves it
def test_experts_over_tensor_parallel_ranks_are_mindspeeds(etp):
    """--moe-tp-extend-ep: first expert of a rank as MindSpeed's MSBaseMoELayer has it, from Megatron's own ranks."""
    ours = Parallel.from_megatron_args(spread_args(expert_tensor_parallel_size=etp))
    megatron = Parallel.from_megatron_args(spread_args(expert_tensor_parallel_size=etp, moe_tp_extend_ep=False))
    assert (ours.ep, ours.expert_tp, ours.in_megatron(4), megatron.in_megatron(2)) == (4, 1, 2, 2)
    each = 8 // 4  # of 8 experts
    for rank in range(16):
        at = megatron.coordinates(rank)
        assert ours.in_megatron(ours.coordinates(rank).ep) == megatron.in_megatron(at.ep) == at.ep
        assert ours.coordinates(rank).ep * each == at.ep * each * 2 + at.tp * each


def test_experts_over_all_ranks_are_those_of_no_tensor_parallelism_for_experts():
    same = spread_args(expert_tensor_parallel_size=1, expert_model_parallel_size=4, moe_tp_extend_ep=False)
    ours, same = (Parallel.from_megatron_args(args) for args in (spread_args(), same))
    assert [same.coordinates(r) for r in range(16)] == [ours.coordinates(r) for r in range(16)]
    alone = Parallel.from_megatron_args(spread_args(tensor_model_parallel_size=1, expert_tensor_parallel_size=1))
    assert (alone.ep, alone.tp_in_ep) == (2, False)  # nothing to spread over


def place(groups, rank):
    """Position of a rank in the group that holds it."""
    return next(group.index(rank) for group in groups if rank in group)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize(
    "tp, pp, cp, dp, ep, etp", [(2, 3, 2, 2, 1, 2), (1, 2, 1, 4, 2, 1), (4, 1, 1, 2, 2, 2), (2, 2, 1, 4, 4, 1)]
)
def test_ranks_are_megatrons(order, tp, pp, cp, dp, ep, etp):
    parallel = Parallel(tp * pp * cp * dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    experts = RankGenerator(tp=etp, ep=ep, dp=parallel.edp, pp=pp, cp=1, order=order)
    for rank in range(parallel.world):
        expected = [place(dense.get_ranks(axis), rank) for axis in ("tp", "cp", "dp", "pp")]
        expected += [place(experts.get_ranks(axis), rank) for axis in ("tp", "ep", "dp")]
        assert list(parallel.coordinates(rank)) == expected, rank


@pytest.mark.parametrize(
    "layers, pp, vpp, first, last, embedding, loss",
    [
        (8, 2, 1, None, None, False, False),
        (8, 2, 2, None, None, False, False),
        (12, 3, 2, None, None, False, False),
        (10, 4, 1, 1, None, False, False),
        (10, 4, 1, None, 1, False, False),
        (9, 4, 1, 2, 1, False, False),
        (61, 6, 1, 11, None, False, False),
        (16, 4, 2, 2, 2, False, False),
        (7, 2, 1, None, None, True, False),
        (6, 2, 2, None, None, True, True),
        (5, 1, 1, None, None, False, False),
    ],
)
def test_layers_are_megatrons(layers, pp, vpp, first, last, embedding, loss):
    sizes = dict(first_layers=first, last_layers=last, embedding_counts=embedding, loss_counts=loss)
    config = argparse.Namespace(
        num_layers=layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=embedding,
        account_for_loss_in_pipeline_split=loss,
        pipeline_model_parallel_layout=None,
    )
    for p in range(pp):
        for v, mine in enumerate(Parallel(pp, pp=pp, vpp=vpp, **sizes).stage_layers(layers, p)):
            at = dict(vp_stage=v if vpp > 1 else None, pp_rank=p)
            start = get_transformer_layer_offset(config, **at)
            assert list(mine) == list(range(start, start + get_num_layers_to_build(config, **at)))
            assert list(mine.values()) == list(range(len(mine)))


@pytest.mark.parametrize(
    "given, pp, vpp, expected",
    [
        ("1,3", 2, 1, [({0: 0, 1: 2},), ({2: 0, 3: 1, 4: 2, 5: 3},)]),
        ({0, 7}, 2, 1, [({0: 1, 1: 2, 2: 3},), ({3: 0, 4: 1, 5: 2},)]),
        ("1,3", 2, 2, [({0: 0}, {2: 0, 3: 1}), ({1: 0}, {4: 0, 5: 1})]),
        ({0, 7}, 2, 2, [({0: 1}, {3: 0, 4: 1}), ({1: 0, 2: 1}, {5: 0})]),
        ("6,7", 2, 2, [({0: 0, 1: 1}, {4: 0, 5: 1}), ({2: 0, 3: 1}, {})]),  # the last chunk does nothing
        (5, 1, 1, [({0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 7},)]),  # as `plan` reads a single number
        (None, 1, 1, [(dict(enumerate(range(8))),)]),
    ],
)
def test_layers_that_do_nothing_keep_their_places(given, pp, vpp, expected):
    """Source: build_layers of MindSpeed's noop_layers and of MindSpeed-LLM's transformer_block.py: all 8 are built."""
    virtual = dict(virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None)
    args = megatron_args(pipeline_model_parallel_size=pp, num_layers=8, noop_layers=given, **virtual)
    parallel = Parallel.from_megatron_args(args)
    assert [parallel.stage_layers(8 - len(parallel.noop), p) for p in range(pp)] == expected


@pytest.mark.parametrize(
    "layers, pp, noop", [(4, 2, ""), (8, 2, "7"), (8, 2, "4,6,7"), (24, 3, "0,21,22,23"), (8, 4, "")]
)
def test_layers_of_dualpipev_are_where_mindspeed_builds_them(layers, pp, noop):
    """Source: get_num_layers_to_build and get_transformer_layer_offset of MindSpeed's dualpipev_chunks.py, which count
    layers that do nothing too."""
    args = megatron_args(pipeline_model_parallel_size=pp, num_layers=layers, noop_layers=noop, world_size=2 * pp)
    args.schedules_method = "dualpipev"
    parallel, each = Parallel.from_megatron_args(args), layers // pp // 2
    assert (parallel.vpp, parallel.last_stage) == (2, 0)
    real = [layer for layer in range(layers) if str(layer) not in noop.split(",")]
    for stage in range(pp):
        offsets = stage * each, layers - (stage + 1) * each
        built = [[(real.index(i), i - at) for i in range(at, at + each) if i in real] for at in offsets]
        assert [list(chunk.items()) for chunk in parallel.stage_layers(len(real), stage)] == built
