"""The interface of a rollout engine (`Engine`); requests for responses, whose seeds do not depend on when or where a
response is generated; and `generate` and `stream`, which use an engine.

**Ranks of one engine (SPMD).** An engine of tensor parallel size n runs on n ranks. They make the same calls in the
same order with the same arguments, and get the same completions in the same order; the first rank (`engine.leader`)
stores them. Engines are independent, unless they share experts. Then all these engines must step at the same time, even
without a request, and each calls `keep_step` at the end.

**Calls of a rollout.** `wake(("weights",))`, the reshard writes into `parameters()`, `update_weights(version)`,
`wake(("kv_cache",))`, then `submit` / `poll` until all responses are finished, then `sleep()`. A new engine is awake.
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
# Evaluations have negative epochs; their seeds are made with EPOCH. Their ids: (epoch, index of the prompt, attempt).
EPOCH = -1
OF_GROUP = -1  # replaces the member in a seed that all members of a group share


class Engine(Protocol):
    """One replica of the policy that generates responses. Times are seconds."""

    replica: int  # number of this engine, from 0
    replicas: int  # number of engines in the world
    leader: bool  # whether this rank is the first of its engine
    version: int  # of the weights with which it generates; -1: none yet, or none since `sleep`
    digest: str | None  # of these weights, 16 hexadecimal digits; None: not verified
    shares_experts: bool  # whether it steps together with other engines
    progress: float  # `time.monotonic()` when a response, a turn or an answer to a turn was last finished

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Queue responses. A response that has begun continues after its tokens. Ids are new, or of aborted responses.

        Raises ValueError for a prompt that is empty or leaves too few tokens for `max_tokens`, for sampling that the
        engine cannot do exactly, and for a response that has all its tokens.
        """

    def poll(self, timeout: float) -> list[Completion]:
        """Step until at least one response is finished, and return the finished ones; an empty list if `timeout` has
        passed or nothing is queued. Even with timeout 0 a call makes progress. All ranks return at the same step."""

    def step_along(self, steps: int) -> list[Completion]:
        """Run this number of steps, dummy steps if nothing is queued here, and return the finished responses. Engines
        that share experts call it together, even if only some of them have responses queued."""

    def keep_step(self) -> None:
        """Run dummy steps until no engine that shares experts with this one has responses queued. Raises ValueError
        while responses are queued here, TimeoutError if the other engines do not step."""

    def abort(self) -> list[Completion]:
        """Stop all responses, and return their tokens so far as completions with finish "abort"."""

    def parameters(self) -> dict[str, Tensor]:
        """The live weights of this rank by the engine's names. Writing into them changes the next step."""

    def update_weights(self, version: int, digest: str | None = None, *, in_flight: bool = False) -> None:
        """`parameters()` now hold weights of `version`: cached results of older weights are not used for new requests.

        digest: recorded, for comparisons. in_flight: True: queued responses continue with their KV cache, and record
        the version that sampled each part; False: if responses are queued, ValueError is raised.
        """

    def sleep(self) -> None:
        """Free weights and KV cache; their contents are lost. Raises ValueError while responses are queued."""

    def wake(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Allocate the memory of "weights", "kv_cache" or both again. Weights are undefined until they are written."""

    def shutdown(self) -> None:
        """End the engine and free everything. The training process and its process groups continue."""


def response_seed(base: int, epoch: int, group: int, member: int, begun: int = 0) -> int:
    """63-bit seed of one response; the same integers give the same seed on every machine and version.

    base: the run's `--rl-rollout-seed`; epoch, group, member: the sample's id, each a signed 64-bit integer; begun:
    number of tokens sampled before an interruption. It changes the seed, since the first seed would repeat the random
    numbers of these tokens. The seed is the first 63 bits of BLAKE2b over all these integers, packed little-endian, so
    that seeds of neighbouring ids are unrelated.
    """
    parts = (base, epoch, group, member, *([begun] if begun else ()))
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def task_of(base: int, sample: SampleId, fields: Mapping[str, object] | None) -> Task | None:
    """The task of an environment, the same for all rows of a group and for all evaluations. fields: of `Task`; None if
    the job has no environment."""
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
    """The request for a response. begun: the part that was sampled before an interruption; fields: as in `task_of`.

    A negative epoch means an evaluation: all evaluations request the same responses, and the first response to a prompt
    is greedy.
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
    """Generate all responses, and return them in the order of `requests`, which may be empty. progress: called with the
    number of responses that have just finished. Deadline and errors are those of `stream`."""
    done: dict[SampleId, Completion] = {}
    for finished in stream(engine, requests, deadline=deadline):
        done |= {completion.id: completion for completion in finished}
        if progress is not None:
            progress(len(finished))
    return [done[request.id] for request in requests]


def stream(
    engine: Engine, requests: Sequence[GenerateRequest], *, deadline: float, pause: float = math.inf
) -> Iterator[list[Completion]]:
    """Generate all responses, and yield them as they finish. Collective over the engines that share experts.

    deadline: most seconds from one finished response (or turn, or answer to a turn) to the next; a complete rollout may
    take longer. pause: seconds without a response after which an empty list is yielded, so that the caller can do
    something else. Raises TimeoutError with the number of missing responses; these are aborted, so that the engine is
    idle.
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
        f" (the first: {first}); the engine has sampled {tokens} of their tokens; raise --rl-wait-timeout or lower"
        " --rl-max-response-length"
    )
