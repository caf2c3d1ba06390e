"""Seeds of responses: a pure function of what a response is, never of when or where it is sampled."""

from __future__ import annotations

import hashlib
import struct


def response_seed(base: int, epoch: int, group: int, member: int, begun: int = 0) -> int:
    """63-bit seed of one response; the same integers give the same seed on every machine and version.

    base: the run's `--rl-rollout-seed`; epoch, group, member: the sample's id, each a signed 64-bit integer; begun:
    tokens sampled before, where it goes on after an interruption: with its first seed it would repeat its numbers.
    It is the first 63 bits of BLAKE2b over these packed little-endian, so neighbouring ids share no
    structure that a weak generator could carry into its first numbers.
    """
    parts = (base, epoch, group, member, *([begun] if begun else ()))
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
