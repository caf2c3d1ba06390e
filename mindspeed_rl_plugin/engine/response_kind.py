"""What the responses of a job are: by default one turn of the model, which nobody answers.

`episodes.episode_kind` has those of several turns. Whatever differs between them is asked of one object, which
the builder of the inputs chooses.
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

    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas of what the model may call; None: nobody answers it
    tokenizer: str | None = None  # directory of the one by which engines render answers
    reads: tuple[str, ...] = ()  # columns that an engine is given besides the prompt
    columns: tuple[ColumnSpec, ...] = ()  # that rows have besides those of all responses
    measured: tuple[str, ...] = ()  # names of those that `meter` reads
    dumped: tuple[str, ...] = ()  # names of further ones that dumps hold
    limited: tuple[str, ...] = ()  # columns that tell what --rl-max-response-length limits, where more than a response
    graded: tuple[str, ...] = ()  # fields of a `GradeItem` that graders get besides
    ends: tuple[str, ...] = ("stop", "length")  # of `FINISH`: why one is over
    drops_failed = False  # whether rows with `environment_failed` are trained nowhere

    def over(self, engine: Engine, tokenizer: Any, peers: Peers) -> Engine:
        """The engine that makes them, over one that samples a turn. tokenizer: the job's; peers: its ranks."""
        return engine

    def described(self) -> Mapping[str, Any] | None:
        """What engines of other processes must know, as JSON values."""
        return None

    def check_fields(self, rows: Mapping[str, Set[str]]) -> None:
        """Raises ValueError where none can begin for lack of a field. rows: place in the data -> fields of a record."""

    def try_once(self, meta: Mapping[str, Any], base: int, where: str) -> None:
        """Begin one before the first real one. meta: of its prompt; base: of seeds; where: the prompt's place in the
        data. Collective. Raises ValueError where that fails."""

    def grade_fields(self, prompt: Prompt) -> Mapping[str, Any]:
        """`graded` of a response to the prompt that is its answer."""
        return {}

    def completed(self, completion: Completion, prompt: Prompt) -> Completion:
        """A whole response to the prompt, with all that its row needs."""
        return completion

    def prompt_lengths(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """`[B]` tokens before the model's first turn, and whether these are the data's prompt."""
        return rows["prompt"].lengths, torch.ones(len(rows), dtype=torch.bool)

    def sampled(self, rows: Rows) -> Tensor:
        """`[T]` bool: the tokens that the model sampled."""
        of, at = places(rows["tokens"].lengths)
        return at >= self.prompt_lengths(rows)[0][of]

    def check_turns(self, rows: Rows) -> Checks:
        """Before `sampled` is asked."""
        yield from ()

    def check_rest(self, rows: Rows) -> Checks:
        """Of rows whose tokens are right."""
        yield from ()

    def meter(self) -> Callable[[Rows], Mapping[str, float]]:
        """Metrics of a rollout, for one rank and a whole run."""
        return lambda rows: {}

    def close(self) -> None:
        """End what this rank has started for them. Idempotent."""


ONE_TURN = ResponseKind()


def places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each packed entry, and its place in it."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return of, torch.arange(len(of)) - (lengths.cumsum(0) - lengths)[of]
