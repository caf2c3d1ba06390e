"""`Environments` that request the model's turns themselves: agents, and environments of verifiers, in processes of
`gateway.agent_process` or `gateway.verifiers_load`.

Each process runs many rollouts. Messages of a rollout may come at any time; here each becomes a reply. If a process
dies, or is killed because a rollout in it cannot be stopped, the rollouts that have begun in it fail, because their
state is lost. Rollouts that have not begun run in another process.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mindspeed_rl_plugin.environment import tell
from mindspeed_rl_plugin.episodes.environments import AgentRequest, EpisodeError, Reply, ToolCall, Turn
from mindspeed_rl_plugin.episodes.parsers import before_calls
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.workers.process import Program, Worker, wait_for

AWAY_SECONDS = 1.0  # if the pipe was not read for longer, it may have been full: limits of replies are extended
STOP_SECONDS = 20.0  # in which a rollout that is given up must stop
END_SECONDS = 15.0  # in which a process must release the resources of its rollouts and end


class RolloutReport(msgspec.Struct):
    """A message of a process about a rollout. Fields without a comment are as in `Reply`."""

    number: int  # of the rollout
    seconds: float  # since the model's last turn, or since the rollout began
    request: AgentRequest | None = None
    heard: list[int] | None = None
    rewards: dict[int, float] = {}
    taken: bool = False  # a program has taken it
    note: str | None = None  # a line for the user; number is -1 then
    reward: float = 0.0
    done: bool = False
    failure: str | None = None
    ended: bool = False  # it was cancelled and has stopped


@dataclass(eq=False)
class RolloutProcess:
    """A process of rollouts."""

    worker: Worker
    loaded: bool = False  # whether rollouts can begin in it
    killed: str | None = None  # why it was killed


@dataclass(eq=False)
class RolloutRecord:
    """A rollout, as the job's process knows it."""

    number: int
    sample: SampleId
    data: tuple[Any, ...]  # arguments of the process's `begin`
    process: RolloutProcess | None = None  # None before it begins
    due: float | None = None  # time since which its reply is due; None: it has not begun, or waits for turns
    waits: int = 0  # for so many turns
    asked: bool = False  # whether it has requested a turn
    offered: bool = False  # whether it waits for a program that takes it
    late: str | None = None  # why it is stopped before its end
    ending: float | None = None  # deadline to stop; None: it is not given up, and not late

    @property
    def awaited(self) -> bool:
        return self.due is not None or self.offered or self.late is not None

    @property
    def evaluated(self) -> bool:
        """Whether it belongs to an evaluation."""
        return self.sample.epoch < 0


AGENTS_PROGRAM = Program(
    "mindspeed_rl_plugin.gateway.agent_process:main",
    str | None,
    RolloutReport,
    "an agents' process",
    EpisodeError,
    patience=END_SECONDS,
)


EXTERNAL_PROGRAM = replace(AGENTS_PROGRAM, main="mindspeed_rl_plugin.gateway.external_agents:main")
EXTERNAL_SHARE = 0.8  # of --rl-wait-timeout, in which a program must take an episode


