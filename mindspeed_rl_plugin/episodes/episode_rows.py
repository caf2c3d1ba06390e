"""Columns that only rows of episodes have, their checks for rows from other processes, and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock import ColumnSpec
from mindspeed_rl_plugin.engine.response_kind import Checks, places
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.episodes.environments import EpisodeError
from mindspeed_rl_plugin.rows import FINISH, Column, Ragged, Rows, pack_json

EPISODE_COUNTS = (
    *("calls", "malformed", "unknown", "arguments", "raised"),
    *("observation_tokens", "cut", "special", "milliseconds"),
)
"""Numbers that are counted in an episode. calls: calls that were made; malformed: calls that cannot be read; unknown:
calls of unknown tools; arguments: calls with wrong arguments; raised: calls that failed; observation_tokens: tokens
between turns; cut: observations that were cut to --rl-max-observation-length; special: messages of the environment
with the text of a control token (see `chat`); milliseconds: time of the user's code."""
FORK_COUNTS = (
    *("roots", "forks", "differ_role", "differ_content", "differ_reasoning", "differ_tool_calls"),
    *("differ_tool_call_id", "differ_tools"),
)
"""The same of agents. roots: conversations that are no continuation; forks: other turns that begin a path; differ_*:
such conversations by the first field that differs from an earlier one."""

_ONLY_MEASURED = ("environment_failed", "episode_counts", "tool_calls", "fork_counts")
MEASURED = ("prompt_length", "turns", "paths", *_ONLY_MEASURED)
DUMPED = ("paths", "turn_reward", "conversation", *_ONLY_MEASURED)
FAILING = 16  # the run stops if a tool failed in every call of the last FAILING episodes that called it


def episode_columns(tools: int, turns: int, agent: bool = False) -> tuple[ColumnSpec, ...]:
    """Specs of these columns. tools: number of tools; turns: most turns of an episode; agent: whether rows may have
    several paths."""
    columns = (
        ColumnSpec("prompt_length", torch.int64, "sample", ragged=False),  # with the environment's first messages
        # 1: the environment changed the prompt of the data
        ColumnSpec("environment_began", torch.int8, "sample", ragged=False),
        # [first token, end) of each turn of the model, as indices of the row's `tokens`
        ColumnSpec("turns", torch.int64, "sample", ragged=True, trailing=(2,), longest=turns),
        ColumnSpec("turn_reward", torch.float32, "sample", ragged=True, longest=turns),  # by the environment
        ColumnSpec("conversation", torch.uint8, "sample", ragged=True),  # JSON: chat messages
        ColumnSpec("environment_failed", torch.int8, "sample", ragged=False),
        ColumnSpec("episode_counts", torch.int64, "sample", ragged=False, trailing=(len(EPISODE_COUNTS),)),
    )
    calls = ColumnSpec("tool_calls", torch.int64, "sample", ragged=False, trailing=(tools, 2))
    # first token of each path, as index of the row's `tokens`, and tokens before its first turn
    paths = ColumnSpec("paths", torch.int64, "sample", ragged=True, trailing=(2,), longest=turns)
    forks = ColumnSpec("fork_counts", torch.int64, "sample", ragged=False, trailing=(len(FORK_COUNTS),))
    return (*columns, *([calls] if tools else []), *([paths, forks] if agent else []))


