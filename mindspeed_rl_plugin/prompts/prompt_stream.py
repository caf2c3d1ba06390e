"""The order of the prompts, and a cursor in it that can be saved."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import random
from collections.abc import Sequence
from typing import Any

from mindspeed_rl_plugin.prompts.render import Renderer
from mindspeed_rl_plugin.prompts.sources import Source, open_source
from mindspeed_rl_plugin.rows import Prompt


class PromptStream:
    """Prompts of one or several paths, concatenated; each epoch goes through all of them in a new order.

    The order depends only on the seed and the number of prompts, so it is the same on every rank. All rows are read and
    tokenized at the start. Prompts longer than `max_length` tokens are dropped; `dropped` is their number. `len()` is
    the number of kept rows, `rows` are their places in the data, rising, and `fingerprint` is a digest of their tokens
    and answers.

    Raises ValueError as `open_source` and the renderer do, and if no prompt is kept.
    """

    def __init__(self, paths: Sequence[str], renderer: Renderer, *, max_length: int, seed: int) -> None:
        self._renderer, self._max_length, self._seed = renderer, max_length, seed
        self._sources = [open_source(path) for path in paths]
        self._starts = [0, *itertools.accumulate(len(s) for s in self._sources)]
        self._kinds: dict[frozenset[str], int] = {}  # fields of a record -> first kept row with exactly these
        self._answers: dict[str, int] = {}  # answer -> first kept row with it
        self.rows, self.fingerprint = self._scan()
        self.dropped = self._starts[-1] - len(self.rows)
        if not self.rows:
            raise ValueError(self._none_left([self._prompt(row) for row in range(self.dropped)]))
        self._epoch = self._position = 0
        self._order = self._permutation(0)

    def __len__(self) -> int:
        return len(self.rows)

    def next(self, n: int) -> list[Prompt]:
        """The next n prompts; after the end of an epoch come those of the next epoch."""
        served = []
        while len(served) < n:
            if self._position == len(self.rows):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation(self._epoch)
            served.append(self._prompt(self.rows[self._order[self._position]]))
            self._position += 1
        return served

    def all(self) -> list[Prompt]:
        """Every kept prompt in the order of the data, for evaluation; the cursor does not move."""
        return [self._prompt(row) for row in self.rows]

    def at(self, place: int) -> Prompt:
        """Kept prompt number `place`, from 0 on, in the order of the data; the cursor does not move."""
        return self._prompt(self.rows[place])

    def where(self, place: int) -> str:
        """File and line of the prompt `at(place)`."""
        return self._where(self.rows[place])

    def read_rows(self, where: str, rows: Sequence[Any]) -> list[Prompt]:
        """Prompts of rows that are not in the data. where: begin of an error's text. Raises ValueError as the renderer
        does, and for a prompt that is too long."""
        source = Source(where, len(rows), rows.__getitem__, lambda i: f"row {i}")
        prompts = [self._renderer.read(source, i, i) for i in range(len(rows))]
        for i, prompt in enumerate(prompts):
            if len(prompt.tokens) > self._max_length:
                raise ValueError(
                    f"{source.where(i)} has {len(prompt.tokens)} tokens, --rl-max-prompt-length is "
                    f"{self._max_length}; shorten the prompt"
                )
        return prompts

    def kinds_of_rows(self) -> dict[str, frozenset[str]]:
        """File and line of a kept row -> fields of its record, for the first row with exactly these fields."""
        return {self._where(row): fields for fields, row in self._kinds.items()}

    def answers(self) -> dict[str, str]:
        """File and line of a kept row -> its answer, for the first row with this answer."""
        return {self._where(row): answer for answer, row in self._answers.items()}

    def state(self) -> dict[str, Any]:
        """The cursor, with the seed and a digest of the data; ints and strings."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ValueError if data or seed differ from those of `state`."""
        here = self._identity()
        changed = [f"{k} was {state.get(k)!r}, now {v!r}" for k, v in here.items() if state.get(k) != v]
        if changed:
            raise ValueError(
                f"the saved prompt cursor belongs to other prompts: {'; '.join(changed)}. Resume with the same data, "
                "tokenizer, length limit and seed, or start a new run"
            )

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue exactly at the cursor of `state`. Raises ValueError as `check_state` does."""
        self.check_state(state)
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "prompts": len(self.rows), "fingerprint": self.fingerprint}

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _place(self, row: int) -> tuple[Source, int]:
        """The source of a row, and the row's index in it."""
        which = bisect.bisect_right(self._starts, row) - 1
        return self._sources[which], row - self._starts[which]

    def _where(self, row: int) -> str:
        source, index = self._place(row)
        return source.where(index)

    def _prompt(self, row: int) -> Prompt:
        return self._renderer.read(*self._place(row), row)

    def _scan(self) -> tuple[list[int], str]:
        """Rows to keep, and a digest of their tokens and answers."""
        kept, digest = [], hashlib.sha256()
        for row in range(self._starts[-1]):
            if (content := self._content(self._prompt(row))) is not None:
                kept.append(row)
                digest.update(repr(content).encode())
        return kept, digest.hexdigest()[:16]

    def _content(self, prompt: Prompt) -> tuple | None:
        """Content of a row for the fingerprint; None for a row to leave out."""
        if len(prompt.tokens) > self._max_length:
            return None
        self._kinds.setdefault(frozenset(prompt.record), prompt.row)
        self._answers.setdefault(prompt.answer, prompt.row)
        return prompt.tokens, prompt.answer

    def _none_left(self, prompts: Sequence[Prompt]) -> str:
        longest = max(len(prompt.tokens) for prompt in prompts)
        return (
            f"all {len(prompts)} prompts are longer than {self._max_length} tokens (longest {longest}); "
            "raise --rl-max-prompt-length"
        )
