"""Checks responses of processes outside of the job, on the rank that stores their group."""

from __future__ import annotations

import itertools

import torch

from mindspeed_rl_plugin.dock import VersionBound
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN, Checks, ResponseKind, places
from mindspeed_rl_plugin.rows import FINISH, Rows
from mindspeed_rl_plugin.stages.generate import SPEC

READS = ("prompt",)  # columns that are read in addition to the committed ones
STATE = SPEC.name
TOP_LOGP = 1e-3  # nats: larger values are not log-probs, even with rounding


class ResponseValidator:
    """Refuses rows that no engine of this job can have written."""

    def __init__(self, vocab: int, max_response: int, kind: ResponseKind = ONE_TURN, experts: int = 0) -> None:
        self.vocab = vocab  # tokens that the model may produce
        self.max_response = max_response  # longest response [tokens]
        self.kind = kind  # of the responses
        self.experts = experts  # of a layer, if responses have routes
        self.published: set[int] = set()  # versions of weights that engines may have; `check` refuses all others

    def check(self, rows: Rows, bound: VersionBound) -> None:
        """Raise ValueError, with value, limit and fix, for impossible values. rows: columns of `generate`, and `READS`;
        bound: of their epoch. Whether log-probs belong to the named version cannot be checked here; if they do not, the
        metrics `logp_diff/mean` and `rollout/kl` are large."""
        checks = self._lengths(rows), self._tokens(rows), self._segments(rows, bound), self._routes(rows)
        for of, bad, text, *values in itertools.chain(*checks, self.kind.check_rest(rows)):
            if bad.any():
                at = int(bad.nonzero()[0])
                wrong = text.format(*(value(at) if callable(value) else value[at] for value in values))
                raise ValueError(f"row {tuple(rows.ids[int(of[at])])}: {wrong}")

    def _lengths(self, rows: Rows) -> Checks:
        every, total = torch.arange(len(rows)), rows["tokens"].lengths
        (before, kept), own = self.kind.prompt_lengths(rows), rows["prompt"].lengths
        response = total - before
        yield every, before < 1, "prompt_length is {}; give the length of the first turn's prompt", before
        text = (
            "prompt_length is {}, but the prompt has {} tokens; begin with the prompt, "
            "or give environment_began 1 if the environment changed the prompt"
        )
        yield every, kept & (before != own), text, before, own
        for name in ("loss_mask", "logp_rollout"):  # later checks compare them token by token
            has = rows[name].lengths
            text = f"{name} has {{}} entries for {{}} tokens; give one for each token of prompt and response"
            yield every, has != total, text, has, total
        yield every, response < 1, "tokens has {} entries, and the prompt {}; give prompt and response", total, before
        text = (
            f"a response of {{}} tokens is longer than --rl-max-response-length {self.max_response}; "
            f"end it there, with finish 1 ({FINISH[1]!r})"
        )
        limited = self.kind.response_lengths(rows)
        yield every, limited > self.max_response, text, limited

    def _tokens(self, rows: Rows) -> Checks:
        total, prompt, (before, kept) = rows["tokens"].lengths, rows["prompt"], self.kind.prompt_lengths(rows)
        of, at = places(total)
        asked, where = at < before[of], "token {}: "
        values, mask, logp = (rows[name].values for name in ("tokens", "loss_mask", "logp_rollout"))
        ours, same = torch.zeros_like(values), asked & kept[of]
        ours[same] = prompt.values[kept[places(prompt.lengths)[0]]]
        yield from self.kind.check_turns(rows)
        sampled, whose = self.kind.sampled(rows), "what the model sampled"
        text = "{}, but the prompt has {} there; begin with the prompt"
        yield of, same & (values != ours), where + text, at, values, ours
        text = f"{{}} is not in 0..{self.vocab - 1}, the tokens of the model; use the job's tokenizer"
        yield of, (values < 0) | (values >= self.vocab), where + text, at, values
        yield of, mask != sampled, f"{where}loss_mask is {{}}; give 1 on {whose}, else 0", at, mask
        yield of, ~sampled & (logp != 0), f"{where}logp_rollout is {{}}; give 0 outside of {whose}", at, logp
        text = "logp_rollout is {}; give the log of a probability, in nats, finite and at most 0"
        yield of, ~(logp.isfinite() & (logp <= TOP_LOGP)), where + text, at, logp
        every, counts = torch.arange(len(rows)), torch.zeros_like(total).index_add_(0, of, sampled.long())
        for name, right in (("length", total), ("response_length", counts)):
            yield every, rows[name] != right, name + " is {}, not {}", rows[name], right
        finish = rows["finish"]
        bad = ~torch.isin(finish, torch.tensor([FINISH.index(name) for name in self.kind.ends], dtype=finish.dtype))
        text = f"finish is {{}}; give 0 ({FINISH[0]}) or 1 ({FINISH[1]}), or release the row"
        yield every, bad, text, finish

    def _routes(self, rows: Rows) -> Checks:
        if (routes := rows.columns.get("routes")) is None:
            return
        (of, at), ids, total = places(routes.lengths), routes.values.flatten(1), rows["tokens"].lengths
        text = "routes has {} entries for {} tokens; give one for each token of prompt and response"
        yield torch.arange(len(rows)), routes.lengths != total, text, routes.lengths, total
        least, most = ids.amin(1), ids.amax(1)
        text = f"routes of token {{}} are {{}} to {{}}; give ids of {self.experts} experts, and zeros in entry 0"
        yield of, (least < 0) | (most >= torch.where(at == 0, 1, self.experts)), text, at, least, most

    def _segments(self, rows: Rows, bound: VersionBound) -> Checks:
        """Check the parts of each response and the weights that sampled them."""
        every, segments, (before, _) = torch.arange(len(rows)), rows["segments"], self.kind.prompt_lengths(rows)
        text = "segments is empty; give at least one (first token, version)"
        yield every, segments.lengths < 1, text
        of, at = places(segments.lengths)
        firsts, versions = segments.values.T
        last = torch.where(at > 0, firsts.roll(1), before[of] - 1)
        bad = torch.where(at > 0, firsts <= last, firsts != last + 1) | (firsts >= rows["tokens"].lengths[of])
        text = "segments {}; begin the first at the prompt's end, each next at a later token of the response"
        yield of, bad, text, lambda s: segments.row(int(of[s])).tolist()
        known = torch.tensor(sorted(self.published), dtype=torch.int64)
        text = (
            f"version {{}} of the weights is not published (newest: {max(self.published, default='none')}); "
            "give the version of the weights that sampled the response"
        )
        yield of, ~torch.isin(versions, known), text, versions
        newest = bound.newest if bound.pinned else "the newest"
        text = f"version {{}} may not sample this row, only versions {bound.oldest} to {newest} may; pull one of these"
        yield of, torch.tensor([not bound.allows(version) for version in versions.tolist()]), text, versions
        least = torch.full_like(rows["version"], 2**62).scatter_reduce(0, of, versions, "amin")
        text = "version is {}, but the oldest version of the segments is {}"
        yield every, rows["version"] != least, text, rows["version"], least
