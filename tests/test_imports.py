"""The import rule of the package, as a table: which folder may import which, and which libraries.

Walks the syntax trees: imports inside functions count too, imports under TYPE_CHECKING only for cycles.
"""

import ast
import graphlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

PACKAGE = Path(__file__).parents[1] / "mindspeed_rl_plugin"
NAME = PACKAGE.name

# Rows from the base up; a folder may import those in earlier rows, never those in its own row or a later one.
# A module may stand in a row of its own, else its folder's row counts.
TABLES = ("checks.refusal", "checks.refused_flags", "checks.unsupported_models")
ORDER: tuple[tuple[str, ...], ...] = (
    ("__init__", "rows", "config", "environment", "device", "processes", "ranks", "status", *TABLES),
    ("workers", "control_tokens"),
    ("dock", "algorithms", "reward", "prompts", "monitor", "layout"),
    ("weights", "service"),
    ("adapters",),
    ("engine", "forward", "gateway"),
    ("episodes",),
    ("critic", "update"),
    ("stages",),
    ("generators",),
    ("loop", "client"),
    ("checkpoints",),
    ("checks",),
    ("launch",),
    ("tools",),
    ("adaptor",),
    ("__main__",),
)
# Folders beside the row: who may import them, and what they may import.
HOST_USERS = {"host", "launch", "adaptor", "__main__", "engine", "loop", "tools"}
HOST_MAY = {"rows", "config", "environment", "device"}

# library -> folders that may import it (a module name narrows a folder).
LIBRARIES: dict[str, set[str]] = {
    "megatron": {
        "launch",
        "checks",
        "host",
        "forward",
        "stages",
        "critic",
        "update",
        "adaptor",
        "loop",
        "tools",
        "adapters",
    }
    | {"weights.transfer", "weights.offload"},
    "mindspeed": {"launch", "host", "tools"},
    "mindspeed_llm": {"launch", "host", "tools"},
    "vllm": {"engine", "host"},
    "vllm_ascend": {"engine", "host"},
    "ray": {"generators.on_ray"},
    "torch_npu": {"device", "host"},
}
# Folders that may read or set the process environment; on_ray is a process of its own.
ENVIRONMENT = {"environment", "device", "host", "tools", "generators.on_ray"}
# Libraries that are slow or that patch things when imported: never at the top of a module.
LAZY = {"ray", "vllm", "vllm_ascend", "mindspeed", "mindspeed_llm", "torch_npu"}


def modules():
    """(dotted name inside the package, path) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        yield name, path


def imports(tree, name, types=False):
    """(imported dotted name, whether it is at the top level) of one module, relative ones resolved; types: those under
    TYPE_CHECKING too."""
    skipped = set()
    for node in ast.walk(tree):
        if not types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(inner) for part in node.body for inner in ast.walk(part)}
    outer = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    top = {id(inner) for node in outer for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = f"{NAME}.{name}".split(".")[: -node.level]
                base = ".".join([*parents, *([base] if base else [])])
            if base == NAME:
                yield from ((f"{NAME}.{alias.name}", id(node) in top) for alias in node.names)
            elif base.startswith(NAME + "."):
                # `from folder import module` names the module; a function's name is harmless here.
                yield from ((f"{base}.{alias.name}", id(node) in top) for alias in node.names)
            else:
                yield base, id(node) in top


def row_of(name):
    """Row of a module: its own, else its folder's; None for a folder that the table lacks."""
    parts = name.split(".")
    for length in (2, 1):
        key = ".".join(parts[:length])
        for number, row in enumerate(ORDER):
            if key in row:
                return number
    return None


def allowed(name, imported):
    """Whether module `name` may import `imported`, both dotted names inside the package."""
    folder, other = name.split(".")[0], imported.split(".")[0]
    if folder == other:
        return row_of(imported) is None or row_of(name) is None or row_of(imported) <= row_of(name) or name == folder
    if other == "host":
        return folder in HOST_USERS
    if folder == "host":
        return other in HOST_MAY
    here, there = row_of(name), row_of(imported)
    if here == 0:
        return there == 0
    return here is not None and there is not None and there < here


def violations():
    problems = []
    for name, path in modules():
        tree = ast.parse(path.read_text(), filename=str(path))
        folder, two = name.split(".")[0], ".".join(name.split(".")[:2])
        for target, top in imports(tree, name):
            first = target.split(".")[0]
            if first == NAME:
                inside = target.removeprefix(NAME).lstrip(".")
                if inside and not allowed(name, inside):
                    problems.append(f"{name} imports {inside}")
            elif first in LIBRARIES and not {folder, two} & LIBRARIES[first]:
                problems.append(f"{name} imports {target}")
            if first in LAZY and top:
                problems.append(f"{name} imports {target} at its top level")
        problems += [f"{name} {use}" for use in environment_uses(tree) if not {folder, two} & ENVIRONMENT]
    return problems


