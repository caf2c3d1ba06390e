"""Responses from processes outside of the job, checked where they arrive: on the rank that keeps their group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.rows import FINISH, Rows
from mindspeed_rl_plugin.stages.generate import SPEC

READS = ("prompt",)  # what is read besides the columns that come
STATE = SPEC.name
ENDS = torch.tensor([FINISH.index(name) for name in ("stop", "length", "turns")], dtype=torch.int8)  # of episodes
TOP_LOGP = 1e-3  # nats: a log-prob above 0 by more than rounding is none
Checks = Iterator[tuple[Any, ...]]
"""Row of each part, which parts are wrong, what is wrong with one and what to do, and the values that this names: of
each part, or a function of its number. The first that is wrong is raised, so a check may rely on those before it."""


class ResponseValidator:
    """Refuses rows that no engine of this job can have made."""

    def __init__(self, vocab: int, max_response: int, episodes: bool = False) -> None:
        self.vocab = vocab  # tokens that the model may produce
        self.max_response = max_response  # longest response [tokens]
        self.episodes = episodes  # whether responses are some
        self.published: set[int] = set()  # versions of weights that engines may have; `check` refuses all others

    def check(self, rows: Rows, bound: VersionBound) -> None:
        """Raise ValueError, with value, limit and fix, for what cannot be: columns of `generate`, and `READS`; bound:
        of their epoch. It cannot tell whether log-probs are really those of the version that is named: the metrics
        `logp_diff/mean` and `rollout/kl` show that."""
        checks = [self._lengths, self._tokens, self._segments, *([_episodes] if self.episodes else [])]
        for of, bad, text, *values in (one for of_part in checks for one in of_part(rows, bound)):
            if bad.any():
                at = int(bad.nonzero()[0])
                wrong = text.format(*(value(at) if callable(value) else value[at] for value in values))
                raise ValueError(f"row {tuple(rows.ids[int(of[at])])}: {wrong}")

    def _prompt_lengths(self, rows: Rows) -> Tensor:
        return rows["prompt_length"] if self.episodes else rows["prompt"].lengths

    def _kept(self, rows: Rows) -> Tensor:
        """`[B]` bool, whether the prompt is the data's own."""
        whole = torch.ones(len(rows), dtype=torch.bool)
        return ~rows["environment_began"].bool() if self.episodes else whole

    def _lengths(self, rows: Rows, _: VersionBound) -> Checks:
        every, total = torch.arange(len(rows)), rows["tokens"].lengths
        before, own = self._prompt_lengths(rows), rows["prompt"].lengths
        response = total - before
        yield every, before < 1, "prompt_length is {}; give that of the first turn's prompt", before
        text = (
            "prompt_length is {} where the prompt has {} tokens; begin with the prompt, "
            "or give 1 as environment_began where the environment changed it"
        )
        yield every, self._kept(rows) & (before != own), text, before, own
        for name in ("loss_mask", "logp_rollout"):  # what follows takes them token by token
            has = rows[name].lengths
            text = f"{name} has {{}} entries for {{}} tokens; give one for each token of prompt and response"
            yield every, has != total, text, has, total
        yield every, response < 1, "tokens: {} for a prompt of {}; give prompt and response", total, before
        text = (
            f"a response of {{}} tokens is longer than --rl-max-response-length {self.max_response}; "
            f"end it there, with finish 1 ({FINISH[1]!r})"
        )
        yield every, response > self.max_response, text, response

    def _tokens(self, rows: Rows, _: VersionBound) -> Checks:
        total, before = rows["tokens"].lengths, self._prompt_lengths(rows)
        prompt, kept = rows["prompt"], self._kept(rows)
        of, at = _places(total)
        asked, where = at < before[of], "token {}: "
        values, mask, logp = (rows[name].values for name in ("tokens", "loss_mask", "logp_rollout"))
        ours, same = torch.zeros_like(values), asked & kept[of]
        ours[same] = prompt.values[kept[_places(prompt.lengths)[0]]]
        if self.episodes:
            yield from _turns(rows)
        sampled, whose = (_sampled(rows), "the turns of the model") if self.episodes else (~asked, "the response")
        text = "{} where the prompt has {}; begin with the prompt"
        yield of, same & (values != ours), where + text, at, values, ours
        text = f"{{}} is not in 0..{self.vocab - 1}, the tokens of the model; is it the job's tokenizer?"
        yield of, (values < 0) | (values >= self.vocab), where + text, at, values
        yield of, mask != sampled, f"{where}loss_mask is {{}}; give 1 on {whose}, else 0", at, mask
        yield of, ~sampled & (logp != 0), f"{where}logp_rollout is {{}}; give 0 outside of {whose}", at, logp
        text = "logp_rollout is {}; give the log of a probability, in nats, finite and at most 0"
        yield of, ~(logp.isfinite() & (logp <= TOP_LOGP)), where + text, at, logp
        every, counts = torch.arange(len(rows)), torch.zeros_like(total).index_add_(0, of, sampled.long())
        for name, right in (("length", total), ("response_length", counts)):
            yield every, rows[name] != right, name + " is {}, not {}", rows[name], right
        finish = rows["finish"]
        bad = (finish < 0) | (~torch.isin(finish, ENDS) if self.episodes else finish > 1)
        text = f"finish is {{}}; give 0 ({FINISH[0]}) or 1 ({FINISH[1]}), or release the row"
        yield every, bad, text, finish

    def _segments(self, rows: Rows, bound: VersionBound) -> Checks:
        """Which weights sampled which part."""
        every, segments, before = torch.arange(len(rows)), rows["segments"], self._prompt_lengths(rows)
        text = "segments is empty; give one (first token, version) at least"
        yield every, segments.lengths < 1, text
        of, at = _places(segments.lengths)
        firsts, versions = segments.values.T
        last = torch.where(at > 0, firsts.roll(1), before[of] - 1)
        bad = torch.where(at > 0, firsts <= last, firsts != last + 1) | (firsts >= rows["tokens"].lengths[of])
        text = "segments {}; give the first from the prompt's end on, tokens rising"
        yield of, bad, text, lambda s: segments.row(int(of[s])).tolist()
        known = torch.tensor(sorted(self.published), dtype=torch.int64)
        text = (
            f"version {{}} of the weights is not published (newest: {max(self.published, default='none')}); "
            "give that of the weights which sampled the response"
        )
        yield of, ~torch.isin(versions, known), text, versions
        newest = bound.newest if bound.pinned else "the newest"
        text = (
            f"version {{}} may not sample this row, whose versions are {bound.oldest} to {newest}; "
            "pull weights of one of these"
        )
        yield of, torch.tensor([not bound.allows(version) for version in versions.tolist()]), text, versions
        least = torch.full_like(rows["version"], 2**62).scatter_reduce(0, of, versions, "amin")
        yield every, rows["version"] != least, "version is {}, the oldest segment's {}", rows["version"], least


