"""Runs an action when other code imports a module. The module is not imported here.

Host mode (see `host`) must be active before Megatron and MindSpeed are imported, but must not import them: MindSpeed's
adaptor must be imported first, and would remove earlier changes to Megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_before: dict[str, list[Callable[[], None]]] = {}
_after: dict[str, list[Callable[[ModuleType], None]]] = {}


def before_import(name: str, action: Callable[[], None]) -> None:
    """Call `action` once, just before module `name` is first imported; call it now if `name` is imported already."""
    if name in sys.modules:
        action()
        return
    _watch()
    _before.setdefault(name, []).append(action)


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` each time module `name` has been executed; also now, if `name` is imported already."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    _watch()
    _after.setdefault(name, []).append(action)


class _WatchedFinder(MetaPathFinder):
    """Finds a watched module with the other finders, and wraps the module's loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for action in _before.pop(fullname, ()):
            action()
        if fullname not in _after:
            return None
        # Not importlib.util.find_spec: on a reload it returns the spec that we wrapped before.
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next(filter(None, (f.find_spec(fullname, path, target) for f in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, _after[fullname])
        return spec


class _ActingLoader(Loader):
    """A loader that runs our actions after the original loader, `inner`. It has `inner`'s other attributes, too."""

    def __init__(self, inner: Loader, actions: list[Callable[[ModuleType], None]]) -> None:
        self._inner = inner
        self._actions = actions

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for action in self._actions:
            action(module)


_finder = _WatchedFinder()


def _watch() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
