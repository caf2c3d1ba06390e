"""Environments that are made again where their process ended: by all calls that they have answered, whose answers must
be the same.

That of a lost call is then as it was before the call. A coroutine that was cancelled costs no process, but it costs its
environment likewise.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from mindspeed_rl_plugin.episodes.tools import Answer
from mindspeed_rl_plugin.workers.pool_worker import PoolWorker, Session, WorkerCall


class EnvironmentInstance(Session):
    """An environment of one episode.

    asked: calls that it has answered, and the answers.
    known: how many of these its process has answered; where it has none, the former one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[WorkerCall, Answer]] = []
        self.known = 0

    @property
    def complete(self) -> bool:
        """Whether its process has answered all of them."""
        return self.known == len(self.asked)

    def move(self, worker: PoolWorker | None) -> None:
        super().move(worker)
        if worker is not None:
            self.known = 0

    def next_for(self, call: WorkerCall) -> WorkerCall:
        known = 0 if self.worker is None else self.known
        return call if known == len(self.asked) else self.asked[known][0]

    def answered(self, call: WorkerCall, answer: Answer) -> Answer | LostCall | None:
        """What comes of a call; None where its process was only asked once more what had been answered before."""
        if self.complete:
            self.asked.append((call, answer))
            self.known += 1
            return answer
        former, before = self.asked[self.known]
        if _same(answer, before):
            self.known += 1
            return None
        return LostCall(
            f"cannot be made: its environment is not deterministic under replay. A process ended, and in a new one "
            f"{former.message[0]} gave {_shown(answer)}, not {_shown(before)} as before; let answers depend on seed, "
            "data row and calls alone",
            answer.seconds,
            unmade=True,
        )


class LostCall(NamedTuple):
    """A call without an answer.

    error: why.
    seconds: until it was lost.
    unmade: whether it was never made, since its environment could not be made again for it.
    """

    error: str
    seconds: float
    unmade: bool = False


def result_of(call: WorkerCall, answer: Answer | str) -> Answer | LostCall | None:
    """What comes of a call that is over; None where it is to be made again, since something had to come before it."""
    environment = call.session
    if isinstance(answer, Answer):
        return answer if environment is None else environment.answered(call, answer)
    unmade = environment is not None and not environment.complete
    return LostCall(f"{answer} when it was replayed" if unmade else answer, time.monotonic() - call.began, unmade)


def _same(one: Answer, other: Answer) -> bool:
    """Whether two answers agree, in all but time and place."""
    return one._replace(seconds=0.0, error=None) == other._replace(seconds=0.0, error=None)


def _shown(answer: Answer) -> str:
    if answer.brief is not None:
        return answer.brief
    rest = (", over" if answer.done else "") + (f", reward {answer.reward:g}" if answer.reward else "")
    return f"{' '.join(answer.texts) if answer.texts else None!r:.120}{rest}"
