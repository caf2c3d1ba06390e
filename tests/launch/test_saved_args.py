"""A distributed checkpoint of another model is refused before one is built; Megatron would load what fits."""

from argparse import Namespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER, write_state
from mindspeed_rl_plugin.checkpoints.saved_args import check_rows
from mindspeed_rl_plugin.checks import flag_checks
from mindspeed_rl_plugin.launch.weights_fit import must_fit


@pytest.fixture(params=["common.pt", "entry"])
def saved(request, tmp_path):
    """`saved(args)`: a checkpoint with these arguments, where core up to 0.16 has them and where 0.19 has; its
    iteration folder."""

    def save(**args):
        folder = tmp_path / "load" / "iter_0000003"
        content, entries = {"args": Namespace(**args)}, {"w": torch.zeros(2)}
        if request.param == "entry":
            entries["common_state/shard_0_1"] = [content]
        as_they_are = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(entries, storage_writer=dcp.FileSystemWriter(folder), planner=as_they_are, no_dist=True)
        if request.param != "entry":
            torch.save(content, folder / "common.pt")
        (folder.parent / TRACKER).write_text("3")
        return folder

    return save


@pytest.mark.parametrize("more", [{}, {"num_layers": 4}, {"hidden_size": 128, "num_experts": 8}])
def test_each_other_size_is_named_with_both_values(saved, build, more):
    args = build({"num_experts": 2})
    folder = saved(num_layers=2, hidden_size=256, num_experts=2) if not more else saved(**more)
    args.load, args.save = str(folder.parent), None
    lines = list(flag_checks._start(args, None))
    assert len(lines) == len(more) and all(str(folder) in line for line in lines)
    for line, (name, value) in zip(lines, more.items(), strict=True):
        assert f"--{name.replace('_', '-')} is {value} in the checkpoint and {getattr(args, name)} in this run" in line


def test_a_format_that_megatron_would_not_read_is_refused(saved, build):
    args = build({"load": str(saved().parent), "save": None, "ckpt_format": "torch"})
    (line,) = flag_checks._start(args, None)
    assert "--ckpt-format is torch_dist in the checkpoint and torch in this run" in line
    args.ckpt_format = "torch_dist"
    assert not list(flag_checks._start(args, None))


@pytest.mark.parametrize(
    "stored, refused",
    [
        ({"dist_ckpt_optim_fully_reshardable": False}, True),
        ({"dist_ckpt_optim_fully_reshardable": True}, False),
        ({"ckpt_fully_parallel_save": True}, False),  # core 0.12
        ({"ckpt_fully_parallel_save": False}, True),
        ({"dist_ckpt_optim_fully_reshardable": False, "use_distributed_optimizer": False}, False),
    ],
)
def test_a_resume_in_a_layout_that_its_optimizer_state_cannot_take_is_refused(saved, build, stored, refused):
    folder = saved(**{"tensor_model_parallel_size": 4, "use_distributed_optimizer": True, **stored})
    write_state(str(folder.parent), 3, {})
    lines = list(flag_checks._start(build({"save": str(folder.parent)}), None))
    assert len(lines) == refused
    for line in lines:
        assert "--tensor-model-parallel-size is 4 in the checkpoint and 2 in this run" in line
        assert "--dist-ckpt-optim-fully-reshardable" in line
    assert not list(flag_checks._start(build({"save": str(folder.parent), "tensor_model_parallel_size": 4}), None))


@pytest.mark.parametrize("theirs, ours, refused", [(2, 1, True), (1, 2, True), (2, 4, False), (1, 1, False)])
def test_optimizer_state_of_experts_does_not_reshard_from_or_to_one_rank(saved, build, theirs, ours, refused):
    folder = saved(tensor_model_parallel_size=4, num_experts=8, expert_model_parallel_size=theirs)
    write_state(str(folder.parent), 3, {})
    now = {"save": str(folder.parent), "num_experts": 8, "expert_model_parallel_size": ours}
    lines = list(flag_checks._start(build(now), None))
    assert [f"-size is {theirs} in the checkpoint and {ours} in this run" in line for line in lines] == [True] * refused


@pytest.mark.parametrize("theirs, ours", [("dualpipev", None), (None, "dualpipev"), ("dualpipev", "dualpipev")])
def test_files_of_another_order_of_layers_are_refused(build, tmp_path, theirs, ours):
    """Sizes and names are those of virtual stages, so that Megatron would load them."""
    file = tmp_path / "iter_0000003" / "mp_rank_00_000" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"args": Namespace(**({"schedules_method": theirs} if theirs else {}))}, file)
    (tmp_path / TRACKER).write_text("3")
    args = build({"schedules_method": ours})
    args.load, args.save = str(tmp_path), None
    lines = list(flag_checks._start(args, None))
    shown = f"--schedules-method is {theirs or 'not given'} in the checkpoint and {ours or 'not given'} in this run"
    assert [shown in line for line in lines] == [True] * (theirs != ours)
    assert len(list(flag_checks.critic_problems(str(tmp_path), args))) == (theirs != ours)
    torch.save({"model": {}}, file)  # as MindSpeed-LLM's converter of DeepSeek-V3 writes it, in the order asked for
    assert not list(flag_checks._start(args, None))


def test_an_embedding_with_too_few_rows_is_refused(saved):
    folder = saved(padded_vocab_size=128)
    check_rows(str(folder), 128)
    with pytest.raises(ValueError, match="128 rows of the embedding.*129 tokens"):
        check_rows(str(folder), 129)


def test_what_megatron_refuses_of_a_distributed_checkpoint_is_refused_in_our_words():
    from megatron.core.dist_checkpointing.core import CheckpointingException

    with pytest.raises(ValueError, match="could not load the checkpoint: missing keys.*export"):
        with must_fit([], "the checkpoint"):
            raise CheckpointingException("missing keys")
