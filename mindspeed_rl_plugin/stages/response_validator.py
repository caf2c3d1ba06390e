"""Responses from processes outside of the job, checked where they arrive: on the rank that keeps their group."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.rows import FINISH, Rows
from mindspeed_rl_plugin.stages.generate import SPEC

READS = ("prompt",)  # what is read beside the columns that come
STATE = SPEC.name
Text = Callable[[int], str]
ENDS = torch.tensor([FINISH.index(name) for name in ("stop", "length", "turns")], dtype=torch.int8)  # of episodes
TOP_LOGP = 1e-3  # nats: a log-prob above 0 by more than rounding is none


class ResponseValidator:
    """vocab: tokens that the model may produce; max_response: longest response [tokens]; episodes: whether responses
    are some.

    published: versions of weights that engines may have; `check` refuses all others.
    """

    def __init__(self, vocab: int, max_response: int, episodes: bool = False) -> None:
        self.vocab, self.max_response, self.episodes = vocab, max_response, episodes
        self.published: set[int] = set()

    def check(self, rows: Rows, bound: VersionBound) -> None:
        """Raise ValueError, with value, limit and fix, for rows that no engine of this job can have made: columns of
        `generate`, and `READS`; bound: of their epoch. It cannot tell whether log-probs are really those of the version
        that is named: the metrics `logp_diff/mean` and `rollout/kl` show that."""
        tokens, prompt = rows["tokens"], rows["prompt"]
        total, before = tokens.lengths, rows["prompt_length"] if self.episodes else prompt.lengths
        response = total - before
        same = ~rows["environment_began"].bool() if self.episodes else before == prompt.lengths  # as the data's prompt
        wrong = _Wrong(rows)
        wrong(before < 1, lambda i: f"prompt_length is {before[i]}; give that of the first turn's prompt")
        wrong(
            same & (before != prompt.lengths),
            lambda i: (
                f"prompt_length is {before[i]} where the prompt has {prompt.lengths[i]} tokens; begin with the prompt, "
                "or give 1 as environment_began where the environment changed it"
            ),
        )
        for name in ("loss_mask", "logp_rollout"):  # what follows takes them token by token
            has = rows[name].lengths
            text = f"{name} has {{}} entries for {{}} tokens; give one for each token of prompt and response"
            wrong(has != total, lambda i, text=text, has=has: text.format(has[i], total[i]))
        wrong(response < 1, lambda i: f"tokens: {total[i]} for a prompt of {before[i]}; give prompt and response")
        wrong(
            response > self.max_response,
            lambda i: (
                f"a response of {response[i]} tokens is longer than --rl-max-response-length "
                f"{self.max_response}; end it there, with finish 1 ({FINISH[1]!r})"
            ),
        )
        of, at = _places(total)
        asked = at < before[of]

        def token_wise(bad: Tensor, text: Text) -> None:
            wrong.part(of, bad, lambda t: f"token {int(at[t])}: {text(t)}")

        values, mask, logp = tokens.values, rows["loss_mask"].values, rows["logp_rollout"].values
        ours, asked_same = torch.zeros_like(values), asked & same[of]
        ours[asked_same] = prompt.values[same[_places(prompt.lengths)[0]]]
        sampled = self._sampled(rows, wrong, before, total) if self.episodes else ~asked
        token_wise(
            asked_same & (values != ours),
            lambda t: f"{values[t]} where the prompt has {ours[t]}; begin with the prompt",
        )
        token_wise(
            (values < 0) | (values >= self.vocab),
            lambda t: f"{values[t]} is not in 0..{self.vocab - 1}, the tokens of the model; is it the job's tokenizer?",
        )
        whose = "the turns of the model" if self.episodes else "the response"
        token_wise(mask != sampled, lambda t: f"loss_mask is {mask[t]}; give 1 on {whose}, else 0")
        token_wise(~sampled & (logp != 0), lambda t: f"logp_rollout is {logp[t]}; give 0 outside of {whose}")
        token_wise(
            ~(logp.isfinite() & (logp <= TOP_LOGP)),
            lambda t: f"logp_rollout is {logp[t]}; give the log of a probability, in nats, finite and at most 0",
        )
        counts = torch.zeros_like(total).index_add_(0, of, sampled.long())
        for name, right in (("length", total), ("response_length", counts)):
            wrong(rows[name] != right, lambda i, name=name, right=right: f"{name} is {rows[name][i]}, not {right[i]}")
        finish = rows["finish"]
        wrong(
            (finish < 0) | ((finish > 1) if not self.episodes else ~torch.isin(finish, ENDS)),
            lambda i: f"finish is {finish[i]}; give 0 ({FINISH[0]}) or 1 ({FINISH[1]}), or release the row",
        )
        self._check_segments(rows, bound, wrong)
        if self.episodes:
            _check_rewards(rows, wrong)
            _check_counts(rows, wrong)
            _check_conversations(rows, wrong)

    def _sampled(self, rows: Rows, wrong: _Wrong, before: Tensor, total: Tensor) -> Tensor:
        """`[T]` bool: the tokens of the model's turns."""
        turns = rows["turns"]
        wrong(turns.lengths < 1, lambda i: "turns is empty; give [first, end) of each turn of the model")
        of, at = _places(turns.lengths)
        firsts, ends = turns.values.T
        least = torch.where(at > 0, ends.roll(1), before[of])
        bad = (firsts < least) | ((at == 0) & (firsts != before[of])) | (ends <= firsts) | (ends > total[of])
        wrong.part(
            of,
            bad,
            lambda s: (
                f"turns {turns.row(int(of[s])).tolist()}; give [first, end) of each, the first from the prompt's end "
                f"({before[of[s]]}) on, none empty, in their order, up to {total[of[s]]}"
            ),
        )
        starts = rows["tokens"].offsets[of]
        edges = torch.zeros(len(rows["tokens"].values) + 1, dtype=torch.int64)
        one = torch.ones_like(firsts)
        edges.index_add_(0, starts + firsts, one).index_add_(0, starts + ends, -one)
        return edges.cumsum(0)[:-1].bool()

    def _check_segments(self, rows: Rows, bound: VersionBound, wrong: _Wrong) -> None:
        """Which weights sampled which part."""
        segments = rows["segments"]
        wrong(segments.lengths < 1, lambda i: "segments is empty; give one (first token, version) at least")
        of, at = _places(segments.lengths)
        firsts, versions = segments.values.T
        later = at > 0
        before = rows["prompt_length"] if self.episodes else rows["prompt"].lengths
        start = torch.where(later, firsts.roll(1), before[of] - 1)
        bad = torch.where(later, firsts <= start, firsts != start + 1) | (firsts >= rows["tokens"].lengths[of])
        wrong.part(
            of,
            bad,
            lambda s: (
                f"segments {segments.row(int(of[s])).tolist()}; give the first from the prompt's end on, tokens rising"
            ),
        )
        known = torch.tensor(sorted(self.published), dtype=torch.int64)
        wrong.part(
            of,
            ~torch.isin(versions, known),
            lambda s: (
                f"version {versions[s]} of the weights is not published "
                f"(newest: {max(self.published, default='none')}); give that of the weights which sampled the response"
            ),
        )
        wrong.part(
            of,
            torch.tensor([not bound.allows(version) for version in versions.tolist()], dtype=torch.bool),
            lambda s: (
                f"version {versions[s]} may not sample this row, whose versions are {bound.oldest} to "
                f"{bound.newest if bound.pinned else 'the newest'}; pull weights of one of these"
            ),
        )
        least = torch.full_like(rows["version"], 2**62).scatter_reduce(0, of, versions, "amin")
        wrong(rows["version"] != least, lambda i: f"version is {rows['version'][i]}, the oldest segment's {least[i]}")


