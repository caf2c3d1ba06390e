"""What is asked of an engine for a sample, its seed too: it never depends on when or where the sample is generated."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling, Task

# Ids of evaluation: (EPOCH, index of the prompt, attempt); no rollout has a negative epoch.
EPOCH = -1
OF_GROUP = -1  # in the place of a member, where a seed is that of all of them


def response_seed(base: int, epoch: int, group: int, member: int, begun: int = 0) -> int:
    """63-bit seed of one response; the same integers give the same seed on every machine and version.

    base: the run's `--rl-rollout-seed`; epoch, group, member: the sample's id, each a signed 64-bit integer; begun:
    tokens sampled before an interruption, behind which the first seed would repeat the same random numbers. It is the
    first 63 bits of BLAKE2b over these packed little-endian, so that neighbouring ids share no structure.
    """
    parts = (base, epoch, group, member, *([begun] if begun else ()))
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def task_of(base: int, sample: SampleId, fields: Mapping[str, object] | None) -> Task | None:
    """What an environment gets of a row, the same for all of its group and for each evaluation. fields: of `Task`, None
    where no environment answers."""
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
    """The request for a response. begun: its part that was sampled before an interruption; fields: of its row, for an
    environment.

    A negative epoch is that of an evaluation: each one asks for the same responses, the first of a prompt greedy.
    """
    task = task_of(base, sample, fields)
    epoch = sample.epoch
    if epoch < 0:
        epoch = EPOCH
        sampling = sampling if sample.member else replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    seed = response_seed(base, epoch, *sample[1:], begun=len(begun.tokens) if begun else 0)
    return GenerateRequest(sample, tuple(prompt), sampling, seed, begun, task)
