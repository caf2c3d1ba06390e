"""When the patches are applied: after Megatron, or after MindSpeed's adaptor, in every order of imports."""

import importlib
import sys

import pytest

from mindspeed_rl_plugin.host import on_import
from mindspeed_rl_plugin.launch import attach as attaching

# `megatron.training`, and an adaptor that imports it and then works on it, both writing a log.
FILES = {
    "megatron/__init__.py": "",
    "megatron/training.py": "import attach_log\nattach_log.lines.append('megatron')\n",
    "mindspeed/__init__.py": "",
    "mindspeed/megatron_adaptor.py": "import attach_log\nattach_log.lines.append('mindspeed begins')\n"
    "import megatron.training\nattach_log.lines.append('mindspeed ends')\n",
    "attach_log.py": "lines = []\n",
}


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Log of what was imported, applied and reverted, in order."""
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    for name in [n for n in sys.modules if n.split(".")[0] in ("megatron", "mindspeed", "mindspeed_llm", "attach_log")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(on_import, "_before", {})
    monkeypatch.setattr(on_import, "_after", {})
    monkeypatch.setattr(attaching, "_attached", False)
    monkeypatch.setattr(attaching, "_finished", set())
    importlib.invalidate_caches()
    lines = importlib.import_module("attach_log").lines
    monkeypatch.setattr(attaching, "apply", lambda patches: lines.append("apply"))
    monkeypatch.setattr(attaching, "revert", lambda: lines.append("revert"))
    yield lines
    for name in [n for n in sys.modules if n.split(".")[0] in ("megatron", "mindspeed", "attach_log")]:
        del sys.modules[name]


MEGATRON, MINDSPEED = "megatron.training", "mindspeed.megatron_adaptor"
BOTH = ["mindspeed begins", "megatron", "mindspeed ends"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["attach"], []),  # importing Megatron is left to the script
        (["attach", MEGATRON], ["megatron", "apply"]),
        ([MEGATRON, "attach", "attach"], ["megatron", "apply"]),
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