def environment_uses(tree):
    """Uses of os.environ, os.getenv and os.putenv."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb"):
            yield f"uses {ast.unparse(node)} in line {node.lineno}"


def test_the_import_rule():
    assert violations() == []


def test_no_file_imports_itself_over_others():
    names = {f"{NAME}.{name}" for name, _ in modules()}
    graph = {}
    for name, path in modules():
        targets = {target for target, _ in imports(ast.parse(path.read_text()), name, types=True)}
        files = {target if target in names else target.rpartition(".")[0] for target in targets}
        graph[f"{NAME}.{name}"] = files & names
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the files in its way


def test_the_loop_is_built_of_few_modules():
    """Stages, schedules and engines build themselves; `loop.build` only puts them together."""
    tree = ast.parse((PACKAGE / "loop" / "build.py").read_text())
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert len([module for module in froms if module.startswith(NAME)]) <= 20, sorted(froms)


def test_few_files_know_of_episodes():
    """Files outside of episodes/ and gateway/ that contain the word in whatever case, in comments and flags' texts too;
    the others ask `engine.response_kind`."""
    files = [
        name
        for name, path in modules()
        if name.split(".")[0] not in ("episodes", "gateway") and "episode" in path.read_text().lower()
    ]
    assert len(files) <= 12, files


def twice(found):
    """Names that several places have, an underscore at the beginning not counted. found: pairs (name, place)."""
    places = {}
    for name, place in found:
        places.setdefault(name.lstrip("_"), set()).add(place)
    return {name: sorted(where) for name, where in places.items() if len(where) > 1}


def constants(tree):
    """(name, value's text) of each constant of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            single = [one for target in targets for one in getattr(target, "elts", [target])]
            names = [one.id for one in single if isinstance(one, ast.Name)]
            yield from ((name, ast.unparse(node.value)) for name in names if name.lstrip("_").isupper())


def test_a_name_has_one_meaning():
    """Of classes, nested ones too, and of files. Constants of one name have one value; each stage has its SPEC."""
    trees = {name: ast.parse(path.read_text()) for name, path in modules()}
    nodes = [(node, name) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert twice((node.name, f"{name}:{node.lineno}") for node, name in nodes) == {}
    assert twice((path.stem, name) for name, path in modules() if path.stem != "__init__") == {}
    assert twice(pair for tree in trees.values() for pair in constants(tree) if pair[0] != "SPEC") == {}


def test_the_page_draws_the_table():
    rows = [[entry for entry in row if "." not in entry and entry != "__init__"] for row in reversed(ORDER)]
    drawing = "\n".join("   ".join(row) for row in rows)
    assert f"```text\n{drawing}\n```" in (PACKAGE.parent / "docs" / "development.md").read_text(), drawing


def test_every_folder_is_in_the_table():
    known = {entry.split(".")[0] for row in ORDER for entry in row} | {"host"}
    assert {name.split(".")[0] for name, _ in modules()} <= known


@pytest.mark.parametrize(
    ("name", "imported", "fine"),
    [
        ("dock.dock", "rows", True),
        ("dock.dock", "dock.api", True),
        ("dock.dock", "reward.reward_pool", False),
        ("algorithms.losses", "update.step", False),
        ("weights.transfer", "layout.transfer_plan", True),
        ("layout.transfer_plan", "weights.offload", False),
        ("layout.layout", "layout.parallel", True),
        ("rows", "config", True),
        ("rows", "dock.api", False),
        ("launch.launch", "loop.loop", True),
        ("loop.loop", "launch.launch", False),
        ("launch.hooks", "loop.loop", True),
        ("update.step", "stages.logprobs", False),
        ("update.step", "forward.head", True),
        ("forward.head", "host", False),
        ("adaptor", "host", True),
    ],
)
def test_the_rule_itself(name, imported, fine):
    assert allowed(name, imported) is fine


def test_relative_imports_and_type_checking_are_understood():
    source = (
        "from typing import TYPE_CHECKING\nfrom . import api\nfrom ..reward import reward_pool\n"
        "if TYPE_CHECKING:\n    from mindspeed_rl_plugin.update import step\n"
        "def f():\n    from mindspeed_rl_plugin import loop\n    import vllm\n"
    )
    lines = dict(imports(ast.parse(source), "dock.dock"))
    assert lines == {
        "typing": True,
        f"{NAME}.dock.api": True,
        f"{NAME}.reward.reward_pool": True,
        f"{NAME}.loop": False,
        "vllm": False,
    }
