"""`Environments` by verifiers: verifiers' own loop runs each rollout and requests the model's turns.

Each process (`verifiers_worker`) runs many rollouts. Messages of a rollout may come at any time; here each message
becomes the reply to a call of `Environments`. If a process dies, or is killed because a rollout in it cannot be
stopped, the rollouts that have begun in it fail, because verifiers' state is lost. Rollouts that have not begun run in
another process.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec

from mindspeed_rl_plugin.config.episode_flags import VERIFIERS
from mindspeed_rl_plugin.episodes.environments import EpisodeError, Reply, Turn
from mindspeed_rl_plugin.episodes.verifiers_load import ROW
from mindspeed_rl_plugin.rows import SampleId
from mindspeed_rl_plugin.workers.process import Program, Worker, wait_for

MAX_ROLLOUTS = 64  # most rollouts of a process at a time in training; an evaluation in between may add as many
AWAY_SECONDS = 1.0  # if the pipe was not read for longer, it may have been full: limits of replies are extended
STOP_SECONDS = 20.0  # in which a rollout that is given up must stop
END_SECONDS = 15.0  # in which a process must release the resources of its rollouts and end


class RolloutReport(msgspec.Struct):
    """A message of a process about a rollout. Fields without a comment are as in `Reply`."""

    number: int  # of the rollout
    seconds: float  # since the model's last turn, or since the rollout began
    prompt: list[int] | None = None  # token ids of the prompt of the turn that it requests
    messages: list[dict[str, str]] = []  # those that are new in this prompt, as text
    reward: float = 0.0
    done: bool = False
    failure: str | None = None
    ended: bool = False  # it was cancelled and has stopped


@dataclass(eq=False)
class VerifiersProcess:
    """A process of verifiers."""

    worker: Worker
    loaded: bool = False  # whether rollouts can begin in it
    killed: str | None = None  # why it was killed


@dataclass(eq=False)
class RolloutRecord:
    """A rollout, as the job's process knows it."""

    number: int
    sample: SampleId
    data: Any  # row of verifiers
    process: VerifiersProcess | None = None  # None before it begins
    due: float | None = None  # time since which its reply is due; None: it has not begun, or the model has its turn
    early: Reply | None = None  # its last reply, if it ended during the model's turn
    ending: float | None = None  # deadline to stop; None: it is not given up

    @property
    def evaluated(self) -> bool:
        """Whether it belongs to an evaluation."""
        return self.sample.epoch < 0


