"""Seeds of responses: a pure function of what a response is, never of when or where it is sampled."""

from __future__ import annotations

import hashlib
import struct


def response_seed(base: int, epoch: int, group: int, member: int) -> int:
    """63-bit seed of one response; the same four integers give the same seed on every machine and version.

    base: the run's `--rl-rollout-seed`; epoch, group, member: the sample's id, each a signed 64-bit integer.
    It is the first 63 bits of BLAKE2b over the four packed little-endian, so neighbouring ids share no
    structure that a weak generator could carry into its first numbers.
    """
    digest = hashlib.blake2b(struct.pack("<4q", base, epoch, group, member), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
