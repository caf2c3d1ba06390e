"""Where training starts, as `launch` decided it."""

from __future__ import annotations

from dataclasses import dataclass

TRAINED = "policy_trained"  # in the RL state: whether the policy's optimizer has taken a step; absent: it has


@dataclass(frozen=True)
class Start:
    """Where training starts.

    kind: "resume" (an RL checkpoint in --save, whole), "pretrained" (weights of --load only) or "fresh"
    (random weights); load_dir: directory that Megatron loads from, None when fresh; iteration: Megatron
    iteration that training continues after, 0 unless resumed; reference_path: iteration folder of the
    checkpoint that RL began from, None when it began from random weights; reference_digest: SHA-256 over
    its files (or over the random weights), None while not known: files are read in the background.
    """

    kind: str
    load_dir: str | None
    iteration: int
    reference_path: str | None
    reference_digest: str | None
