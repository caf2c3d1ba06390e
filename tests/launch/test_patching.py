"""The patch table on a synthetic Megatron: every importer is rebound, once, and losing a wrapper is noticed."""

import functools
import sys
import types

import pytest

from mindspeed_rl_plugin.launch import patching as applying
from mindspeed_rl_plugin.launch.patches import PATCHES
from mindspeed_rl_plugin.launch.patching import NEWEST, OLDEST, Patch

pytestmark = pytest.mark.quick


def counting(original, x, *rest):
    calls.append("hook")
    return original(x, *rest)


calls: list[str] = []


def module(monkeypatch, name, **content):
    """A module of this name for the time of a test."""
    made = types.ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def tiny(monkeypatch):
    """A module with one function, three importers of it, and a table of one row."""
    modules = {}
    for name in ("tiny", "tiny.training", "tiny.user", "tiny.alias", "megatron.core.package_info"):
        modules[name] = module(monkeypatch, name)
    for name in ("mindspeed.megatron_adaptor", "mindspeed_llm.tasks.megatron_adaptor_v2"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def step(x, y=1):
        calls.append("original")
        return x

    step.__module__ = "tiny.training"
    modules["tiny.training"].step = step
    modules["tiny.user"].step = step
    modules["tiny.alias"].another_name = step
    info = modules["megatron.core.package_info"]
    info.MAJOR, info.MINOR, info.PATCH = 0, 16, 1
    row = Patch("tiny.training.step", counting, ("x",), "a test", "tiny.py:1", "never")
    monkeypatch.setattr(applying, "_applied", ())
    monkeypatch.setattr(applying, "_originals", {})
    calls.clear()
    return types.SimpleNamespace(
        original=step,
        training=modules["tiny.training"],
        user=modules["tiny.user"],
        alias=modules["tiny.alias"],
        info=info,
        row=row,
    )


def test_every_importer_is_rebound_and_twice_is_once(tiny, capsys):
    applying.apply((tiny.row,))
    applying.apply((tiny.row,))
    assert tiny.user.step is tiny.training.step is tiny.alias.another_name is not tiny.original
    assert tiny.user.step(3) == 3
    assert calls == ["hook", "original"]
    applying.assert_in_force()
    assert capsys.readouterr().out == "[rl] RL is attached to Megatron; wrapped functions: step\n"


def test_revert_puts_the_original_back_everywhere(tiny):
    applying.apply((tiny.row,))
    applying.revert()
    assert tiny.user.step is tiny.training.step is tiny.alias.another_name is tiny.original
    applying.apply((tiny.row,))
    tiny.user.step(0)
    assert calls == ["hook", "original"]


def test_decorators_on_top_keep_a_wrapper_in_force(tiny):
    applying.apply((tiny.row,))
    inner = tiny.training.step

    def plain(*args):  # no functools.wraps: only the closure knows
        return inner(*args)

    for decorated in (plain, functools.wraps(inner)(lambda *a: inner(*a)), functools.partial(inner, y=2)):
        tiny.training.step = decorated
        applying.assert_in_force()


def replaced(tiny):
    tiny.training.step = lambda x: x


def kept(tiny):
    tiny.user.kept = tiny.original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced, r"patch tiny.training.step is not in force: the name now holds .*lambda"),
        (kept, r"not in force in tiny.user: its 'kept' is still the original"),
    ],
)
def test_a_patch_that_lost_its_place_is_an_error(tiny, change, message):
    applying.apply((tiny.row,))
    change(tiny)
    with pytest.raises(RuntimeError, match=message):
        applying.assert_in_force()


@pytest.mark.parametrize(
    ("version", "supported"),
    [((0, 12, 0), False), ((0, 12, 1), True), ((0, 19, 7), True), ((0, 20, 0), False), ((1, 0, 0), False)],
)
def test_versions_outside_the_range_are_an_error(tiny, version, supported):
    tiny.info.MAJOR, tiny.info.MINOR, tiny.info.PATCH = version
    if supported:
        applying.apply((tiny.row,))
        return
    with pytest.raises(RuntimeError, match=r"0\.12\.1 to 0\.19\.x"):
        applying.apply((tiny.row,))
    assert tiny.training.step is tiny.original


@pytest.mark.parametrize(
    ("target", "function", "message"),
    [
        ("tiny.training.step", None, r"step does not exist; expected a function step\(x, \.\.\.\) in tiny.training"),
        ("tiny.training.step", lambda y: y, r"begins with parameters \('y',\); expected a function step\(x, "),
        ("no_megatron.training.step", None, r"No module named 'no_megatron'.*Megatron-LM checkout on PYTHONPATH"),
    ],
)
def test_a_target_that_is_missing_or_another_says_what_was_expected(tiny, target, function, message):
    tiny.training.step = function
    with pytest.raises(RuntimeError, match=message):
        applying.apply((Patch(target, counting, ("x",), "", "x.py:1", ""),))


def test_a_decorator_that_hides_the_parameters_is_accepted(tiny):
    tiny.training.step = lambda *args: args[0]
    applying.apply((tiny.row,))
    assert tiny.training.step(5) == 5
    assert calls == ["hook"]


def test_under_mindspeed_the_rows_are_a_feature_of_its_manager(tiny, monkeypatch):
    """A manager with the interface of MindSpeed's: the feature survives its re-patching."""

    class Manager:
        wrappers: list = []

        @classmethod
        def register_patch(cls, target, wrapper):
            assert target == "tiny.training.step"
            if wrapper not in cls.wrappers:
                cls.wrappers.append(wrapper)

        @classmethod
        def apply_patches(cls):
            function = tiny.original
            for wrapper in cls.wrappers:
                function = wrapper(function)
            tiny.training.step = tiny.user.step = function

    class Feature:
        def __init__(self, name, optimization_level):
            assert optimization_level == 0

    features: list = []
    for name in ("mindspeed.megatron_adaptor", "mindspeed", "mindspeed.features_manager"):
        module(monkeypatch, name)
    module(monkeypatch, "mindspeed.features_manager.feature", MindSpeedFeature=Feature)
    manager = types.SimpleNamespace(FEATURES_LIST=features)
    module(monkeypatch, "mindspeed.features_manager.features_manager", MindSpeedFeaturesManager=manager)

    applying.apply((tiny.row,))
    applying.apply((tiny.row,))
    assert len(features) == 1
    assert tiny.alias.another_name is tiny.training.step, "an import under another name is rebound too"
    tiny.user.step(1)
    assert calls == ["hook", "original"]
    applying.assert_in_force()

    # MindSpeed re-patches: everything off, then every feature registers again.
    Manager.wrappers.clear()
    tiny.training.step = tiny.user.step = tiny.alias.another_name = tiny.original
    features[0].register_patches(Manager, None)
    Manager.apply_patches()
    calls.clear()
    tiny.user.step(1)
    assert calls == ["hook", "original"]


def test_the_table_reads_as_data():
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)
    assert OLDEST[:2] <= NEWEST
    for patch in PATCHES:
        assert patch.wrapper.__name__ == "wrapper", "MindSpeed takes only such names for decorators"
        assert patch.hook.__name__ == patch.name
        assert all((patch.why, patch.versions, patch.remove_when)), patch.target
        for release in ("0.12.1", "0.16.1", "0.18.0", "0.19.0"):
            assert release in patch.versions, patch.target
