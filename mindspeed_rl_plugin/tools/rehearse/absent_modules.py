"""Runs the entry script although Python modules that MindSpeed imports are not installed: each gets a stand-in.

    python -m mindspeed_rl_plugin.tools.rehearse.absent_modules [--accept] [--any-flag] SCRIPT.py ARGS

MindSpeed and MindSpeed-LLM import libraries of all their features when they start (peft for LoRA, trl, nltk). A
stand-in works during imports: its names can be imported, inherited from and used as decorators. A call in a
function is an error that says what to install. An import inside `try ... except ImportError` gets no stand-in.

--accept: only run the real parsers and validation, as rank 0 of WORLD_SIZE ranks. When Megatron is about to connect
the ranks, the config of the model is built, since this makes further checks; then the process ends. --any-flag: print
flags that the parser does not know, and continue without them.
"""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import CO_OPTIMIZED
from itertools import takewhile
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

ACCEPTED, UNKNOWN = "rehearse: arguments accepted", "rehearse: no flags here: "
STANDIN = "rehearse: stand-in for the Python module "
_OWNERS = ("mindspeed", "mindspeed_llm")
_GUARDS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


class _Name(type):
    """A name in a missing module: a class, so that other classes can inherit from it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *args: Any, **named: Any) -> Any:
        # a class of another module that inherits from a stand-in
        if cls.__module__.partition(".")[0] not in _StandInFinder.modules:
            return super().__call__(*args, **named)
        # called in a function, not in the body of a module or a class
        if sys._getframe(1).f_code.co_flags & CO_OPTIMIZED:
            raise RuntimeError(
                f"{cls.__module__}.{cls.__qualname__} is called, but {cls.__module__.split('.')[0]} is not installed: "
                "the stand-in of the rehearsal can only be imported; install it"
            )
        return args[0] if len(args) == 1 and callable(args[0]) else super().__call__()


def _name(module: str, name: str) -> _Name:
    return _Name(name, (), {"__module__": module, "__init__": lambda self, *args, **named: None})


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(self.__name__, name)


class _StandInFinder(MetaPathFinder, Loader):
    """The last finder: it is only asked for modules that no other finder has."""

    modules: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name.partition(".")[0] not in self.modules:
            frame = _importer()
            if "." in name or frame is None or not _asks(frame):
                return None
            print(f"{STANDIN}{name} ({frame.f_code.co_filename}, line {frame.f_lineno})", flush=True)
        self.modules.add(name)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _importer() -> FrameType | None:
    """The frame of the import statement; None if code only checks whether the module exists."""
    frame: FrameType | None = sys._getframe(2)
    while frame and "importlib" in frame.f_code.co_filename:
        if frame.f_code.co_filename.endswith("util.py"):
            return None
        frame = frame.f_back
    return frame


def _asks(frame: FrameType) -> bool:
    """Whether MindSpeed needs the missing module: it does not catch the failed import, and does not create a dummy
    module itself (`parse_path` of its patches)."""
    owner = frame.f_globals.get("__name__", "").partition(".")[0]
    if owner in _OWNERS and frame.f_code.co_name == "parse_path":
        return not frame.f_locals.get("create_dummy", True)
    return owner in _OWNERS and not any(a <= frame.f_lineno <= b for a, b in _guarded(frame.f_code.co_filename))


@cache
def _guarded(file: str) -> list[tuple[int, int]]:
    """First and last lines of a file's `try` blocks that catch a failed import."""
    blocks = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.Try))
    return [(b.lineno, b.body[-1].end_lineno or b.lineno) for b in blocks if any(map(_catches, b.handlers))]


def _catches(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or getattr(kind, "id", "") in _GUARDS for kind in kinds)


def install() -> None:
    """After this call, imports of missing modules may get a stand-in."""
    sys.meta_path.append(_StandInFinder())


def _stop_at_connection() -> None:
    """When Megatron connects the ranks, build the config of the model, print a line, and end the process."""
    from mindspeed_rl_plugin import host
    from mindspeed_rl_plugin.engine import engine_sizes

    host.activate_if_needed(announce=False)
    import torch.distributed as dist

    dist.init_process_group = _accept
    engine_sizes.host_total = lambda: sys.maxsize  # no limit, since the script is for another machine


def _accept(*args: object, **kwargs: object) -> None:
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    core_transformer_config_from_args(get_args())
    print(ACCEPTED, flush=True)
    sys.exit(0)


def _parse_known(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> argparse.Namespace:
    parsed, rest = parser.parse_known_args(*args, **kwargs)
    print(UNKNOWN + " ".join(word for word in rest if word.startswith("--")), flush=True)
    return parsed


def main(argv: list[str]) -> None:
    options = list(takewhile(lambda word: word.startswith("--"), argv))
    if "--accept" in options:
        _stop_at_connection()
    if "--any-flag" in options:
        argparse.ArgumentParser.parse_args = _parse_known
    install()
    sys.argv = ["mindspeed_rl_plugin", *argv[len(options) :]]
    runpy.run_module("mindspeed_rl_plugin", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
