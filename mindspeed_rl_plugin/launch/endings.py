"""Messages of a run that cannot continue: refusals without traceback, which disk is full, one line after Ctrl-C.

Errors are also written to the file from which torchrun reads the reason of a failure. So they appear in torchrun's
summary, in the last lines of a job.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed_rl_plugin.checkpoints import checkpoint_files as files
from mindspeed_rl_plugin.checkpoints.disk import full_disk
from mindspeed_rl_plugin.checks.refusal import Refusal, lines_of
from mindspeed_rl_plugin.environment import launch_env, leave_to_first_rank, record_failure
from mindspeed_rl_plugin.processes import attend
from mindspeed_rl_plugin.status.story import at_deadline

LINES = 8  # most lines of an error that are printed after its first line: half of them its last ones


def watch(args: Any) -> None:
    """From now on uncaught errors of this process are shown by this module. args: the run's arguments."""
    heard, show = threading.Event(), sys.excepthook  # whether the main thread has heard of Ctrl-C

    def interrupt() -> bool:
        heard.set()
        if launch_env()["rank"] == 0:
            _say(f"\n{interrupted(args)}")  # other libraries may have begun a line
        return True

    def uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            interrupt()
            return
        if isinstance(error, Refusal):
            _say(f"[rl] {error}")
            record_failure(str(error))
            return
        record_failure(f"{kind.__name__}: {error}")  # before other ranks notice it and record their own failure
        show(kind, error, trace)

    sys.excepthook = uncaught
    attend(lambda: not heard.is_set() and interrupt())


@contextmanager
def refusing() -> Iterator[None]:
    """In the context a ValueError, which all ranks raise, becomes a `Refusal` of the start. It is printed once per
    machine."""
    try:
        yield
    except ValueError as error:
        leave_to_first_rank()
        if isinstance(error, Refusal):
            raise
        raise Refusal("\n  - ".join(["RL cannot run:", *lines_of(error)])) from error


@contextmanager
def stopping(args: Any) -> Iterator[None]:
    """Print the reason of an error in lines of our own, above the tracebacks of the ranks."""
    try:
        yield
    except Exception as error:
        reason = full_disk(error, args) or f"{type(error).__name__}: {error}"
        head, *more = f"rank {launch_env()['rank']} stops: {reason}".splitlines()
        late = at_deadline().splitlines() if isinstance(error, TimeoutError) else []
        if len(more) > LINES:
            more[LINES // 2 : -LINES // 2] = ["  ..."]
        lines = [head, *more, *late]
        print("\n".join(f"[rl] {line}" for line in lines), flush=True)
        record_failure("\n".join(lines))
        raise


def interrupted(args: Any) -> str:
    """The line of a run that Ctrl-C stopped."""
    saved = files.read_tracker(getattr(args, "save", None))
    then = (
        f"the last checkpoint is of iteration {saved} in {args.save}, from which the same command continues"
        if saved is not None
        else "no checkpoint was saved, so the same command starts from the beginning"
    )
    at = getattr(args, "curr_iteration", 0) + 1
    return f"[rl] interrupted in iteration {at}; {then} (with --exit-signal-handler, SIGTERM saves a checkpoint)"


def _say(text: str) -> None:
    """Print to the process's own stderr. When ranks are connected, torch adds `[rank0]: ` before each line that an
    excepthook prints to sys.stderr; then the first line would not begin with [rl]."""
    print(text, file=sys.__stderr__, flush=True)
