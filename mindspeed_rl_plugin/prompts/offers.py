"""Prompts that programs outside of the job offer. They wait here until a rollout takes them."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from mindspeed_rl_plugin.prompts.prompt_stream import PromptStream
from mindspeed_rl_plugin.rows import Prompt

ROLLOUTS = 4  # number of rollouts whose prompts may wait
ROW_SIZE = 1 << 20  # most characters of a row as JSON
ROOM_CHECK_SECONDS = 1.0  # between two checks whether a waiting program still runs


class Offers:
    """Offered prompts that wait, on the leader rank. Thread-safe.

    data: the run's prompts; offered rows have the same format.
    check_fields, check_answers: get fields or answers, by place of a row; raise ValueError if graders cannot use them.
    rollout: number of prompts of one rollout.
    resumes: whether the run resumes from a checkpoint. Programs then wait until `load` has restored the saved prompts,
    or until the first `take` if none were saved.

    Each prompt has a number below 0, its `Prompt.row`: -1, -2, ... in the order of the offers.
    """

    def __init__(
        self,
        data: PromptStream,
        check_fields: Callable[[Mapping[str, Set[str]]], None],
        rollout: int,
        resumes: bool = False,
        check_answers: Callable[[Mapping[str, str]], None] = lambda answers: None,
    ) -> None:
        self._data, self._check_fields, self._most = data, check_fields, ROLLOUTS * rollout
        self._check_answers = check_answers
        self._waiting: list[tuple[str, Prompt]] = []  # (row as it was offered, its prompt)
        self._taken, self._opened = 0, not resumes
        self._room = threading.Condition()

    def add(self, rows: Sequence[str], seconds: float, ended: Callable[[], bool] | None = None) -> list[int]:
        """Add all rows (JSON) or none. Waits at most `seconds` until they fit. Returns the numbers of their prompts.

        ended: returns whether the program that offers them has ended. Raises ValueError for invalid rows, and for more
        rows than may wait; TimeoutError if they did not fit; EOFError if the program has ended.
        """
        prompts, end = self._prompts(rows), time.monotonic() + seconds
        with self._room:
            while not self._opened or len(self._waiting) + len(prompts) > self._most:
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError(f"offer: {self._why_not(len(prompts), seconds)}")
                self._room.wait(min(left, ROOM_CHECK_SECONDS))
                if ended is not None and ended():
                    raise EOFError("the program that offered the prompts has ended")
            return self._append(rows, prompts)

    def take(self, most: int) -> list[Prompt]:
        """Remove and return the oldest prompts, at most `most`."""
        with self._room:
            taken, self._waiting = self._waiting[:most], self._waiting[most:]
            self._taken, self._opened = self._taken + len(taken), True
            self._room.notify_all()
        return [prompt for _, prompt in taken]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: how many prompts were taken, and the rows that wait."""
        with self._room:
            return {"taken": self._taken, "waiting": [row for row, _ in self._waiting]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Its prompts come before those that are offered later. Raises ValueError for rows that this
        run refuses."""
        rows = state["waiting"]
        try:
            prompts = self._prompts(rows)
        except ValueError as error:
            raise ValueError(
                f"this run refuses one of {len(rows)} offered prompts that wait in the checkpoint: {error}; or resume "
                "with the former flags"
            ) from error
        with self._room:
            self._taken, self._opened = state["taken"], True
            self._append(rows, prompts)
            self._room.notify_all()

    def _append(self, rows: Sequence[str], prompts: Sequence[Prompt]) -> list[int]:
        """Add prompts at the end of the queue. Returns their numbers."""
        first = -1 - self._taken - len(self._waiting)
        numbers = list(range(first, first - len(prompts), -1))
        numbered = [dataclasses.replace(p, row=n) for p, n in zip(prompts, numbers, strict=True)]
        self._waiting += zip(rows, numbered, strict=True)
        return numbers

    def _why_not(self, count: int, seconds: float) -> str:
        """Why `count` prompts were not accepted within `seconds`, and what to do."""
        if not self._opened:
            return (
                f"after {seconds:g} s the job was still reading its checkpoint, whose prompts come first; offer "
                "prompts later, or with a longer deadline"
            )
        return (
            f"no room for {count} prompts within {seconds:g} s: {len(self._waiting)} prompts wait, and at most "
            f"{self._most} ({ROLLOUTS} rollouts) may wait; offer them later, or with a longer deadline"
        )

    def _prompts(self, rows: Sequence[str]) -> list[Prompt]:
        if long := [(i, len(row)) for i, row in enumerate(rows) if len(row) > ROW_SIZE]:
            number, size = long[0]
            raise ValueError(f"offer: row {number} has {size} characters as JSON, the limit is {ROW_SIZE}; drop fields")
        if len(rows) > self._most:
            raise ValueError(
                f"offer: {len(rows)} prompts at once, and at most {self._most} ({ROLLOUTS} rollouts) may wait; offer "
                "fewer at a time"
            )
        prompts = self._data.read_rows("offer:", [json.loads(row) for row in rows])
        self._check_fields({f"offer: row {i}": frozenset(p.record) for i, p in enumerate(prompts)})
        self._check_answers({f"offer: row {i}": p.answer for i, p in enumerate(prompts)})
        return prompts