class AgentEnvironments:
    """program, setup, loads: of the processes (see `Worker`).
    workers: number of processes.
    timeout: limit of one reply [seconds].
    wait: seconds that other ranks wait for this rank.
    together: most rollouts of a process at a time, None: no limit.

    The processes load in the background; if this fails, `poll` raises the error.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    begins, answered = True, 0

    def __init__(
        self,
        program: Program,
        setup: Any,
        loads: str,
        workers: int,
        timeout: float,
        wait: float,
        together: int | None,
    ) -> None:
        self._offers = program is EXTERNAL_PROGRAM
        self._most, self._taken = EXTERNAL_SHARE * wait, time.monotonic()  # when a program took the last episode
        self._timeout, self._together, self._who = timeout, math.inf if together is None else together, program.who
        self._processes = [RolloutProcess(Worker(program, setup, loads, wait)) for _ in range(workers)]
        self._numbers = itertools.count()
        self._rollouts: dict[int, RolloutRecord] = {}  # all that run in a process, also those that are given up
        self._known: dict[SampleId, RolloutRecord] = {}  # all that have given no last reply and are not given up
        self._queue: deque[RolloutRecord] = deque()  # all that have not begun
        self._replies: list[Reply] = []
        self._heard = time.monotonic()  # time of the last read
        self._noted: set[str] = set()

    @property
    def pending(self) -> bool:
        return bool(self._queue or self._replies or any(r.awaited for r in self._known.values()))

    def begin(self, episode: SampleId, task: Mapping[str, Any], seed: int) -> None:
        """See `Environments`. The seed is not used: a loop of another has none."""
        rollout = RolloutRecord(next(self._numbers), episode, self._data(episode, task))
        self._known[episode] = rollout
        self._queue.append(rollout)

    def act(self, episode: SampleId, turn: Turn) -> None:
        self._answer(episode, 1, "speak", turn.call, *self._spoken(turn))

    def refuse(self, episode: SampleId, calls: Sequence[int], why: str, code: str) -> None:
        """Answer a request for turns with an error."""
        self._answer(episode, len(calls), "refuse", calls, why, code)

    def counted(self, episode: SampleId, call: int, tokens: int) -> None:
        """Answer a request for the number of tokens of a prompt."""
        self._answer(episode, 1, "counted", call, tokens)

    def end(self, episode: SampleId) -> None:
        rollout = self._known.get(episode)
        self._replies = [reply for reply in self._replies if reply.id != episode]
        if rollout is not None:
            self._give_up(rollout)

    def poll(self, seconds: float) -> list[Reply]:
        now = time.monotonic()
        self._excuse(now - self._heard)
        end = now + seconds
        while True:
            for process in self._processes:
                self._hear(process)
            self._begin_some()
            self._look_at_clock()
            if self._replies or not self.pending or time.monotonic() >= end:
                break
            wait_for([process.worker for process in self._processes], min(end, self._next_limit()))
        replies, self._replies, self._heard = self._replies, [], time.monotonic()
        return replies

    @staticmethod
    def check_fields(rows: Mapping[str, Set[str]]) -> None:
        """See `Environments`. Rows need no field."""

    def close(self) -> None:
        for process in self._processes:
            process.worker.cut()
        for process in self._processes:
            process.worker.close()
        self._processes = []

    # calls

    def _data(self, episode: SampleId, task: Mapping[str, Any]) -> tuple[Any, ...]:
        row = {**task["record"], **{name: task[name] for name in ("prompt", "answer")}}
        return (
            {**row, **({"messages": task["messages"]} if task.get("messages") else {})},
            "/".join(map(str, episode)),
        )

    def _spoken(self, turn: Turn) -> tuple[Any, ...]:
        calls = [(call.name, dict(call.arguments)) for call in turn.attempts if isinstance(call, ToolCall)]
        whole = len(calls) == len(turn.attempts)  # else the agent gets the text, in which it can see what is wrong
        text = before_calls(turn.text) if calls and whole else turn.text
        return text, calls if whole else [], (turn.before, len(turn.tokens), turn.cut)

    def _answer(self, episode: SampleId, turns: int, *what: Any) -> None:
        """Answer requests for so many turns. what: method of a `Conversation`, and its arguments."""
        if (rollout := self._known.get(episode)) is None:
            return
        rollout.waits -= turns
        if not rollout.waits and not rollout.late:
            rollout.due = time.monotonic()
        self._send(rollout, "answer", *what)

    def _send(self, rollout: RolloutRecord, call: str, *arguments: Any) -> None:
        rollout.process.worker.call((call, rollout.number, *arguments), math.inf)

    def _begin_some(self) -> None:
        """Begin waiting rollouts up to the limit of the processes, each in the process with the fewest rollouts."""
        loaded = [process for process in self._processes if process.loaded and process.killed is None]
        for evaluated in (False, True) if loaded and self._queue else ():
            load = Counter(id(r.process) for r in self._rollouts.values() if r.evaluated == evaluated)
            for rollout in [rollout for rollout in self._queue if rollout.evaluated == evaluated]:
                process = min(loaded, key=lambda one, load=load: load[id(one)])
                if load[id(process)] >= self._together:
                    break
                load[id(process)] += 1
                self._queue.remove(rollout)
                rollout.process, rollout.offered = process, self._offers
                rollout.due = None if self._offers else time.monotonic()
                self._rollouts[rollout.number] = rollout
                self._send(rollout, "begin", *rollout.data)

    def _give_up(self, rollout: RolloutRecord) -> None:
        del self._known[rollout.sample]
        rollout.due = None
        if rollout.process is None:
            self._queue.remove(rollout)
        elif rollout.ending is None:
            self._stop(rollout)

    def _stop(self, rollout: RolloutRecord) -> None:
        rollout.ending = time.monotonic() + STOP_SECONDS
        self._send(rollout, "end")

    # replies

    def _hear(self, process: RolloutProcess) -> None:
        """Handle messages of a process; if it has died, start it again. Raises EpisodeError if it cannot load."""
        worker = process.worker
        if not process.loaded and worker.ready():
            process.loaded, worker.until = True, math.inf
            self.answered += 1
        while process.loaded and (answer := worker.answer()) is not None:
            if isinstance(answer, str):
                self._died(process, answer)
            else:
                worker.until = math.inf
                self._take(answer)

    def _take(self, report: RolloutReport) -> None:
        if report.note is not None:
            if report.note not in self._noted:
                tell(report.note)  # on the first rank of each engine
            self._noted.add(report.note)
            return
        self.answered += 1
        rollout = self._rollouts.get(report.number)
        if rollout is None:
            return
        if report.taken:
            rollout.offered, rollout.due = False, time.monotonic()
            return
        failure = "was cancelled by its own code" if report.ended and rollout.ending is None else report.failure
        over = report.done or report.ended or failure is not None
        if over:
            del self._rollouts[report.number]
        if rollout.sample not in self._known or self._known[rollout.sample] is not rollout:
            return
        if over and rollout.late and self._offers and not rollout.asked:  # with a new key
            self._offer(rollout)
        elif over and rollout.late:
            self._reply(rollout, self._late(rollout, report))
        elif over or not rollout.late:
            if report.request is not None:
                rollout.asked = True
                rollout.waits, rollout.due = rollout.waits + len(report.request.calls), None
            done = {"reward": report.reward, "done": report.done, "heard": report.heard, "failure": failure}
            done["rewards"] = report.rewards
            self._reply(rollout, Reply(rollout.sample, request=report.request, seconds=report.seconds, **done))

    def _offer(self, rollout: RolloutRecord) -> None:
        """Offer an episode again that a program has taken and left."""
        again = self._known[rollout.sample] = RolloutRecord(next(self._numbers), rollout.sample, rollout.data)
        self._queue.append(again)

    def _late(self, rollout: RolloutRecord, report: RolloutReport) -> Reply:
        """The last reply of a rollout that was stopped. One that had a turn, and has not failed by that, is graded."""
        if report.heard and report.failure is None:
            return Reply(rollout.sample, done=True, finish="time", heard=report.heard, seconds=report.seconds)
        return Reply(rollout.sample, failure=rollout.late, heard=report.heard, seconds=report.seconds)

    def _reply(self, rollout: RolloutRecord, reply: Reply) -> None:
        self._replies.append(reply)
        if reply.done or reply.failure is not None:
            del self._known[rollout.sample]

    def _died(self, process: RolloutProcess, how: str) -> None:
        why = process.killed or f"was in {self._who} whose code {how}"
        process.loaded, process.killed = False, None
        for rollout in [rollout for rollout in self._rollouts.values() if rollout.process is process]:
            self._take(RolloutReport(rollout.number, 0.0, failure=why))

    # limits

    def _excuse(self, gap: float) -> None:
        """Extend limits of replies by `gap`, the seconds without a read, if these are more than AWAY_SECONDS."""
        self._taken += gap if gap > AWAY_SECONDS else 0.0
        for rollout in self._known.values() if gap > AWAY_SECONDS else ():
            if rollout.due is not None:
                rollout.due += gap

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for rollout in [*self._known.values()]:
            if rollout.due is not None and now >= rollout.due + self._timeout:
                rollout.due, rollout.late = (
                    None,
                    f"made no request within {self._timeout:g} s (--rl-environment-timeout)",
                )
                self._stop(rollout)
        if not self._offers or not (waiting := [r for r in self._known.values() if r.offered]):
            self._taken = now
        elif any(not r.offered and r.process for r in self._known.values()):
            self._taken = now  # somebody works
        elif now >= self._taken + self._most:
            raise EpisodeError(
                f"--rl-agent external: no program has taken one of {len(waiting)} episodes for {self._most:.0f} s, "
                f"{EXTERNAL_SHARE} of --rl-wait-timeout; start programs that POST to the address in the job's log"
            )
        for rollout in self._rollouts.values():
            process = rollout.process
            if rollout.ending is not None and now >= rollout.ending and process.killed is None:
                process.killed = f"was in {self._who} that was killed, because one of its rollouts did not stop"
                os.kill(process.worker.pid, signal.SIGTERM)  # its keeper kills all processes

    def _next_limit(self) -> float:
        """The next deadline, on the monotonic clock."""
        limits = [rollout.due + self._timeout for rollout in self._known.values() if rollout.due is not None]
        return min(limits + [rollout.ending for rollout in self._rollouts.values() if rollout.ending], default=math.inf)
