"""The data types that all folders share: ids, ragged columns, rows, prompts, requests and completions.

Shape legend, used in every docstring of the package:

    B  rows (samples) in a batch          G  groups (prompts) in a rollout
    N  responses of one prompt            P  prompt tokens, R response tokens
    L  tokens of one sample, P + R        T  packed tokens of a batch, sum of L
    S  padded length of a micro-batch     V  vocabulary, H hidden size

**Alignment.** Every per-token column of a sample has length L and is aligned with `tokens`: entry t
belongs to the event "tokens[t] was produced after tokens[:t]". `loss_mask[t]` is 1 if this event is
trained, and 0 on prompt tokens; entry 0 is always masked. Only code in `forward/` shifts logits
against tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class SampleId(NamedTuple):
    """Identity of one sample, never reused."""

    epoch: int  # number of the rollout
    group: int  # number of the prompt within the rollout
    member: int  # number of the response within the group


class TurnId(NamedTuple):
    """Identity of a turn of a response, never reused."""

    epoch: int
    group: int
    member: int
    call: int  # number of the turn within the response, in the order of the requests for turns

    @property
    def sample(self) -> SampleId:
        return SampleId(*self[:3])


Group = tuple[int, int]
"""Identity of one group: `epoch` and `group` of its samples."""

FINISH = ("stop", "length", "abort", "turns", "time")
"""Why a response ended ("turns": it has the highest allowed number of turns; "time": its agent did not go on in time);
columns hold the index in this tuple."""


@dataclass(frozen=True)
class Ragged:
    """B rows of different lengths, packed without padding: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Tensor  # `[T, *trailing]`
    offsets: Tensor  # `[B + 1]` int64

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor], dtype: torch.dtype | None = None) -> Ragged:
        """Pack rows `[L_i, *trailing]`. An empty sequence needs `dtype`."""
        if not rows and dtype is None:
            raise ValueError("Ragged.from_rows: no rows and no dtype; pass dtype for an empty column")
        lengths = torch.tensor([0, *(r.shape[0] for r in rows)], dtype=torch.int64)
        values = torch.cat(list(rows)) if rows else torch.empty(0, dtype=dtype)
        return cls(values if dtype is None else values.to(dtype), lengths.cumsum(0))

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """`[B]` int64, entries per row."""
        return self.offsets.diff()

    def row(self, i: int) -> Tensor:
        """View of row i, `[L_i, *trailing]`."""
        return self.values[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def rows(self) -> list[Tensor]:
        """Views of all rows."""
        return list(self.values.split(self.lengths.tolist()))

    def take(self, index: Sequence[int]) -> Ragged:
        """New packed column with the rows `index`, in that order."""
        return Ragged.from_rows([self.row(i) for i in index], dtype=self.values.dtype)

    def padded(self, length: int, value: float = 0) -> Tensor:
        """`[B, length, *trailing]`, rows left-aligned. Raises ValueError if a row is longer."""
        longest = int(self.lengths.max()) if len(self) else 0
        if longest > length:
            raise ValueError(f"cannot pad a row of {longest} entries to {length}")
        out = self.values.new_full((len(self), length, *self.values.shape[1:]), value)
        for i, row in enumerate(self.rows()):
            out[i, : row.shape[0]] = row
        return out


Column = Ragged | Tensor


@dataclass(frozen=True)
class Rows:
    """Some columns of some samples; the dock, through which stages pass rows, moves data in this form."""

    ids: tuple[SampleId, ...]  # of B samples
    # name -> `Ragged` of B rows, or tensor `[B, *trailing]`
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if len(column) != len(self.ids):
                raise ValueError(f"column {name!r} has {len(column)} rows for {len(self.ids)} ids")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def take(self, index: Sequence[int]) -> Rows:
        """The rows `index`, in that order, copied."""
        columns = {
            k: c.take(index) if isinstance(c, Ragged) else c[torch.as_tensor(index, dtype=torch.int64)]
            for k, c in self.columns.items()
        }
        return Rows(tuple(self.ids[i] for i in index), columns)

    def select(self, ids: Iterable[SampleId]) -> Rows:
        """The rows of `ids`, in that order. Raises KeyError for an id that is not here."""
        where = {sample: i for i, sample in enumerate(self.ids)}
        return self.take([where[i] for i in ids])

    def with_columns(self, **columns: Column) -> Rows:
        """The same rows with columns added or replaced."""
        return Rows(self.ids, {**self.columns, **columns})


def joined(columns: Sequence[Column]) -> Column:
    """One column with the rows of all `columns`. There must be at least one column."""
    if isinstance(columns[0], Ragged):
        return Ragged.from_rows([row for column in columns for row in column.rows()])
    return torch.cat(list(columns))


def pack_json(records: Sequence[object]) -> Ragged:
    """Records as UTF-8 JSON in a uint8 column, so that text crosses the dock without pickle."""
    blobs = [json.dumps(r, ensure_ascii=False).encode() for r in records]
    return Ragged.from_rows([torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in blobs], dtype=torch.uint8)


def unpack_json(column: Ragged) -> list[object]:
    """Inverse of `pack_json`."""
    return [json.loads(bytes(r.tolist())) for r in column.rows()]


def longest_responses(rows: Rows) -> Tensor:
    """`[B]` int64, tokens behind the prompt, of the path of each row that has most. rows: `length`, `prompt_length`,
    and `paths` if there may be several."""
    if (paths := rows.columns.get("paths")) is None:
        return rows["length"] - rows["prompt_length"]
    most = []
    for of_row, length in zip(paths.rows(), rows["length"].tolist(), strict=True):
        starts, prompts = of_row.T
        ends = torch.cat([starts[1:], starts.new_tensor([length])])
        most.append(int((ends - starts - prompts).max()))
    return torch.tensor(most, dtype=torch.int64)


def route_dtype(experts: int) -> torch.dtype:
    """Of ids of so many experts; each token of a row has some for each layer with experts."""
    return torch.uint8 if experts <= 256 else torch.int16


def group_index(ids: Sequence[SampleId]) -> Tensor:
    """`[B]` int64: for each id the number of its group, counted from 0 in the order of `ids`."""
    seen: dict[tuple[int, int], int] = {}
    numbers = [seen.setdefault((sample.epoch, sample.group), len(seen)) for sample in ids]
    return torch.tensor(numbers, dtype=torch.int64)


def spread(advantages: Tensor, loss_mask: Ragged) -> Ragged:
    """Give the advantage of a sample to each of its trained tokens.

    advantages: `[B]`; loss_mask: ragged `[L]`. Returns ragged `[L]` float32, 0.0 where the mask is 0.
    """
    lengths = loss_mask.lengths.to(advantages.device)
    values = advantages.float().repeat_interleave(lengths) * loss_mask.values.to(advantages.device).float()
    return Ragged(values, loss_mask.offsets)


def digest_number(digest: str | None) -> int:
    """A digest of weights for the column `weights_digest`: its 64 bits as an int64; 0 if there is no digest."""
    value = int(digest, 16) if digest else 0
    return value - (1 << 64) if value >> 63 else value


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine."""

    tokens: tuple[int, ...]  # P token ids (with --rl-apply-chat-template: of the rendered prompt)
    text: str  # text of the prompt for graders
    answer: str  # ground truth, "" when the data has none
    row: int  # index in the data, negative for a prompt that another process has offered
    record: Mapping[str, object] = field(default_factory=dict)  # other fields of its row (JSON values)
    messages: Sequence[Mapping[str, object]] | None = None  # chat messages, if the data have these instead of a string


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Completion:
    """One response, complete or partial."""

    id: SampleId | TurnId
    tokens: tuple[int, ...]  # R response ids, with the stop token if one was sampled
    logps: tuple[float, ...]  # R log-probs after temperature, top-p and top-k; 0.0 for a token that was not sampled
    finish: str  # one of `FINISH`
    # (first response token, weight version) of each part sampled by one version; the first part begins at token 0
    segments: tuple[tuple[int, int], ...]
    prompt: tuple[int, ...] = ()  # token ids before the response; (): those of the request
    # (first, end) of each turn of the model, in response tokens; tokens between turns were not sampled; None: one turn
    turns: tuple[tuple[int, int], ...] | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)  # further columns of its row, each with B = 1
    resumable: bool = True  # whether another engine can continue it

    @property
    def version(self) -> int:
        """Oldest weight version that sampled a token of this response."""
        return min(version for _, version in self.segments)

    @property
    def mask(self) -> Tensor:
        """`[R]` uint8, 1 where the model sampled the token."""
        mask = torch.zeros(len(self.tokens), dtype=torch.uint8)
        for first, end in ((0, len(self.tokens)),) if self.turns is None else self.turns:
            mask[first:end] = 1
        return mask

    @property
    def sampled(self) -> int:
        """Tokens that the model sampled."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class Task:
    """The task of an environment."""

    fields: Mapping[str, object]  # `text`, `answer`, `record`, `messages` of its `Prompt`
    seed: int  # the same for all rows of a group


@dataclass(frozen=True)
class GenerateRequest:
    """A request for one response."""

    id: SampleId | TurnId
    prompt_tokens: tuple[int, ...]
    sampling: Sampling
    seed: int  # 63 bits; of this response, or of the part after `begun`
    begun: Completion | None = None  # the part that was sampled before
    task: Task | None = None  # for the environment that answers the model's turns; None: single turn
