"""How a run that cannot go on says so: a refusal without traceback, a full disk by its name, Ctrl-C in one line.

What is said also goes into the file from which torchrun takes the reason of a failure, so that it stands at the end of
torchrun's own summary, the last lines of a job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints.disk import full_disk
from mindspeed_rl_plugin.checks.refusal import Refusal, lines_of
from mindspeed_rl_plugin.environment import launch_env, leave_to_first_rank, record_failure
from mindspeed_rl_plugin.processes import attend

LINES = 8  # of an error, beside its first


_args: Any = None
_reason = ""  # of an error that was reported already
_interrupted = False  # whether the main thread has heard of it
_show = sys.excepthook


def watch(args: Any) -> None:
    """From now on an uncaught error of this process is shown as this module says. args: the run's arguments."""
    global _args
    _args = args
    sys.excepthook = _uncaught
    attend(lambda: not _interrupted and _say_interrupted())


@contextmanager
def refusing() -> Iterator[None]:
    """A ValueError inside is one of all ranks alike, by which a start is refused: said once a machine, and marked."""
    try:
        yield
    except ValueError as error:
        leave_to_first_rank()
        if isinstance(error, Refusal):
            raise
        raise Refusal("\n  - ".join(["RL cannot run:", *lines_of(error)])) from error


@contextmanager
def stopping() -> Iterator[None]:
    """Report an error's reason in lines of our own, to be found above the tracebacks of all ranks."""
    global _reason
    try:
        yield
    except Exception as error:
        reason = full_disk(error, _args) or f"{type(error).__name__}: {error}"
        head, *more = f"rank {launch_env()['rank']} stops: {reason}".splitlines()
        _reason = "\n".join([head, *more[:LINES]])
        print("\n".join(f"[rl] {line}" for line in _reason.splitlines()), flush=True)
        raise


def interrupted(args: Any) -> str:
    """The one line of a run that was stopped from the keyboard."""
    saved = files.read_tracker(getattr(args, "save", None))
    then = (
        f"the last checkpoint is of iteration {saved} in {args.save}: the same command goes on from there"
        if saved is not None
        else "no checkpoint was saved, so the same command starts again"
    )
    at = getattr(args, "curr_iteration", 0) + 1
    return f"[rl] interrupted in iteration {at}; {then} (to save at a stop: --exit-signal-handler, and send SIGTERM)"


def _say_interrupted() -> bool:
    """On the first rank."""
    global _interrupted
    _interrupted = True
    if launch_env()["rank"] == 0:
        _say(f"\n{interrupted(_args)}")  # other libraries leave lines without an end
    return True


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        _say_interrupted()
        return
    if isinstance(error, Refusal):
        _say(f"[rl] {error}")
        record_failure(str(error))
        return
    record_failure(_reason or f"{kind.__name__}: {error}")  # before others hear of it and record their own end
    _show(kind, error, trace)


def _say(text: str) -> None:
    """To the process's own stderr: once ranks are connected, torch puts `[rank0]: ` before each line that an excepthook
    writes to sys.stderr, and the first one would no longer begin with [rl]."""
    print(text, file=sys.__stderr__, flush=True)
