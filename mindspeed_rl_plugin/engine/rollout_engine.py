"""The `Engine` Protocol: the interface of a rollout engine. The request for a response, whose seed does not depend on
when or where it is generated; and `generate` on top of an engine.

**Ranks of one engine (SPMD).** An engine of tensor parallel size n runs on n ranks. They make the same calls in the
same order with the same arguments, and get the same completions in the same order; the first rank (`engine.leader`)
writes them. Replicas are independent, unless they share experts. Then all of them must step at the same time, even one
that has no request, and each calls `keep_step` at the end.

**Life of a rollout.** `wake(("weights",))`, the reshard writes into `parameters()`, `update_weights(version)`,
`wake(("kv_cache",))`, then `submit` / `poll` until all is done, then `sleep()`. A fresh engine is awake.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling, Task

ENGINE_PARTS = ("weights", "kv_cache")
# Ids of evaluation: (EPOCH, index of the prompt, attempt); no rollout has a negative epoch.
EPOCH = -1
OF_GROUP = -1  # in the place of a member, for a seed of all members


class Engine(Protocol):
    """One replica of the policy that generates responses. Times are seconds."""

    replica: int  # which of the world's independent engines this is
    replicas: int  # how many there are
    leader: bool  # whether this rank is the first of its engine
    version: int  # of the weights that it generates with, -1 before the first ones
    digest: str | None  # of these weights, 16 hexadecimal digits; None: not verified
    shares_experts: bool  # whether it steps together with other engines
    progress: float  # when something was last finished, by `time.monotonic`

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Queue responses. One that has begun continues after the tokens that it has. Ids are new, or were aborted.

        Raises ValueError for a prompt that is empty or leaves too few tokens for `max_tokens`, for sampling that the
        engine cannot do exactly, and for a response that has all its tokens.
        """

    def poll(self, timeout: float) -> list[Completion]:
        """Work until at least one response is finished, and return those that are; none where `timeout` has passed, or
        nothing is queued. Every call makes progress, also with timeout 0. All ranks return at the same step."""

    def step_along(self, steps: int) -> list[Completion]:
        """Exactly so many steps, dummy ones where nothing is queued here; returns the responses that are finished.
        Engines that share experts call it together, whichever of them has responses queued."""

    def keep_step(self) -> None:
        """Step along with the engines that share experts with this one, if any, until none of them has responses
        queued. Raises ValueError while responses are queued here, TimeoutError where the others do not step."""

    def abort(self) -> list[Completion]:
        """Stop all responses, and return what they hold so far with finish "abort"."""

    def parameters(self) -> dict[str, Tensor]:
        """The live weights of this rank by the engine's names. Writing into them changes the next step."""

    def update_weights(self, version: int, digest: str | None = None, *, in_flight: bool = False) -> None:
        """`parameters()` now hold `version`: cached results of older weights are not used for new requests.

        digest: recorded, for comparisons. in_flight: queued responses continue with their KV cache, and record which
        version sampled which part; without it, queued responses raise ValueError.
        """

    def sleep(self) -> None:
        """Free the memory of weights and KV cache; their contents are lost. Raises ValueError while busy."""

    def wake(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Allocate the memory of "weights", "kv_cache" or both again. Weights are undefined until they are written."""

    def shutdown(self) -> None:
        """End the engine and free everything. The training process and its process groups continue."""


def response_seed(base: int, epoch: int, group: int, member: int, begun: int = 0) -> int:
    """63-bit seed of one response; the same integers give the same seed on every machine and version.

    base: the run's `--rl-rollout-seed`; epoch, group, member: the sample's id, each a signed 64-bit integer; begun:
    tokens sampled before an interruption. They change the seed, since the first seed would repeat the random numbers of
    these tokens. The seed is the first 63 bits of BLAKE2b over these integers, packed little-endian, so that seeds of
    neighbouring ids are unrelated.
    """
    parts = (base, epoch, group, member, *([begun] if begun else ()))
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def task_of(base: int, sample: SampleId, fields: Mapping[str, object] | None) -> Task | None:
    """The task of an environment, the same for all rows of a group and for each evaluation. fields: of `Task`; None: no
    environment answers."""
    epoch = EPOCH if sample.epoch < 0 else sample.epoch
    return None if fields is None else Task(fields, response_seed(base, epoch, sample.group, OF_GROUP))


def response_request(
    sampling: Sampling,
    base: int,
    sample: SampleId,
    prompt: Sequence[int],
    begun: Completion | None = None,
    fields: Mapping[str, object] | None = None,
) -> GenerateRequest:
    """The request for a response. begun: the part that was sampled before an interruption; fields: of its row, for an
    environment.

    A negative epoch is an evaluation: each evaluation requests the same responses; the first one of a prompt is greedy.
    """
    task = task_of(base, sample, fields)
    epoch = sample.epoch
    if epoch < 0:
        epoch = EPOCH
        sampling = sampling if sample.member else replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    seed = response_seed(base, epoch, *sample[1:], begun=len(begun.tokens) if begun else 0)
    return GenerateRequest(sample, tuple(prompt), sampling, seed, begun, task)


def generate(
    engine: Engine,
    requests: Sequence[GenerateRequest],
    *,
    deadline: float,
    progress: Callable[[int], object] | None = None,
) -> list[Completion]:
    """Generate all responses, maybe none; the result is in the order of `requests`. progress: called with the number of
    responses that have just finished. The rest is as for `stream`."""
    done: dict[SampleId, Completion] = {}
    for finished in stream(engine, requests, deadline=deadline):
        done |= {completion.id: completion for completion in finished}
        if progress is not None:
            progress(len(finished))
    return [done[request.id] for request in requests]


def stream(
    engine: Engine, requests: Sequence[GenerateRequest], *, deadline: float, pause: float = math.inf
) -> Iterator[list[Completion]]:
    """Generate all responses, maybe none; yields them as they finish. Collective over the engines that share experts.

    deadline: most seconds from one finished response (or turn, or answer to a turn) to the next; so a long rollout may
    take longer while it makes progress. pause: after so many seconds without a response yields an empty list, so that
    the caller can do something else. Raises TimeoutError with the number of missing responses; these are aborted, so
    that the engine is idle.
    """
    missing, end = {r.id: r for r in requests}, time.monotonic() + deadline
    engine.submit(requests)
    while missing:
        left = end - time.monotonic()
        finished = engine.poll(min(pause, left))
        late, end = end, max(end, engine.progress + deadline)
        if not finished and left <= pause and end == late:
            raise TimeoutError(_too_late(list(missing.values()), len(requests), engine.abort(), deadline))
        if finished:
            end = time.monotonic() + deadline
        for completion in finished:
            del missing[completion.id]
        yield finished
    engine.keep_step()


def _too_late(missing: Sequence[GenerateRequest], requests: int, partial: Sequence[Completion], deadline: float) -> str:
    tokens = sum(len(c.tokens) for c in partial)
    first = ", ".join(str(tuple(r.id)) for r in missing[:4])
    return (
        f"generation: {len(missing)} of {requests} responses are missing, and none has finished for {deadline:g} s"
        f" (first: {first}; {tokens} tokens of them are sampled); raise --rl-wait-timeout or lower"
        " --rl-max-response-length"
    )
