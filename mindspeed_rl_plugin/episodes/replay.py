"""Makes environments again after their process has ended: repeats all calls that they had answered; the answers must be
the same.

Then the environment of a lost call is as it was before this call. Environments are also made again after a coroutine
was cancelled at its limit, although this ends no process.
"""

from __future__ import annotations

import time
from collections.abc import Generator

from mindspeed_rl_plugin.episodes.environments import Reply
from mindspeed_rl_plugin.episodes.tools import Answer
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.workers.pool_worker import PoolWorker, Session, WorkerCall

Making = Generator[tuple, Answer, None]
"""Makes a reply: yields the messages of calls for `environment_process.Desk`, and receives the answer to each."""


class EnvironmentInstance(Session):
    """An episode in the pool, with its environment if there is one.

    reply: the newest reply, maybe unfinished.
    making: the generator that makes this reply.
    call: the call for which the reply waits, or None.
    asked: answered calls of the environment, with the answers.
    known: how many of these the present process has answered (if there is none: the last process).
    """

    def __init__(self, sample: SampleId) -> None:
        super().__init__()
        self.id = sample
        self.reply: Reply | None = None
        self.making: Making | None = None
        self.call: WorkerCall | None = None
        self.asked: list[tuple[WorkerCall, Answer]] = []
        self.known = 0

    @property
    def complete(self) -> bool:
        """Whether its process has answered all calls in `asked`."""
        return self.known == len(self.asked)

    def move(self, worker: PoolWorker | None) -> None:
        super().move(worker)
        if worker is not None:
            self.known = 0

    def next_for(self, call: WorkerCall) -> WorkerCall:
        known = 0 if self.worker is None else self.known
        return call if known == len(self.asked) else self.asked[known][0]

    def answered(self, call: WorkerCall, answer: Answer) -> Answer | None:
        """The result of a call; None if it was repeated with the former answer, an error if the answers differ."""
        if self.complete:
            self.asked.append((call, answer))
            self.known += 1
            return answer
        former, before = self.asked[self.known]
        if _comparable(answer) == _comparable(before):
            self.known += 1
            return None
        error = (
            f"cannot be made: its environment gives other answers to repeated calls. When it was made again, "
            f"{former.message[0]} gave {_shown(answer)}, but {_shown(before)} before; let answers depend only on seed, "
            "data row and calls"
        )
        return Answer(error=error, seconds=answer.seconds, unmade=True)


def result_of(call: WorkerCall, answer: Answer | str) -> Answer | None:
    """The result of an ended call; None if the call must be made again, because another call was repeated first.
    answer: a text if the call is lost."""
    environment = call.session
    if isinstance(answer, Answer):
        return answer if environment is None else environment.answered(call, answer)
    unmade = environment is not None and not environment.complete
    error = f"{answer} when it was repeated" if unmade else answer
    return Answer(error=error, seconds=time.monotonic() - call.began, unmade=unmade)


def _comparable(answer: Answer) -> Answer:
    """An answer without its time and its traceback, for comparison."""
    return answer._replace(seconds=0.0, error=None)


def _shown(answer: Answer) -> str:
    if answer.brief is not None:
        return answer.brief
    rest = (", over" if answer.done else "") + (f", reward {answer.reward:g}" if answer.reward else "")
    return f"{' '.join(answer.texts) if answer.texts else None!r:.120}{rest}"
