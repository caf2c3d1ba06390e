"""What is neutral because it is "read only with a flag that is refused": who reads it in the checkouts, and under what.

The checkouts come from MEGATRON_LM_PATH, MINDSPEED_PATH and MINDSPEED_LLM_PATH.
"""

import ast
from collections.abc import Iterator

import pytest
from checkouts import checkouts
from flag_table import verdict

from mindspeed_rl_plugin.checks.refused_flags import UPSTREAM

REASON = "read only with a flag that is refused"
REFUSED = {row.name for row in UPSTREAM}
# File, file:function or file:function:attribute that is reached under such a flag alone, or computes nothing -> why.
READERS = {
    **dict.fromkeys(("arguments.py", "features_manager/"), "checks, and patches under the feature's own flag"),
    "argument_utils.py": "copies into the configuration of a model, which has fp8 and fp4 off",
    **dict.fromkeys(("context_parallel/", "mindspeed/utils.py"), "masks of adaptive and of general ones, both refused"),
    **dict.fromkeys(("balanced_moe/", "expert_placement/", "layerzero/"), "named like its flag"),
    **dict.fromkeys(("fully_sharded_data_parallel/", "layerwise_disaggregated_training/"), "named like its flag"),
    **dict.fromkeys(("ldt_sft/", "mindspeed_llm/fsdp2/"), "a training of its own, with a script of its own"),
    **dict.fromkeys(("te/pytorch/fp8/", "grouped_matmul_util.py:get_gmm_quant_func"), "--fp8-format"),
    "checkpointing.py:load_checkpoint:ckpt_convert": "an old format of the optimizer, in the way in which it is loaded",
    "checkpointing.py:_load_base_checkpoint:non_persistent_global": "a folder for --non-persistent-ckpt-type",
    "checkpointing.py:_load_non_persistent_base_checkpoint": "the same",
    "checkpointing.py:save_checkpoint:non_persistent_local": "the same",
    "training.py:get_megatron_ddp_config": "copies for --use-megatron-fsdp",
    **dict.fromkeys((f"training.py:train{of}:reuse_grad_buf" for of in ("", "_step")), "refused without fp8"),
}


def conditions(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """What must hold, or not hold, where a node is evaluated."""
    while (parent := parents.get(node)) is not None:
        if isinstance(parent, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield parent.test
        elif isinstance(parent, ast.BoolOp):
            yield from (value for value in parent.values if value is not node)
        node = parent


def readers(source: str) -> Iterator[tuple[str, str]]:
    """(attribute, function) of each read of such a flag that no condition over a refused one guards."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
            continue
        if not ast.unparse(node.value).endswith(("args", "args()", ".checkpoint")):
            continue
        if verdict([f"--{node.attr.replace('_', '-')}"], node.attr, None) != ("neutral", REASON):
            continue
        over = (part for test in conditions(node, parents) for part in ast.walk(test))
        if not any(getattr(part, "attr", None) in REFUSED for part in over):
            where = node
            while where in parents and not isinstance(where, ast.FunctionDef):
                where = parents[where]
            yield node.attr, getattr(where, "name", "")


def test_a_condition_over_a_refused_flag_is_seen() -> None:
    lines = "if args.fp8 and x:\n  a = args.fp8_margin\nb = args.fp8_margin if args.fp8 else 0\nc = args.swiglu\n"
    assert list(readers(lines)) == []
    assert list(readers(lines + "def f():\n  if args.bf16:\n    d = args.fp8_margin")) == [("fp8_margin", "f")]


@pytest.mark.upstream
@pytest.mark.parametrize("variable", ["MEGATRON_LM_PATH", "MINDSPEED_PATH", "MINDSPEED_LLM_PATH"])
def test_nobody_reads_it_without(variable: str) -> None:
    if not checkouts(variable):
        pytest.skip(f"{variable} is not set")
    found, seen = set(), 0
    for checkout in checkouts(variable):
        for folder in ("megatron/training", "mindspeed", "mindspeed_llm"):
            for path in (checkout / folder).rglob("*.py"):
                name = str(path.relative_to(checkout))
                for flag, function in readers(path.read_text(errors="replace")):
                    seen, where = seen + 1, f"{name}:{function}:{flag}"
                    found |= set() if any(row in where for row in READERS) else {f"{checkout.name} {where}"}
    assert seen and sorted(found) == []
