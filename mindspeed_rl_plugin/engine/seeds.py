"""The request for a sample, with its seed, which does not depend on when or where the sample is generated."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling, Task

# Ids of evaluation: (EPOCH, index of the prompt, attempt); no rollout has a negative epoch.
EPOCH = -1
OF_GROUP = -1  # in the place of a member, for a seed of all members


def response_seed(base: int, epoch: int, group: int, member: int, begun: int = 0) -> int:
    """63-bit seed of one response; the same integers give the same seed on every machine and version.

    base: the run's `--rl-rollout-seed`; epoch, group, member: the sample's id, each a signed 64-bit integer; begun:
    tokens sampled before an interruption, after which the first seed would repeat the same random numbers. The seed is
    the first 63 bits of BLAKE2b over these integers, packed little-endian, so that seeds of neighbouring ids are
    unrelated.
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
