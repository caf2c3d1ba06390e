"""The kind of a job's responses: by default each response is one turn of the model, without an environment.

`episodes.episode_kind` has responses of several turns. All that differs between the kinds is in one object, which
`launch.read_inputs` chooses.
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
"""Tuples (of, bad, text, *values) about N entries (rows, tokens or turns). of: row of each entry; bad: whether the
entry is wrong; text: of the error, in which {} stands for values; values: each a sequence of N, or a function of an
entry's number. The error of a tuple is raised before the next tuple is made."""


class ResponseKind:
    """Responses of one turn."""

    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas of functions that the model may call
    stops = False  # whether requests may have stop texts of their own
    tokenizer: str | None = None  # directory of the tokenizer that encodes replies of tools and environments
    reads: tuple[str, ...] = ()  # columns that an engine gets in addition to the prompt
    columns: tuple[ColumnSpec, ...] = ()  # columns that only rows of this kind have
    measured: tuple[str, ...] = ()  # names of columns that `meter` reads
    dumped: tuple[str, ...] = ()  # names of further columns in dumps
    # columns that give the length for --rl-max-response-length; empty: `response_length`
    limited: tuple[str, ...] = ()
    graded: tuple[str, ...] = ()  # further fields of a `GradeItem` that graders get
    ends: tuple[str, ...] = ("stop", "length")  # the values of `FINISH` that a response may have
    drops_failed = False  # whether rows with `environment_failed` are never trained

    def over(self, engine: Engine, tokenizer: Any, peers: Peers) -> Engine:
        """An engine for these responses, on top of an engine that samples one turn. tokenizer: of the job; peers: ranks
        of the engine."""
        return engine

    def described(self) -> Mapping[str, Any] | None:
        """Settings for engines in other processes, as JSON values."""
        return None

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raises ValueError if a row of the data lacks a field that a response needs. rows: file and line -> fields."""

    def try_once(self, meta: Mapping[str, Any], base: int, where: str) -> None:
        """Begin a response as a trial, before training. meta: of its prompt; base: as in `response_seed`; where:
        the prompt's file and line. Collective. Raises ValueError if it cannot begin and errors must stop the run."""

    def grade_fields(self, prompt: Prompt) -> Mapping[str, Any]:
        """The fields `graded` of a trial response whose text is the prompt's answer."""
        return {}

    def completed(self, completion: Completion, prompt: Prompt) -> Completion:
        """The completed response with all columns that its row needs."""
        return completion

    def prompt_lengths(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """`[B]` number of tokens before the model's first turn, and whether these tokens are the prompt of the data."""
        return rows["prompt"].lengths, torch.ones(len(rows), dtype=torch.bool)

    def response_lengths(self, rows: Rows) -> Tensor:
        """`[B]` number of tokens that --rl-max-response-length limits."""
        return rows["tokens"].lengths - self.prompt_lengths(rows)[0]

    def sampled(self, rows: Rows) -> Tensor:
        """`[T]` bool: the tokens that the model sampled."""
        of, at = places(rows["tokens"].lengths)
        return at >= self.prompt_lengths(rows)[0][of]

    def check_turns(self, rows: Rows) -> Checks:
        """Check the columns that `sampled` reads."""
        yield from ()

    def check_rest(self, rows: Rows) -> Checks:
        """Check the other columns; called after all checks of the rows' tokens have passed."""
        yield from ()

    def meter(self) -> Callable[[Rows], Mapping[str, float]]:
        """A new function that computes metrics of a rollout. It may have state, so a rank keeps it for the run."""
        return lambda rows: {}

    def close(self) -> None:
        """End the processes that this rank has started. Idempotent."""


ONE_TURN = ResponseKind()


def places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each packed entry, and the entry's index in this row."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return of, torch.arange(len(of)) - (lengths.cumsum(0) - lengths)[of]
