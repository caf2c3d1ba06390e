"""The names, signatures and environment variables that we use exist in the real torch-npu and vllm-ascend wheels.

The sources inside the wheels are parsed, never imported: they need an Ascend machine. `contract.toml` is the
table; a second group of tests finds what our own code uses and demands that the table has it.
"""

import ast
import functools
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import fetch
import pytest
import tomllib

from mindspeed_rl_plugin.host import engine_env

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "mindspeed_rl_plugin"
TABLE = tomllib.loads((HERE / "contract.toml").read_text())
VERSIONS = ("0.9.1", "0.11.0", "0.18.0", "0.23.0", "0.26.0rc1")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Wheel:
    """A wheel whose sources are read by path inside the archive."""

    path: Path
    trees: dict[str, ast.Module | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.archive = zipfile.ZipFile(self.path)
        self.files = frozenset(self.archive.namelist())

    def tree(self, file: str) -> ast.Module | None:
        """Parsed source, or None where the wheel has no such file."""
        if file not in self.trees:
            self.trees[file] = ast.parse(self.archive.read(file)) if file in self.files else None
        return self.trees[file]

    def metadata(self) -> str:
        name = next(n for n in self.files if n.endswith(".dist-info/METADATA"))
        return self.archive.read(name).decode()

    def find(self, file: str, name: str, seen: frozenset[str] = frozenset()) -> ast.AST | None:
        """The definition of a module's public name, through its imports, star imports too."""
        tree = self.tree(file)
        if tree is None or file in seen:
            return None
        for node in tree.body:
            if isinstance(node, Function | ast.ClassDef) and node.name == name:
                return node
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        wanted = name if alias.name == "*" else alias.name
                        for target in self._targets(file, node):
                            if definition := self.find(target, wanted, seen | {file}):
                                return definition
        return None

    def _targets(self, file: str, node: ast.ImportFrom) -> Iterator[str]:
        parts = (node.module or "").split(".") if node.module else []
        if node.level:
            base = PurePosixPath(file).parent
            for _ in range(node.level - 1):
                base = base.parent
            parts = [*base.parts, *parts]
        yield "/".join(parts) + ".py"
        yield "/".join(parts) + "/__init__.py"


@pytest.fixture(scope="session")
def wheels() -> dict[str, tuple[Wheel, Wheel]]:
    """vllm-ascend version -> its wheel and the torch-npu wheel it is paired with."""
    done = subprocess.run([sys.executable, str(HERE / "fetch.py")], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"the contract cannot be checked without the wheels: {done.stderr}", pytrace=False)
    wheel = functools.cache(Wheel)  # two pairs may share a torch-npu
    paths = [wheel(Path(line)) for line in done.stdout.split("\n") if line]
    pairs = zip(paths[::2], paths[1::2], strict=True)
    return {ascend.path.name.split("-")[1]: (ascend, npu) for ascend, npu in pairs}


def accepts(function: Function, positional: int, bound: bool) -> bool:
    """Whether a call with so many positional arguments and no others fits the signature."""
    a = function.args
    names = [*a.posonlyargs, *a.args][bool(bound) :]
    required = len(names) - len(a.defaults)
    keywords_too = all(d is not None for d in a.kw_defaults)
    return required <= positional and (positional <= len(names) or a.vararg is not None) and keywords_too


def nodes(tree: ast.AST | None, kind: type) -> list:
    assert tree is not None, "the wheel has no such file"
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def check_methods(node: ast.ClassDef, methods: dict[str, int]) -> None:
    defined = {n.name: n for n in node.body if isinstance(n, Function)}
    assert methods.keys() <= defined.keys(), f"{node.name} has no {methods.keys() - defined.keys()}"
    for name, arguments in methods.items():
        assert accepts(defined[name], arguments, bound=True), f"{node.name}.{name} takes other arguments"


def check_body(tree: ast.Module | None, row: dict) -> None:
    """What a function does, as far as our fakes do it too: its source holds some words, and lacks others."""
    names = [n for n in nodes(tree, Function) if n.name == row["name"]]
    within = [n for c in nodes(tree, ast.ClassDef) if c.name == row.get("class") for n in c.body if n in names]
    (function,) = within if "class" in row else names[:1]
    source = ast.unparse(function)
    lost = [words for words in row.get("holds", ()) if words not in source]
    new = [words for words in row.get("lacks", ()) if words in source]
    assert not lost and not new, f"{row['file']} {row['name']}: without {lost}, with {new}; see the row's comment"


def check_npu(npu: Wheel, row: dict) -> None:
    """A name of torch_npu.npu: a class with methods, or a function."""
    node = npu.find("torch_npu/npu/__init__.py", row["name"])
    assert isinstance(node, ast.ClassDef if "methods" in row else Function), f"{row['name']} is {node}"
    if "methods" in row:
        check_methods(node, row["methods"])
    else:
        assert accepts(node, row["arguments"], bound=False), f"torch_npu.npu.{row['name']} takes other arguments"


def test_pairs_belong_together(wheels) -> None:
    assert tuple(wheels) == VERSIONS
    for ascend, npu in wheels.values():
        pinned = npu.path.name.split("-")[1]
        assert re.search(rf"^Requires-Dist: torch-npu==.*{re.escape(pinned)}$", ascend.metadata(), re.M), ascend.path


@pytest.mark.parametrize(
    "kind, row, version",
    [
        pytest.param(kind, row, version, id=f"{version}-{kind}-{row.get('class', '')}{row.get('name', '')}-{i}")
        for kind, rows in TABLE.items()
        for i, row in enumerate(rows)
        for version in VERSIONS
        if version in row.get("only", VERSIONS) and version not in row.get("except", ())
    ],
)
def test_a_row_of_the_contract(wheels, kind, row, version) -> None:
    ascend, npu = wheels[version]
    if kind in ("function", "class"):
        check_npu(npu, row)
        return
    tree = (npu if row["file"].startswith("torch_npu/") else ascend).tree(row["file"])
    calls = nodes(tree, ast.Call)
    if kind == "body":
        check_body(tree, row)
        return
    if kind in ("method", "attribute"):
        node = next((n for n in nodes(tree, ast.ClassDef) if n.name == row["class"]), None)
        assert node is not None, f"{row['file']} defines no class {row['class']}"
    if kind == "method":
        check_methods(node, row["methods"])
    elif kind == "attribute":
        stored = {ast.unparse(n) for n in nodes(node, ast.Attribute) if isinstance(n.ctx, ast.Store)}
        assert {f"self.{name}" for name in row["names"]} <= stored, stored
    elif kind == "constant":
        strings = {n.value for n in nodes(tree, ast.Constant) if isinstance(n.value, str)}
        assert set(row["values"]) <= strings, f"{row['file']} has no {set(row['values']) - strings}"
    elif kind == "bare_call":
        bare = {ast.unparse(n.func) for n in calls if not n.args and not n.keywords}
        assert row["name"] in bare, f"{row['file']} passes arguments to {row['name']} now: see the row's comment"
    else:
        assert kind == "environment"
        reads = [n.args[0] for n in calls if ast.unparse(n.func) in ("os.getenv", "os.environ.get") and n.args]
        assert row["name"] in {getattr(n, "value", None) for n in reads}, f"{row['file']} reads no {row['name']}"


def documented() -> list[str]:
    """Rows of the README that name a pair of the contract."""
    pairs = fetch.pins()
    rows = (HERE.parents[1] / "README.md").read_text().splitlines()
    both = zip(pairs[::2], pairs[1::2], strict=True)
    return [next((r for r in rows if r.startswith(f"| {a} | {t} |")), f"none with {a}, {t}") for (_, a), (_, t) in both]


def test_the_readme_names_the_pairs_of_the_contract() -> None:
    assert not [row for row in documented() if not row.startswith("|")]


@pytest.mark.upstream
def test_mindspeeds_torch_has_a_pair() -> None:
    """What MindSpeed's own README names as its torch is that of a torch-npu in the contract."""
    if "MINDSPEED_PATH" not in os.environ:
        pytest.skip("MINDSPEED_PATH is not set")
    texts = [(Path(path) / "README.md").read_text() for path in os.environ["MINDSPEED_PATH"].split(os.pathsep)]
    lines = [next(line for line in text.splitlines() if line.startswith("| PyTorch ")) for text in texts]
    named = set.intersection(*(set(re.findall(r"\d+\.\d+\.\d+", line)) for line in lines))
    pairs = dict(zip(fetch.pins()[1::2], documented(), strict=True))
    with_mindspeed = {npu for (_, npu), row in pairs.items() if not row.split("|")[4].strip().startswith("none")}
    assert with_mindspeed and with_mindspeed <= named


def used_names() -> dict[str, set[str]]:
    """Names that our code takes from torch_npu.npu (`Device.api.NAME`), and the files that do."""
    used: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if "host" in path.relative_to(PACKAGE).parts:
            continue  # stands in for torch_npu and runs only without it
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("api", "npu"):
                used.setdefault(node.attr, set()).add(path.name)
    return used


def test_the_table_has_every_name_that_we_use() -> None:
    known = {row["name"] for kind in ("function", "class") for row in TABLE[kind]}
    used = used_names()
    assert "memory_allocated" in used  # the search works at all
    assert not {n: files for n, files in used.items() if n not in known}
    assert not known - set(used), "rows that nothing uses"


def test_the_table_has_every_variable_that_we_set_or_refuse() -> None:
    known = {row["name"] for row in TABLE["environment"]}
    assert {*engine_env.REQUIRED_NPU, *engine_env.ALLOCATOR_SETTINGS["npu"]} == known