class _Wrong:
    """Raises for the first of the rows that is wrong."""

    def __init__(self, rows: Rows) -> None:
        self._ids = rows.ids

    def __call__(self, bad: Tensor, text: Text) -> None:
        """bad: `[B]`."""
        self.part(torch.arange(len(bad)), bad, text)

    def part(self, of: Tensor, bad: Tensor, text: Text) -> None:
        """of: row of each part; bad: which parts are wrong; text: what is wrong with one, and what to do."""
        if bad.any():
            first = int(bad.nonzero()[0])
            raise ValueError(f"row {tuple(self._ids[int(of[first])])}: {text(first)}")


def _check_rewards(rows: Rows, wrong: _Wrong) -> None:
    """A finite number of each turn."""
    rewards, turns = rows["turn_reward"], rows["turns"].lengths
    wrong(
        rewards.lengths != turns,
        lambda i: f"turn_reward has {rewards.lengths[i]} entries for {turns[i]} turns; give one for each turn",
    )
    of, at = _places(rewards.lengths)
    wrong.part(
        of,
        ~rewards.values.isfinite(),
        lambda t: f"turn {int(at[t])}: turn_reward is {rewards.values[t]}; give a finite number",
    )


def _check_counts(rows: Rows, wrong: _Wrong) -> None:
    """What is yes or no, and what is counted."""
    for name in ("environment_began", "environment_failed"):
        wrong((rows[name] < 0) | (rows[name] > 1), lambda i, name=name: f"{name} is {rows[name][i]}; give 0 or 1")
    counts = rows["episode_counts"]
    wrong((counts < 0).any(1), lambda i: f"episode_counts {counts[i].tolist()}; give numbers of at least 0")
    if "tool_calls" in rows.columns:
        calls = rows["tool_calls"]
        made, raised = calls.unbind(-1)
        wrong(
            ((raised < 0) | (raised > made)).any(1),
            lambda i: f"tool_calls {calls[i].tolist()}; give [made, raised] of each tool, raised in 0..made",
        )


def _check_conversations(rows: Rows, wrong: _Wrong) -> None:
    """What graders, dumps and the report read."""
    blobs = [row.numpy().tobytes() for row in rows["conversation"].rows()]
    wrong(
        torch.tensor([not _is_conversation(blob) for blob in blobs]),
        lambda i: f"conversation {blobs[i][:80]!r}; give a JSON list of messages, each with a role and content",
    )


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
