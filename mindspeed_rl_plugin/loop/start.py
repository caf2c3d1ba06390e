"""Where training starts, as `launch` decided it."""

from __future__ import annotations

from dataclasses import dataclass

TRAINED = "policy_trained"  # in the RL state: whether the policy's optimizer has taken a step; missing: it has


@dataclass(frozen=True)
class Start:
    """Where training starts.

    kind: "resume" (the full state of an RL checkpoint in --save), "pretrained" (weights of --load only) or "fresh"
    (random ones).
    load_dir: directory that Megatron loads from, None when fresh.
    iteration: Megatron's, after which training continues; 0 unless resumed.
    reference_path: iteration folder of the checkpoint that RL began from, None for random weights.
    reference_digest: SHA-256 over its files, or over the random weights; None while files are still being read.
    """

    kind: str
    load_dir: str | None
    iteration: int
    reference_path: str | None
    reference_digest: str | None
