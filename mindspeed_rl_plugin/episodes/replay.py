"""Makes environments again after their process has ended: repeats all answered calls; the answers must be the same.

After this, an environment whose process ended during a call is as it was before that call. Environments are also made
again after a coroutine was cancelled at its limit, although this ends no process.
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
    known: how many of these its process has answered (if it has no process now: its last process).
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
        """The result of `call`; None if an earlier call was repeated instead, an error if that gave another answer."""
        if self.complete:
            self.asked.append((call, answer))
            self.known += 1
            return answer
        former, before = self.asked[self.known]
        if _comparable(answer) == _comparable(before):
            self.known += 1
            return None
        error = (
            "cannot be called: its environment was lost, and gives other answers when its calls are repeated. This "
            f"time {former.message[0]} gave {_shown(answer)}, but {_shown(before)} before; let answers depend only on "
            "seed, data row and calls"
        )
        return Answer(error=error, seconds=answer.seconds, unmade=True)


def result_of(call: WorkerCall, answer: Answer | str) -> Answer | None:
    """The result of an ended call; None if an earlier call was repeated in its place, so that `call` goes back into
    the queue. answer: a text if the call is lost."""
    session = call.session
    if isinstance(answer, Answer):
        return answer if session is None else session.answered(call, answer)
    unmade = session is not None and not session.complete
    if unmade:
        answer += f" when {session.asked[session.known][0].message[0]} was repeated to make the environment again"
    return Answer(error=answer, seconds=time.monotonic() - call.began, unmade=unmade)


def _comparable(answer: Answer) -> Answer:
    """An answer without its time and its traceback, for comparison."""
    return answer._replace(seconds=0.0, error=None)


def _shown(answer: Answer) -> str:
    if answer.brief is not None:
        return answer.brief
    rest = (", over" if answer.done else "") + (f", reward {answer.reward:g}" if answer.reward else "")
    return f"{' '.join(answer.texts) if answer.texts else None!r:.120}{rest}"
