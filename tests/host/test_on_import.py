"""Actions before and after an import, whoever imports, however often they are asked for."""

import importlib
import sys

import pytest

from mindspeed_rl_plugin.host import on_import


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes importable modules; forgets them, and what was asked of them, afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(on_import, "_before", {})
    monkeypatch.setattr(on_import, "_after", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)

    def write(name, text=""):
        path = tmp_path.joinpath(*name.split("."))
        path.mkdir(parents=True, exist_ok=True)
        (path / "__init__.py").write_text(text)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_order_of_events(modules):
    modules("watched_events", "EVENTS = []")
    modules("watched_one", "from watched_events import EVENTS\nEVENTS.append('body')\nVALUE = 1")
    from watched_events import EVENTS

    on_import.before_import("watched_one", lambda: EVENTS.append("before"))
    on_import.after_import("watched_one", lambda module: EVENTS.append(("after", module.VALUE)))
    assert "watched_one" not in sys.modules
    import watched_one

    assert watched_one.VALUE == 1
    assert EVENTS == ["before", "body", ("after", 1)]


def test_reload_acts_again(modules):
    modules("watched_three")
    seen = []
    on_import.after_import("watched_three", seen.append)
    import watched_three

    importlib.reload(watched_three)
    assert seen == [watched_three] * 2


def test_absent_modules_stay_absent(modules):
    on_import.after_import("watched_absent", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="watched_absent"):
        import watched_absent  # noqa: F401
    assert importlib.util.find_spec("watched_absent") is None


def test_source_can_still_be_inspected(modules):
    """Libraries read the source of functions through the loader."""
    import inspect

    modules("watched_four", "def f():\n    return 4\n")
    on_import.after_import("watched_four", lambda module: None)
    import watched_four

    assert "return 4" in inspect.getsource(watched_four.f)