class VerifiersEnvironments:
    """environment: the text after `verifiers:`.
    python: interpreter that has verifiers, None for this one.
    tokenizer: path of the prompts' tokenizer.
    workers: number of processes.
    timeout: limit of one reply [seconds].
    wait: seconds that other ranks wait for this rank.
    together: most rollouts of a process at a time, None: no limit, for lockstep.

    Rows have the field `verifiers`, as `python -m mindspeed_rl_plugin tasks` writes them. Raises ValueError for an
    invalid interpreter. The processes load in the background; if this fails, `poll` raises the error.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    begins, answered = True, 0

    def __init__(
        self,
        environment: str,
        python: str | None,
        tokenizer: str,
        workers: int,
        timeout: float,
        wait: float,
        together: int | None = MAX_ROLLOUTS,
        trust_remote_code: bool = False,
    ) -> None:
        self._timeout, self._together = timeout, math.inf if together is None else together
        program = rollouts_program(interpreter(python))
        setup = (environment, tokenizer, trust_remote_code)
        loads = VERIFIERS + environment
        self._processes = [VerifiersProcess(Worker(program, setup, loads, wait)) for _ in range(workers)]
        self._numbers = itertools.count()
        self._rollouts: dict[int, RolloutRecord] = {}  # all that run in a process, also those that are given up
        self._known: dict[SampleId, RolloutRecord] = {}  # all that have given no last reply and are not given up
        self._queue: deque[RolloutRecord] = deque()  # all that have not begun
        self._replies: list[Reply] = []
        self._heard = time.monotonic()  # time of the last read

    @property
    def pending(self) -> bool:
        return bool(self._queue or self._replies or any(r.due is not None for r in self._known.values()))

    def begin(self, episode: SampleId, task: Mapping[str, Any], seed: int) -> None:
        """See `Environments`. `seed` is not used: verifiers has no seeds."""
        rollout = RolloutRecord(next(self._numbers), episode, task["record"][ROW])
        self._known[episode] = rollout
        self._queue.append(rollout)

    def act(self, episode: SampleId, turn: Turn) -> None:
        self._answer(episode, "act", turn.tokens, turn.logps)

    def finish(self, episode: SampleId, cut: Turn | None = None) -> None:
        """See `Environments`. cut: the turn that a limit has cut, for verifiers to score."""
        self._answer(episode, "finish", cut and (cut.tokens, cut.logps))

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
        for where, fields in rows.items():
            if ROW not in fields:
                raise ValueError(
                    f"--rl-environment {VERIFIERS}: {where} has no field {ROW!r}; make the data with "
                    f"`python -m mindspeed_rl_plugin tasks {VERIFIERS}ID --out FILE.jsonl`"
                )

    def close(self) -> None:
        for process in self._processes:
            process.worker.cut()
        for process in self._processes:
            process.worker.close()
        self._processes = []

    # calls

    def _answer(self, episode: SampleId, call: str, *arguments: Any) -> None:
        rollout = self._known.get(episode)
        if rollout is None:
            return
        if rollout.early is not None:
            self._reply(rollout, rollout.early)
            return
        rollout.due = time.monotonic()
        self._send(rollout, call, *arguments)

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
                rollout.process, rollout.due = process, time.monotonic()
                self._rollouts[rollout.number] = rollout
                self._send(rollout, "begin", rollout.data)

    def _give_up(self, rollout: RolloutRecord) -> None:
        del self._known[rollout.sample]
        rollout.due = None
        if rollout.process is None:
            self._queue.remove(rollout)
        elif rollout.early is None:
            rollout.ending = time.monotonic() + STOP_SECONDS
            self._send(rollout, "end")

    # replies

    def _hear(self, process: VerifiersProcess) -> None:
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
        self.answered += 1
        rollout = self._rollouts.get(report.number)
        if rollout is None:
            return
        failure = "was cancelled by its own code" if report.ended and rollout.ending is None else report.failure
        over = report.done or report.ended or failure is not None
        if over:
            del self._rollouts[report.number]
        prompt = None if report.prompt is None else tuple(report.prompt)
        reply = Reply(
            rollout.sample, report.messages, prompt, report.reward, report.done, failure, seconds=report.seconds
        )
        if rollout.due is not None:
            self._reply(rollout, reply)
        elif over:  # it ended during the model's turn, at a limit of verifiers
            rollout.early = reply

    def _reply(self, rollout: RolloutRecord, reply: Reply) -> None:
        self._replies.append(reply)
        rollout.due = None
        if reply.done or reply.failure is not None:
            del self._known[rollout.sample]

    def _died(self, process: VerifiersProcess, how: str) -> None:
        why = process.killed or f"was in a verifiers process whose code {how}"
        process.loaded, process.killed = False, None
        for rollout in [rollout for rollout in self._rollouts.values() if rollout.process is process]:
            self._take(RolloutReport(rollout.number, 0.0, failure=why))

    # limits

    def _excuse(self, gap: float) -> None:
        """Extend limits of replies by `gap`, the seconds without a read, if these are more than AWAY_SECONDS."""
        for rollout in self._known.values() if gap > AWAY_SECONDS else ():
            if rollout.due is not None:
                rollout.due += gap

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for rollout in [*self._known.values()]:
            if rollout.due is not None and now >= rollout.due + self._timeout:
                why = f"ran longer than {self._timeout:g} s (--rl-environment-timeout)"
                self._replies.append(Reply(rollout.sample, failure=why, seconds=now - rollout.due))
                self._give_up(rollout)
        for rollout in self._rollouts.values():
            process = rollout.process
            if rollout.ending is not None and now >= rollout.ending and process.killed is None:
                process.killed = "was in a verifiers process that was killed, because one of its rollouts did not stop"
                os.kill(process.worker.pid, signal.SIGTERM)  # its keeper kills all processes

    def _next_limit(self) -> float:
        """The next deadline, on the monotonic clock."""
        limits = [rollout.due + self._timeout for rollout in self._known.values() if rollout.due is not None]
        return min(limits + [rollout.ending for rollout in self._rollouts.values() if rollout.ending], default=math.inf)


def rollouts_program(python: str | None) -> Program:
    """The program of the processes. python: as `interpreter` returns it."""
    main = "mindspeed_rl_plugin.episodes.verifiers_worker:main"
    return Program(main, str | None, RolloutReport, "a verifiers process", EpisodeError, python, END_SECONDS)


def interpreter(python: str | None) -> str | None:
    """Path of --rl-environment-python, None for the interpreter of the job. Raises ValueError for an invalid one."""
    if python is None:
        return None
    advice = "give an interpreter of Python 3.11 or later that has verifiers, such as venv/bin/python"
    found = shutil.which(python)
    if found is None:
        raise ValueError(f"--rl-environment-python {python}: there is no such program here; {advice}")
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    try:
        said = subprocess.run([found, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip()
        version = tuple(map(int, said.split(".")))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise ValueError(f"--rl-environment-python {python} is no Python interpreter; {advice}") from None
    if version < (3, 11):
        raise ValueError(f"--rl-environment-python {python} is Python {said}; {advice}")
    return os.path.abspath(found)
