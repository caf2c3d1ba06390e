"""Compares Parallel with Megatron's RankGenerator, layer counts and layer offsets. Run by test_parallel."""

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

from types import SimpleNamespace  # noqa: E402

from megatron.core.parallel_state import RankGenerator  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

from mindspeed_rl_plugin.reshard.layout import Parallel  # noqa: E402


def place(groups, rank):
    """Position of a rank in the group that holds it."""
    return next(group.index(rank) for group in groups if rank in group)


ranks = 0
for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
    for tp, pp, cp, dp, ep, etp in [(2, 3, 2, 2, 1, 2), (1, 2, 1, 4, 2, 1), (4, 1, 1, 2, 2, 2), (2, 2, 1, 4, 4, 1)]:
        parallel = Parallel(tp * pp * cp * dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, order=order)
        dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        experts = RankGenerator(tp=etp, ep=ep, dp=parallel.edp, pp=pp, cp=1, order=order)
        for rank in range(parallel.world):
            expected = [place(dense.get_ranks(axis), rank) for axis in ("tp", "cp", "dp", "pp")]
            expected += [place(experts.get_ranks(axis), rank) for axis in ("tp", "ep", "dp")]
            assert list(parallel.coordinates(rank)) == expected, (parallel, rank, expected)
            ranks += 1

chunks = 0
for layers, pp, vpp, first, last, embedding, loss in [
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
]:
    parallel = Parallel(
        pp, pp=pp, vpp=vpp, first_layers=first, last_layers=last, embedding_counts=embedding, loss_counts=loss
    )
    config = SimpleNamespace(
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
        for v, mine in enumerate(parallel.stage_layers(layers, p)):
            stage = v if vpp > 1 else None
            count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=p)
            start = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=p)
            assert mine == range(start, start + count), (config, p, v, mine, start, count)
            chunks += 1
print(f"placements agree: {ranks} ranks, {chunks} chunks")
