"""Responses from processes outside of the job, checked where they arrive: on the rank that keeps their group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_rl_plugin.rows import FINISH, Rows
from mindspeed_rl_plugin.stages.generate import SPEC
from mindspeed_rl_plugin.stages.prompts import ORDER

READS = ("prompt", ORDER.name)  # what is read beside the columns that come
STATE = SPEC.name
Text = Callable[[int], str]
TOP_LOGP = 1e-3  # nats: a log-prob above 0 by more than rounding is none


class Incoming:
    """vocab: tokens that the model may produce; max_response: longest response [tokens].

    published: versions of weights that engines may have; `check` refuses all others.
    """

    def __init__(self, vocab: int, max_response: int) -> None:
        self.vocab, self.max_response = vocab, max_response
        self.published: set[int] = set()

    def check(self, rows: Rows) -> None:
        """Raise ValueError, with value, limit and fix, for rows that no engine of this job can have made: columns of
        `generate`, and `READS`. It cannot tell whether log-probs are really those of the version that is named:
        `logp_diff/mean` of the metrics shows that."""
        tokens, prompt = rows["tokens"], rows["prompt"]
        total, before = tokens.lengths, prompt.lengths
        response = total - before
        wrong = _Wrong(rows)
        for name in ("loss_mask", "logp_rollout"):  # what follows takes them token by token
            has = rows[name].lengths
            text = f"{name} has {{}} entries for {{}} tokens; give one for each token of prompt and response"
            wrong(has != total, lambda i, text=text, has=has: text.format(has[i], total[i]))
        wrong(response < 1, lambda i: f"tokens: {total[i]} for a prompt of {before[i]}; give prompt and response")
        wrong(
            response > self.max_response,
            lambda i: (
                f"a response of {response[i]} tokens is longer than --rl-max-response-length "
                f"{self.max_response}; end it there, with finish {FINISH[1]!r}"
            ),
        )
        of, at = _places(total)
        asked = at < before[of]

        def token_wise(bad: Tensor, text: Text) -> None:
            wrong.part(of, bad, lambda t: f"token {int(at[t])}: {text(t)}")

        values, mask, logp = tokens.values, rows["loss_mask"].values, rows["logp_rollout"].values
        ours = torch.zeros_like(values)
        ours[asked] = prompt.values
        token_wise(
            asked & (values != ours), lambda t: f"{values[t]} where the prompt has {ours[t]}; begin with the prompt"
        )
        token_wise(
            (values < 0) | (values >= self.vocab),
            lambda t: f"{values[t]} is not in 0..{self.vocab - 1}, the tokens of the model; is it the job's tokenizer?",
        )
        token_wise(mask != ~asked, lambda t: f"loss_mask is {mask[t]}; give 0 on the prompt and 1 on the response")
        token_wise(asked & (logp != 0), lambda t: f"logp_rollout is {logp[t]}; give 0 on the prompt")
        token_wise(
            ~(logp.isfinite() & (logp <= TOP_LOGP)),
            lambda t: f"logp_rollout is {logp[t]}; give the log of a probability, in nats, finite and at most 0",
        )
        for name, right in (("length", total), ("response_length", response)):
            wrong(rows[name] != right, lambda i, name=name, right=right: f"{name} is {rows[name][i]}, not {right[i]}")
        finish = rows["finish"]
        wrong(
            (finish < 0) | (finish > 1),
            lambda i: f"finish is {finish[i]}; give 0 ({FINISH[0]}) or 1 ({FINISH[1]}), or release the row",
        )
        self._check_segments(rows, wrong)

    def _check_segments(self, rows: Rows, wrong: _Wrong) -> None:
        """Which weights sampled which part."""
        segments, order = rows["segments"], rows[ORDER.name]
        wrong(segments.lengths < 1, lambda i: "segments is empty; give one (first token, version) at least")
        of, at = _places(segments.lengths)
        firsts, versions = segments.values.T
        later = at > 0
        start = torch.where(later, firsts.roll(1), rows["prompt"].lengths[of] - 1)
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
        oldest, newest = order[of, 0], order[of, 1]
        wrong.part(
            of,
            (versions < oldest) | ((newest >= 0) & (versions > newest)),
            lambda s: (
                f"version {versions[s]} may not sample this row, whose versions are {oldest[s]} to "
                f"{newest[s] if newest[s] >= 0 else 'the newest'}; pull weights of one of these"
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


def _places(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each packed entry, and its place in it."""
    of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return of, torch.arange(len(of)) - (lengths.cumsum(0) - lengths)[of]
