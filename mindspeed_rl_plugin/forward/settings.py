"""Shapes and head of a forward pass, taken once from Megatron's arguments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardSettings:
    """What every micro-batch of a run has in common. The log-prob pass and the update must share one.

    micro_batch_size: rows of a micro-batch; seq_length: longest row [tokens]; vocab_size: rows of the
    embedding that are real tokens, the rest is padding; temperature: logits are divided by it;
    multiple: padded lengths are multiples of it; fixed_length: pad every micro-batch to `seq_length`
    (Megatron's pipeline transfers have one shape), else to its own longest row; causal_mask: hand the
    model an explicit mask (else its attention makes its own).
    """

    micro_batch_size: int
    seq_length: int
    vocab_size: int
    temperature: float = 1.0
    multiple: int = 1
    fixed_length: bool = False
    causal_mask: bool = True

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; log-probs are taken at it, so it must be > 0")
        if self.seq_length % self.multiple:
            raise ValueError(
                f"sequence length {self.seq_length} is not a multiple of {self.multiple}, which the parallel sizes "
                "ask for; change --seq-length"
            )

    @classmethod
    def from_args(cls, args: argparse.Namespace, *, vocab_size: int, temperature: float) -> ForwardSettings:
        """Settings of this job. `args`: Megatron's, after validation. Raises ValueError for what cannot run."""
        if args.context_parallel_size > 1:
            raise ValueError(
                f"--context-parallel-size {args.context_parallel_size} is not supported with --rl-algorithm; use 1"
            )
        if vocab_size > args.padded_vocab_size:
            raise ValueError(
                f"vocabulary of {vocab_size} tokens does not fit the model's {args.padded_vocab_size} rows; "
                "check the tokenizer"
            )
        return cls(
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length,
            vocab_size=vocab_size,
            temperature=temperature,
            multiple=args.tensor_model_parallel_size if args.sequence_parallel else 1,
            fixed_length=args.pipeline_model_parallel_size > 1 and not args.variable_seq_lengths,
            causal_mask=args.create_attention_mask_in_dataloader or _own_mask_has_one_shape(args),
        )

    def padded_length(self, longest: int) -> int:
        """Padded length S of a micro-batch whose longest row has `longest` tokens.

        Raises ValueError when the row is longer than the model's sequence length.
        """
        if longest > self.seq_length:
            raise ValueError(
                f"a row of {longest} tokens is longer than --seq-length {self.seq_length}; lower "
                "--rl-max-prompt-length or --rl-max-response-length, or raise --seq-length"
            )
        return self.seq_length if self.fixed_length else -(-max(longest, 1) // self.multiple) * self.multiple


def _own_mask_has_one_shape(args: argparse.Namespace) -> bool:
    """Whether the attention, given no mask, would make one of `--seq-length` whatever the micro-batch's length.

    MindSpeed does (core/transformer/flash_attention/generate_mask, v2.3.0) unless flash attention takes a
    compressed mask. Only MindSpeed has the argument `pre_tockens`.
    """
    compressed = getattr(args, "use_flash_attn", False) and not getattr(args, "multi_latent_attention", False)
    return hasattr(args, "pre_tockens") and not compressed