def _turns(rows: Rows) -> Checks:
    """Where the model's turns lie."""
    turns, before, total = rows["turns"], rows["prompt_length"], rows["tokens"].lengths
    text = "turns is empty; give [first, end) of each turn of the model"
    yield torch.arange(len(rows)), turns.lengths < 1, text
    of, at = _places(turns.lengths)
    firsts, ends = turns.values.T
    least = torch.where(at > 0, ends.roll(1), before[of])
    bad = (firsts < least) | ((at == 0) & (firsts != before[of])) | (ends <= firsts) | (ends > total[of])
    text = (
        "turns {}; give [first, end) of each, the first from the prompt's end ({}) on, none empty, in their order, "
        "up to {}"
    )
    yield of, bad, text, lambda s: turns.row(int(of[s])).tolist(), before[of], total[of]


def _sampled(rows: Rows) -> Tensor:
    """`[T]` bool: the tokens of the model's turns."""
    turns, tokens = rows["turns"], rows["tokens"]
    starts = tokens.offsets[_places(turns.lengths)[0]]
    firsts, ends = turns.values.T
    edges, one = torch.zeros(len(tokens.values) + 1, dtype=torch.int64), torch.ones_like(firsts)
    edges.index_add_(0, starts + firsts, one).index_add_(0, starts + ends, -one)
    return edges.cumsum(0)[:-1].bool()


def _episodes(rows: Rows, _: VersionBound) -> Checks:
    """A finite reward of each turn; what is yes or no, and what is counted; what graders, dumps and the report read."""
    every, rewards, turns = torch.arange(len(rows)), rows["turn_reward"], rows["turns"].lengths
    text = "turn_reward has {} entries for {} turns; give one for each turn"
    yield every, rewards.lengths != turns, text, rewards.lengths, turns
    of, at = _places(rewards.lengths)
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


def _places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each packed entry, and its place in it."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return of, torch.arange(len(of)) - (lengths.cumsum(0) - lengths)[of]