def episode_row(
    prompt: Sequence[int],
    asked: Sequence[int],
    turns: Sequence[tuple[int, int]],
    rewards: Sequence[float],
    conversation: Sequence[Mapping[str, object]],
    *,
    counts: Mapping[str, int],
    tools: Sequence[Sequence[int]],
    failed: bool,
    paths: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Column]:
    """The columns of one episode, B = 1.

    prompt: token ids before the first turn.
    asked: token ids of the prompt in the data.
    turns: (first, end) of each turn of the model, in response tokens.
    rewards: of the environment, one for each turn.
    conversation: chat messages (JSON values), with the environment's last reply, which the model never sees. Messages
    of the model also have `turn`, the turn's [first, end) in response tokens, and `reward`. `seconds`, the time of the
    environment's reply, are in the reply's first message or, if the reply has none, in the message before.
    counts: by the names in `EPISODE_COUNTS` and, with paths, `FORK_COUNTS`.
    tools: for each tool, number of its calls, and of those that failed.
    paths: first token of each path in the row, and the tokens before its first turn; None: rows have one path.
    """
    columns: dict[str, Column] = {
        "prompt_length": torch.tensor([len(prompt)]),
        "environment_began": torch.tensor([tuple(prompt) != tuple(asked)], dtype=torch.int8),
        "turns": Ragged.from_rows([torch.tensor(turns, dtype=torch.int64).reshape(-1, 2) + len(prompt)]),
        "turn_reward": Ragged.from_rows([torch.tensor(rewards, dtype=torch.float32)]),
        "conversation": pack_json([list(conversation)]),
        "environment_failed": torch.tensor([failed], dtype=torch.int8),
        "episode_counts": torch.tensor([[counts[name] for name in EPISODE_COUNTS]]),
    }
    if tools:
        columns["tool_calls"] = torch.tensor([[list(calls) for calls in tools]])
    if paths is not None:
        columns["paths"] = Ragged.from_rows([torch.tensor(paths)])
        columns["fork_counts"] = torch.tensor([[counts[name] for name in FORK_COUNTS]])
    return columns


# checks of rows


def check_turns(rows: Rows) -> Checks:
    """Check the places of the model's turns."""
    turns, before, total = rows["turns"], rows["prompt_length"], rows["tokens"].lengths
    text = "turns is empty; give [first, end) of each turn of the model"
    yield torch.arange(len(rows)), turns.lengths < 1, text
    of, at = places(turns.lengths)
    firsts, ends = turns.values.T
    least = torch.where(at > 0, ends.roll(1), before[of])
    bad = (firsts < least) | ((at == 0) & (firsts != before[of])) | (ends <= firsts) | (ends > total[of])
    text = (
        "turns {}; give [first, end) of each turn, none empty, in order, without overlap; the first begins at the "
        "prompt's end ({}), and none ends after {}"
    )
    yield of, bad, text, lambda s: turns.row(int(of[s])).tolist(), before[of], total[of]


def check_paths(rows: Rows) -> Checks:
    """Check where paths begin: with the row, and else between two turns."""
    if (paths := rows.columns.get("paths")) is None:
        return
    of, at = places(paths.lengths)
    text = (
        "paths {}; give [first token, tokens of its prompt] of each path, the first one at 0, in order, none in a turn"
    )
    yield torch.arange(len(rows)), paths.lengths < 1, text, lambda i: paths.row(int(i)).tolist()
    (starts, prompts), sampled = paths.values.T, sampled_tokens(rows)
    least = torch.where(at > 0, starts.roll(1) + 1, 0)
    first = (at == 0) & ((starts != 0) | (prompts != rows["prompt_length"][of]))
    bad = (starts < least) | first | (prompts < 1) | (starts + prompts >= rows["tokens"].lengths[of])
    yield of, bad, text, lambda s: paths.row(int(of[s])).tolist()
    yield of, sampled[rows["tokens"].offsets[of] + starts], text, lambda s: paths.row(int(of[s])).tolist()


def sampled_tokens(rows: Rows) -> Tensor:
    """`[T]` bool: the tokens of the model's turns."""
    turns, tokens = rows["turns"], rows["tokens"]
    starts = tokens.offsets[places(turns.lengths)[0]]
    firsts, ends = turns.values.T
    edges, one = torch.zeros(len(tokens.values) + 1, dtype=torch.int64), torch.ones_like(firsts)
    edges.index_add_(0, starts + firsts, one).index_add_(0, starts + ends, -one)
    return edges.cumsum(0)[:-1].bool()


def check_rest(rows: Rows) -> Checks:
    """Check the other columns: rewards, flags, counts and conversations."""
    every, rewards, turns = torch.arange(len(rows)), rows["turn_reward"], rows["turns"].lengths
    text = "turn_reward has {} entries for {} turns; give one for each turn"
    yield every, rewards.lengths != turns, text, rewards.lengths, turns
    of, at = places(rewards.lengths)
    text = "turn {}: turn_reward is {}; give a finite number"
    yield of, ~rewards.values.isfinite(), text, at, rewards.values
    for name in ("environment_began", "environment_failed"):
        yield every, (rows[name] < 0) | (rows[name] > 1), name + " is {}; give 0 or 1", rows[name]
    counts = rows["episode_counts"]
    yield every, (counts < 0).any(1), "episode_counts {}; give numbers of at least 0", counts.tolist()
    if "tool_calls" in rows.columns:
        made, raised = rows["tool_calls"].unbind(-1)
        text = "tool_calls {}; give [made, raised] of each tool, raised in 0..made"
        yield every, ((raised < 0) | (raised > made)).any(1), text, rows["tool_calls"].tolist()
    blobs = [row.numpy().tobytes() for row in rows["conversation"].rows()]
    text = "conversation {!r}; give a JSON list of messages, each with a role and content"
    yield every, torch.tensor([not _is_conversation(blob) for blob in blobs]), text, lambda i: blobs[i][:80]


