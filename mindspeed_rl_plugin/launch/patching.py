"""Applies patches, and checks at the start of training that they are still in force.

Every module with the original function gets the wrapper. MindSpeed may remove all patches and apply its own again; so
our patches are also registered as a feature of its manager.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from mindspeed_rl_plugin.config import add_flags
from mindspeed_rl_plugin.environment import say

# First and last Megatron Core with which the patches were tested.
OLDEST, NEWEST = (0, 12, 1), (0, 19)
# Modules whose import makes MindSpeed (or MindSpeed-LLM) patch Megatron.
MINDSPEED_ADAPTORS = (
    "mindspeed.megatron_adaptor",
    "mindspeed.megatron_adaptor_v2",
    "mindspeed_llm.tasks.megatron_adaptor",
    "mindspeed_llm.tasks.megatron_adaptor_v2",
)
# Since core_r0.17.0 MindSpeed imports this adaptor first. It also reads the command line and patches Megatron.
BASE_ADAPTOR = "megatron_adaptor"


@dataclass(frozen=True)
class Patch:
    """One wrapped function."""

    target: str  # dotted name of the global that Megatron looks up at call time
    hook: Callable  # called in its place, with the original before the arguments
    leading: tuple[str, ...]  # names of the original's first parameters, on which hook or loop rely
    why: str
    versions: str  # place of the target, `file:line` for each core version
    remove_when: str  # what upstream would have to offer instead

    @property
    def module(self) -> str:
        return self.target.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.target.rpartition(".")[2]

    @property
    def current(self) -> Callable:
        return getattr(sys.modules[self.module], self.name)

    def wrapper(self, original: Callable) -> Callable:
        """The original in a wrapper that calls the hook; the original itself if it does so already. MindSpeed's manager
        recognises decorators by this method's name."""
        if wraps(original, self):
            return original
        hook = self.hook

        @functools.wraps(original)
        def patched(*positional: Any, **named: Any) -> Any:
            return hook(original, *positional, **named)

        return patched


_applied: tuple[Patch, ...] = ()
# Target -> functions that our wrapper has replaced; no module may still have one of them.
_originals: dict[str, list[Callable]] = {}


def apply(patches: tuple[Patch, ...]) -> None:
    """Wrap every target. Idempotent.

    Raises RuntimeError if Megatron's version is not supported, or if a target is missing or has other parameters than
    expected.
    """
    global _applied
    for patch in patches:
        _check_target(patch)
    check_version()
    _applied = patches
    for patch in patches:
        current = patch.current
        if not wraps(current, patch):
            _originals.setdefault(patch.target, []).append(current)
            _rebind(current, patch.wrapper(current))
    if under_mindspeed():
        _register_with_mindspeed(patches)


def revert() -> None:
    """Restore each original whose outermost wrapper is ours.

    MindSpeed's adaptor replaces functions when it is imported, and may drop unknown wrappers. So our wrappers are
    removed before the import, and applied again after it.
    """
    for patch in _applied:
        originals = _originals.get(patch.target)
        if originals and wraps(patch.current, patch) and getattr(patch.current, "__wrapped__", None) in originals:
            _rebind(patch.current, patch.current.__wrapped__)
    _originals.clear()


def assert_in_force() -> None:
    """Check that every applied wrapper is called wherever its target is used, and print the targets on rank 0.

    Raises RuntimeError that names the patch, and the function that replaced it or the module that has the original.
    """
    for patch in _applied:
        if not wraps(patch.current, patch):
            raise RuntimeError(
                f"patch {patch.target} is not in force: the name now holds {_describe(patch.current)}, which does not "
                "call the plugin's hook; import mindspeed_rl_plugin.adaptor after the code that replaced it"
            )
        for module, name in _holders(_originals.get(patch.target, [])):
            raise RuntimeError(
                f"patch {patch.target} is not in force in {module.__name__}: its {name!r} is still the original; "
                "import mindspeed_rl_plugin.adaptor after that module, or let the module look up the name at each call"
            )
    how = ", through MindSpeed's feature manager" if under_mindspeed() else ""
    say(f"RL is attached to Megatron{how}; wrapped functions: {', '.join(p.name for p in _applied)}")


def check_version() -> None:
    """Raise RuntimeError if Megatron Core is outside the tested versions."""
    info = importlib.import_module("megatron.core.package_info")
    version = (info.MAJOR, info.MINOR, info.PATCH)
    if version < OLDEST or version[:2] > NEWEST:
        raise RuntimeError(
            f"Megatron Core {'.'.join(map(str, version))} is not supported: expected "
            f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}.x; install one of these or a newer plugin"
        )


def under_mindspeed() -> bool:
    """Whether MindSpeed's adaptor is imported in this process."""
    return any(name in sys.modules for name in MINDSPEED_ADAPTORS)


def wraps(function: Any, patch: Patch) -> bool:
    """Whether calling `function` reaches the patch's hook, through other decorators too."""
    seen: set[int] = set()
    queue = [function]
    while queue:
        item = queue.pop()
        if item is patch.hook:
            return True
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, functools.partial):
            queue.append(item.func)
        elif isinstance(item, FunctionType):
            queue.append(getattr(item, "__wrapped__", None))
            for cell in item.__closure__ or ():
                with suppress(ValueError):  # an empty cell
                    queue.append(cell.cell_contents)
    return False


def _register_with_mindspeed(patches: tuple[Patch, ...]) -> None:
    """Register a feature: MindSpeed's `repatch` removes all patches and then applies those of its features."""
    from mindspeed.features_manager.feature import MindSpeedFeature
    from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

    class ReinforcementLearningFeature(MindSpeedFeature):
        """Level 0: applied under any --optimization-level; without --rl-algorithm the hooks call the originals."""

        def __init__(self) -> None:
            super().__init__("mindspeed-rl-plugin", optimization_level=0)

        def register_args(self, parser: Any) -> None:
            add_flags(parser)

        def register_patches(self, patch_manager: Any, args: Any) -> None:
            for patch in patches:
                patch_manager.register_patch(patch.target, patch.wrapper)

    features = MindSpeedFeaturesManager.FEATURES_LIST
    if not any(type(f).__name__ == ReinforcementLearningFeature.__name__ for f in features):
        features.append(ReinforcementLearningFeature())


def _check_target(patch: Patch) -> None:
    signature = f"{patch.name}({', '.join((*patch.leading, '...'))})"
    expected = f"expected a function {signature} in {patch.module} ({patch.versions})"
    try:
        module = importlib.import_module(patch.module)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"cannot attach to Megatron: {error}; {expected}. Put a Megatron-LM checkout on PYTHONPATH, or install a "
            "megatron-core that ships megatron.training (0.19 or newer)"
        ) from error
    function = getattr(module, patch.name, None)
    if not callable(function):
        raise RuntimeError(f"cannot attach to Megatron: {patch.target} does not exist; {expected}")
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return  # another decorator hides the parameter names
    names = tuple(p.name for p in parameters[: len(patch.leading)])
    if names != patch.leading:
        raise RuntimeError(f"cannot attach to Megatron: {patch.target} begins with parameters {names}; {expected}")


def _rebind(old: Callable, new: Callable) -> None:
    for module, name in list(_holders([old])):
        setattr(module, name, new)


def _holders(functions: list[Callable]) -> Iterator[tuple[ModuleType, str]]:
    """Every (module, name) bound to one of the functions. Reads `vars`, so that lazy modules import nothing."""
    wanted = {id(f) for f in functions}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in wanted:
                    yield module, name


def _describe(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
