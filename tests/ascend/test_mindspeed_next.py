"""MindSpeed's branches core_r0.16.0 and core_r0.18.0, read and not run: their Megatron is 0.16 and 0.18, and the second
needs MegatronAdaptor and TransformerEngineNPU.

What the plugin uses of MindSpeed is there. What MindSpeed puts in the place of functions that the plugin wraps or the
engine needs is known, and so are its flags. MINDSPEED_NEXT_PATH names checkouts.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from flag_table import NEUTRAL_GROUPS, verdict

from mindspeed_rl_plugin.host.torch_originals import RESTORED
from mindspeed_rl_plugin.launch.patches import PATCHES
from mindspeed_rl_plugin.launch.patching import BASE_ADAPTOR

# File -> names that are defined in it, with the parameters or fields that we rely on.
USED = {
    "megatron_adaptor.py": {"repatch": ["args"]},
    "features_manager/feature.py": {
        "__init__": ["self", "feature_name", "optimization_level"],
        "register_args": ["self", "parser"],
        "register_patches": ["self", "patch_manager", "args"],
    },
    "features_manager/features_manager.py": {"apply_features_patches": ["cls", "mindspeed_args"]},
    "patch_utils.py": {"register_patch": ["orig_func_name", "new_func"]},
}
FIELDS = {
    "features_manager/features_manager.py": {"FEATURES_LIST"},
    "patch_utils.py": {"patches_info", "orig_module", "orig_func_name", "orig_func", "patch_func", "wrappers"},
}
# Functions that we wrap -> what replaces them, and what becomes of that under RL; wrappers keep ours within.
_LAYERZERO = "with --layerzero, which is refused"
REPLACED = {
    ("train_step", "train_step"): "dualpipev's is called as Megatron's; that of --async-log-allreduce is refused",
    ("setup_model_and_optimizer", "layerzero_setup_model_and_optimizer"): _LAYERZERO,
    ("save_checkpoint", "save_checkpoint"): _LAYERZERO,
}
# Flags that no parser of the other versions has.
NEW = {
    "--adaptive-recompute-device-size": "the same numbers, recomputed",
    "--adaptive-recompute-device-swap": "the same numbers, recomputed",
    "--adaptive-recompute-profiling-step": "the same numbers, recomputed",
    "--apply-rope-in-complex": "read by sparse attention, which is refused",
}


@pytest.fixture(scope="module", params=os.environ.get("MINDSPEED_NEXT_PATH", "").split(os.pathsep))
def trees(request) -> dict[str, ast.Module]:
    if not request.param:
        pytest.skip("MINDSPEED_NEXT_PATH is not set")
    root = Path(request.param) / "mindspeed"
    files = [*root.glob("*.py"), *(root / "features_manager").rglob("*.py"), *(root / "op_builder").rglob("*.py")]
    return {str(path.relative_to(root)): ast.parse(path.read_text()) for path in files}


def calls(trees: dict[str, ast.Module], name: str) -> Iterator[ast.Call]:
    for tree in trees.values():
        yield from (n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == name)


def patches(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Dotted names that are patched, and the names of what is put there."""
    pairs = (call.args[:2] for call in calls(trees, "register_patch") if len(call.args) > 1)
    return {(old.value, getattr(new, "id", "?")) for old, new in pairs if isinstance(old, ast.Constant)}


@pytest.mark.upstream
def test_what_we_use_of_mindspeed_is_there(trees) -> None:
    for file, functions in USED.items():
        defined = {
            n.name: [a.arg for a in n.args.args] for n in ast.walk(trees[file]) if isinstance(n, ast.FunctionDef)
        }
        assert {name: defined[name][: len(given)] for name, given in functions.items()} == functions
    for file, names in FIELDS.items():
        stored = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(trees[file])}
        assert names <= stored
    assert {"op_builder/builder.py", "op_builder/atb_builder.py"} <= set(trees)


@pytest.mark.upstream
def test_what_it_replaces_is_known(trees) -> None:
    ours = {patch.target: patch.name for patch in PATCHES}
    wrapping = ("wrapper", "decorator")
    outright = {(ours[old], new) for old, new in patches(trees) if old in ours and not new.endswith(wrapping)}
    assert outright == set(REPLACED)
    torchs = {old for old, _ in patches(trees) if old.startswith("torch.")}
    first = [name.name for n in ast.walk(trees["__init__.py"]) if isinstance(n, ast.Import) for name in n.names]
    below = BASE_ADAPTOR in first  # torch.compile and its like are its own then
    assert torchs and torchs & set(RESTORED) == (set() if below else set(RESTORED))


@pytest.mark.upstream
def test_every_flag_has_a_verdict(trees) -> None:
    """By its name, or by the title of a group, which the feature's file has among its words."""
    unknown = []
    for file, tree in trees.items():
        words = {str(n.value).replace("-", "_") for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        titles = [title for titles in NEUTRAL_GROUPS.values() for title in titles if title in words]
        for call in calls({file: tree}, "add_argument") if file.startswith("features_manager") else ():
            flags = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
            dest = next((k.value.value for k in call.keywords if k.arg == "dest"), flags[0][2:].replace("-", "_"))
            if flags[0] not in NEW and not any(verdict(flags, dest, title) for title in (None, *titles)):
                unknown.append(flags[0])
    assert unknown == []