def _is_conversation(blob: bytes) -> bool:
    try:
        messages = json.loads(blob)
    except (ValueError, RecursionError):
        return False
    return isinstance(messages, list) and bool(messages) and all(map(_is_message, messages))


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


# metrics


class EpisodeMeter:
    """Metrics of rollouts, named as in `monitor.names`. tools: names of the tools."""

    def __init__(self, tools: Sequence[str]) -> None:
        # tool -> number of episodes that called it, since the last rollout in which a call of it worked
        self.failing = dict.fromkeys(tools, 0)
        self._called = True  # whether the last rollout, if any, had calls

    def __call__(self, rows: Rows) -> dict[str, float]:
        """Metrics of B episodes. Raises EpisodeError if the environment failed in all of them, because then no reward
        is real, and if a tool always fails (see FAILING)."""
        count, turns = len(rows), rows["turns"].lengths.double()
        totals = dict(zip(EPISODE_COUNTS, rows["episode_counts"].sum(0).tolist(), strict=True))
        if rows["environment_failed"].all():
            raise EpisodeError(
                f"the environment or agent failed in all {count} episodes of this rollout; the first failures are "
                "printed in the log of the rank where they happened; correct it"
            )
        if self.failing:
            self._check_tools(rows["tool_calls"])
            self._look_for_calls(totals, count)
        return {
            "episode/turns_mean": float(turns.mean()),
            "episode/turns_max": float(turns.max()),
            "episode/turn_limit": float((rows["finish"] == FINISH.index("turns")).double().mean()),
            "episode/observation_tokens": totals["observation_tokens"] / count,
            "episode/cut": float(totals["cut"]),
            "episode/special": float(totals["special"]),
            "episode/seconds": totals["milliseconds"] / 1000 / count,
            "episode/failed": float(rows["environment_failed"].sum()),
            **(self._forks(rows["fork_counts"]) if "fork_counts" in rows.columns else {}),
            "tools/calls": totals["calls"] / count,
            **{f"tools/{name}": float(totals[name]) for name in ("malformed", "unknown", "arguments", "raised")},
        }

    @staticmethod
    def _forks(counts: Tensor) -> dict[str, float]:
        """counts: `[B, FORK_COUNTS]`."""
        means = zip(FORK_COUNTS, counts.sum(0).tolist(), strict=True)
        return {f"episode/{n}": total / (1 if n.startswith("differ_") else len(counts)) for n, total in means}

    def _check_tools(self, tool_calls: Tensor) -> None:
        """Raise only after FAILING episodes; in a single episode the model may be the cause. tool_calls: `[B, tools,
        2]`."""
        for name, calls in zip(self.failing, tool_calls.unbind(1), strict=True):
            made, raised = calls.unbind(1)
            works = bool((raised < made).any())
            self.failing[name] = 0 if works else self.failing[name] + int((made > 0).sum())
            if self.failing[name] >= FAILING:
                raise EpisodeError(
                    f"the tool {name!r} raised in every call of the last {self.failing[name]} episodes that called it; "
                    "its first error is printed in the log of the rank where it happened; correct the tool"
                )

    def _look_for_calls(self, totals: Mapping[str, int], count: int) -> None:
        """Warn of a rollout without calls; once, until a rollout has calls again."""
        before, self._called = self._called, any(totals[n] for n in ("calls", "malformed", "unknown", "arguments"))
        if before and not self._called:
            say(
                f"warning: the model called no tool in any of the {count} episodes of this rollout. If it should call "
                "tools, look at a response (--rl-dump-dir): --rl-tool-parser may not fit this model"
            )
