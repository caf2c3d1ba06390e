"""Generate: every engine samples responses to its share of the prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from mindspeed_rl_plugin.dock import ColumnSpec, Lease
from mindspeed_rl_plugin.engine.response_kind import ONE_TURN, ResponseKind
from mindspeed_rl_plugin.engine.rollout_engine import response_request, stream
from mindspeed_rl_plugin.rows import (
    FINISH,
    Completion,
    GenerateRequest,
    Ragged,
    Rows,
    SampleId,
    Sampling,
    digest_number,
    joined,
    unpack_json,
)
from mindspeed_rl_plugin.stages.context import RankContext
from mindspeed_rl_plugin.stages.stage import Stage, StageSpec

LOOK_SECONDS = 0.5  # longest time between two calls of `look`
COMMIT_SECONDS = 0.05  # shortest time between two commits: each commit takes time from the engine


class Generate(Stage):
    """The stage on this rank, with its engine. All ranks of an engine make the same calls; the first one writes."""

    def __init__(self, spec: StageSpec, context: RankContext) -> None:
        super().__init__(spec, context)
        self.engine, self.bar = context.engine, context.monitor.progress
        self.begun: dict[SampleId, Completion] = {}  # unfinished responses of `until`

    def run(self, ids: Sequence[SampleId], look: Callable[[], None] | None = None) -> None:
        """A response for each row, sampled with `response_seed(seed, *id)`.

        look: called at least every LOOK_SECONDS; it may raise. With `look`, a row is committed soon after its response
        is finished; without it, all rows at the end. Raises TimeoutError if prompts or responses come too late.
        """
        lease, finished, last = self.lease(ids), [], time.monotonic()
        left, pause = self._requests(lease.rows), math.inf if look is None else LOOK_SECONDS
        with self.bar(len(left)) as bar:
            for more in stream(self.engine, [*left.values()], deadline=self.deadline, pause=pause):
                if look is not None:
                    look()
                bar.update(len(more))
                finished += [(left.pop(completion.id), completion) for completion in more]
                due = not left or (look is not None and time.monotonic() - last >= COMMIT_SECONDS)
                if finished and due:
                    self._commit(lease, *zip(*finished, strict=True))
                    finished, last = [], time.monotonic()

    def until(
        self, ids: Sequence[SampleId], steps: int, enough: Callable[[Sequence[Completion]], bool]
    ) -> Mapping[SampleId, int]:
        """Generate until `enough` returns true. It is called after every `steps` steps of the engine, with the
        responses that have finished in them. Returns the number of tokens of each unfinished response; the next call
        continues these responses from `begun`. Collective over engines.
        """
        lease = self.lease(ids)
        left = self._requests(lease.rows)
        with self.bar(len(left)) as bar:
            self.engine.submit([*left.values()])
            while True:
                finished = self.engine.step_along(steps)
                if finished:
                    self._commit(lease, [left.pop(completion.id) for completion in finished], finished)
                bar.update(len(finished))
                if enough(finished):
                    break
        cut = self.engine.abort()
        self.engine.keep_step()
        self.dock.release(lease)
        self.begun = {completion.id: completion for completion in cut if completion.tokens}
        return {completion.id: len(completion.tokens) for completion in cut}

    def _commit(self, lease: Lease, requests: Sequence[GenerateRequest], completions: Sequence[Completion]) -> None:
        """Write finished rows of a lease; only the first rank of the engine has data to write."""
        rows = Rows(tuple(r.id for r in requests), {})
        if self.engine.leader:
            rows = completion_rows(requests, completions, self.engine.digest)
        self.dock.commit_part(lease, rows)

    def _requests(self, rows: Rows) -> dict[SampleId, GenerateRequest]:
        requests = requests_of(rows, self.context.sampling, self.context.seed, self.begun)
        return {request.id: request for request in requests}


SPEC = StageSpec(
    "generate",
    reads=("prompt",),
    writes=(
        ColumnSpec("tokens", torch.int32, "token", ragged=True),  # P prompt + R response ids
        ColumnSpec("loss_mask", torch.uint8, "token", ragged=True),  # 1 on tokens that the model sampled
        ColumnSpec("logp_rollout", torch.float32, "token", ragged=True),  # 0.0 on the prompt
        ColumnSpec("length", torch.int64, "sample", ragged=False),  # L = P + R
        ColumnSpec("response_length", torch.int64, "sample", ragged=False),
        ColumnSpec("finish", torch.int8, "sample", ragged=False),  # index into FINISH
        ColumnSpec("version", torch.int64, "sample", ragged=False),  # of the oldest weights that sampled a token of it
        ColumnSpec("weights_digest", torch.int64, "sample", ragged=False),  # 0: several weights, or not verified
        # (first token, version of the weights) of each part of the response that the same weights sampled
        ColumnSpec("segments", torch.int64, "sample", ragged=True, trailing=(2,), longest=64),
    ),
    resource="engine",
    build=Generate,
)


def spec(kind: ResponseKind = ONE_TURN) -> StageSpec:
    """The stage, with the further columns that this kind of responses has."""
    paths = next((column.longest for column in kind.columns if column.name == "paths"), 1)  # each repeats segments
    *writes, segments = SPEC.writes
    writes = (*writes, replace(segments, longest=segments.longest * paths), *kind.columns)
    return replace(SPEC, reads=(*SPEC.reads, *kind.reads), writes=writes)


def requests_of(
    rows: Rows, sampling: Sampling, seed: int, begun: Mapping[SampleId, Completion] | None = None
) -> list[GenerateRequest]:
    """Requests for B >= 0 rows with the columns that the stage reads. begun: row -> its unfinished response, if any."""
    if not len(rows):
        return []
    prompts, begun = [prompt.tolist() for prompt in rows["prompt"].rows()], begun or {}
    tasks = unpack_json(rows["meta"]) if "meta" in rows.columns else [None] * len(rows)
    return [
        response_request(sampling, seed, i, prompt, begun.get(i), task)
        for i, prompt, task in zip(rows.ids, prompts, tasks, strict=True)
    ]


def completion_rows(
    requests: Sequence[GenerateRequest], completions: Sequence[Completion], digest: str | None = None
) -> Rows:
    """Columns of `SPEC`, aligned with tokens = prompt + response (see `rows`), and the completions' further columns."""
    tokens, masks, logps, segments = [], [], [], []
    for request, completion in zip(requests, completions, strict=True):
        assert request.id == completion.id, (request.id, completion.id)
        prompt = completion.prompt or request.prompt_tokens
        tokens.append(torch.tensor((*prompt, *completion.tokens), dtype=torch.int32))
        masks.append(torch.cat([torch.zeros(len(prompt), dtype=torch.uint8), completion.mask]))
        logps.append(torch.tensor([0.0] * len(prompt) + list(completion.logps), dtype=torch.float32))
        segments.append(torch.tensor([(len(prompt) + first, version) for first, version in completion.segments]))
    columns = {
        "tokens": Ragged.from_rows(tokens, torch.int32),
        "loss_mask": Ragged.from_rows(masks, torch.uint8),
        "logp_rollout": Ragged.from_rows(logps, torch.float32),
        "length": torch.tensor([len(t) for t in tokens], dtype=torch.int64),
        "response_length": torch.tensor([int(m.sum()) for m in masks], dtype=torch.int64),
        "finish": torch.tensor([FINISH.index(c.finish) for c in completions], dtype=torch.int8),
        "version": torch.tensor([c.version for c in completions], dtype=torch.int64),
        "weights_digest": torch.tensor(
            [digest_number(digest if len({v for _, v in c.segments}) == 1 else None) for c in completions],
            dtype=torch.int64,
        ),
        "segments": Ragged.from_rows(segments, torch.int64),
    }
    more = {name: joined([c.columns[name] for c in completions]) for name in completions[0].columns}
    return Rows(tuple(request.id for request in requests), columns | more)
