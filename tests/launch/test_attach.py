"""When the patches are applied: after Megatron, or after MindSpeed's adaptor, in every order of imports."""

import importlib
import sys

import pytest

from mindspeed_rl_plugin.host import on_import
from mindspeed_rl_plugin.launch import attach as attaching

pytestmark = pytest.mark.quick

# `megatron.training`, and an adaptor that imports it and then works on it, both writing a log.
FILES = {
    "megatron/__init__.py": "",
    "megatron/training.py": "import attach_log\nattach_log.lines.append('megatron')\n",
    "mindspeed/__init__.py": "",
    "mindspeed/megatron_adaptor.py": "import attach_log\nattach_log.lines.append('mindspeed begins')\n"
    "import megatron.training\nattach_log.lines.append('mindspeed ends')\n",
    "megatron_adaptor.py": "import attach_log\nattach_log.lines.append('base begins')\n"
    "import megatron.training\nattach_log.lines.append('base ends')\n",
    "attach_log.py": "lines = []\n",
}

OF_FILES = ("megatron", "mindspeed", "mindspeed_llm", "megatron_adaptor", "attach_log")


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Log of what was imported, applied and reverted, in order."""
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    for name in [n for n in sys.modules if n.split(".")[0] in OF_FILES]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(on_import, "_before", {})
    monkeypatch.setattr(on_import, "_after", {})
    monkeypatch.setattr(attaching, "_finished", set())
    importlib.invalidate_caches()
    lines = importlib.import_module("attach_log").lines
    monkeypatch.setattr(attaching, "apply", lambda patches: lines.append("apply"))
    monkeypatch.setattr(attaching, "revert", lambda: lines.append("revert"))
    yield lines
    for name in [n for n in sys.modules if n.split(".")[0] in OF_FILES]:
        del sys.modules[name]


MEGATRON, MINDSPEED = "megatron.training", "mindspeed.megatron_adaptor"
BOTH = ["mindspeed begins", "megatron", "mindspeed ends"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["attach"], []),  # importing Megatron is left to the script
        (["attach", MEGATRON], ["megatron", "apply"]),
        ([MEGATRON, "attach"], ["megatron", "apply"]),
        (["attach", MINDSPEED], ["revert", *BOTH, "apply"]),
        ([MINDSPEED, "attach"], [*BOTH, "apply", "apply"]),
        (["attach", MEGATRON, MINDSPEED], ["megatron", "apply", "revert", BOTH[0], BOTH[2], "apply"]),
    ],
    ids=" ".join,
)
def test_in_every_order(log, steps, expected):
    for step in steps:
        attaching.attach() if step == "attach" else importlib.import_module(step)
    assert log == expected


def test_below_mindspeed_another_adaptor_comes_first(log, tmp_path, monkeypatch):
    """As in MindSpeed's core_r0.18.0: it reads the command line, so what RL takes over is gone by then."""
    (tmp_path / "mindspeed" / "__init__.py").write_text("import megatron_adaptor\n")
    monkeypatch.setattr(attaching, "from_command_line", lambda read_by="": log.append(f"take over {read_by}".rstrip()))
    attaching.attach()
    importlib.import_module(MINDSPEED)
    base = ["revert", "take over", "base begins", "megatron", "base ends", "take over megatron_adaptor", "apply"]
    above = ["revert", "take over", "mindspeed begins", "mindspeed ends", f"take over {MINDSPEED}", "apply"]
    assert log == base + above
