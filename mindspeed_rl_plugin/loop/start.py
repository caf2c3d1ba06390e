"""Where training starts, as `launch` decided it."""

from __future__ import annotations

from dataclasses import dataclass

TRAINED = "policy_trained"  # key of the RL state: whether the policy's optimizer has taken a step (no key: it has)


@dataclass(frozen=True)
class Start:
    """Where training starts.

    kind: "resume" (the full state of an RL checkpoint in --save), "pretrained" (weights of --load, no other state)
    or "fresh" (random weights).
    load_dir: directory from which Megatron loads, None if fresh.
    iteration: Megatron's iteration after which training continues; 0 unless resumed.
    reference_path: iteration folder of the checkpoint with which RL began, None for random weights.
    reference_digest: SHA-256 over the files of this folder, or over the random weights; None until they are read.
    """

    kind: str
    load_dir: str | None
    iteration: int
    reference_path: str | None
    reference_digest: str | None
