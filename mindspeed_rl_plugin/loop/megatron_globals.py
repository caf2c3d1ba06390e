"""Megatron's process-wide objects that the loop asks for, by one name for all versions."""

from __future__ import annotations

from typing import Any


def tensorboard_writer() -> Any:
    """Megatron's TensorBoard writer; None on all ranks but the last, and without --tensorboard-dir."""
    from megatron.training.global_vars import get_tensorboard_writer

    return get_tensorboard_writer()


def wandb_writer() -> Any:
    """Megatron's W&B module; None where it logs nothing."""
    from megatron.training.global_vars import get_wandb_writer

    return get_wandb_writer() or None
