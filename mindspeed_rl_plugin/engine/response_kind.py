"""The kind of a job's responses: by default one turn of the model, which nothing answers.

`episodes.episode_kind` has responses of several turns. One object answers all that differs between the kinds; the
builder of the inputs chooses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.rollout_engine import Engine
from mindspeed_rl_plugin.rows import Completion, Prompt, Rows

Checks = Iterator[tuple[Any, ...]]
"""Row of each part, which parts are wrong, what is wrong with one and what to do, and the values that this names: of
each part, or a function of its number. The first that is wrong is raised, so a check may rely on those before it."""


class ResponseKind:
    """Responses of one turn."""

    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas of functions that the model may call
    tokenizer: str | None = None  # directory of the tokenizer by which engines render answers
    reads: tuple[str, ...] = ()  # columns that an engine gets in addition to the prompt
    columns: tuple[ColumnSpec, ...] = ()  # columns that only rows of this kind have
    measured: tuple[str, ...] = ()  # names of columns that `meter` reads
    dumped: tuple[str, ...] = ()  # names of further columns in dumps
    # columns for the length that --rl-max-response-length limits, if it is not that of the response alone
    limited: tuple[str, ...] = ()
    graded: tuple[str, ...] = ()  # further fields of a `GradeItem` that graders get
    ends: tuple[str, ...] = ("stop", "length")  # of `FINISH`: how a response may end
    drops_failed = False  # whether rows with `environment_failed` are never trained

    def over(self, engine: Engine, tokenizer: Any, peers: Peers) -> Engine:
        """The engine of these responses, on top of an engine that samples one turn. tokenizer: of the job; peers: ranks
        of the engine."""
        return engine

    def described(self) -> Mapping[str, Any] | None:
        """Settings for engines of other processes, as JSON values."""
        return None

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raises ValueError where a row lacks a field that a response needs. rows: place in the data -> fields of a
        record."""

    def try_once(self, meta: Mapping[str, Any], base: int, where: str) -> None:
        """Begin a response as a trial, before the first real one. meta: of its prompt; base: of seeds; where: the
        prompt's place in the data. Collective. Raises ValueError where that fails."""

    def grade_fields(self, prompt: Prompt) -> Mapping[str, Any]:
        """The fields `graded` for a trial response, which is the prompt's answer."""
        return {}

    def completed(self, completion: Completion, prompt: Prompt) -> Completion:
        """A complete response to the prompt, with all that its row needs."""
        return completion

    def prompt_lengths(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """`[B]` number of tokens before the model's first turn, and whether these are the prompt of the data."""
        return rows["prompt"].lengths, torch.ones(len(rows), dtype=torch.bool)

    def sampled(self, rows: Rows) -> Tensor:
        """`[T]` bool: the tokens that the model sampled."""
        of, at = places(rows["tokens"].lengths)
        return at >= self.prompt_lengths(rows)[0][of]

    def check_turns(self, rows: Rows) -> Checks:
        """Check the columns that `sampled` reads."""
        yield from ()

    def check_rest(self, rows: Rows) -> Checks:
        """Check the other columns, of rows with valid tokens."""
        yield from ()

    def meter(self) -> Callable[[Rows], Mapping[str, float]]:
        """Computes metrics of rollouts, for one rank and a complete run."""
        return lambda rows: {}

    def close(self) -> None:
        """End the processes that this rank has started. Idempotent."""


ONE_TURN = ResponseKind()


def places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each packed entry, and its place in it."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return of, torch.arange(len(of)) - (lengths.cumsum(0) - lengths)[of]
