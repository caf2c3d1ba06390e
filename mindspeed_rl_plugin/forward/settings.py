"""Sizes and options of forward passes, by Megatron's arguments."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.forward.batching import TokenBudget, padded
from mindspeed_rl_plugin.layout.parallel import expert_layers, folds

# Bytes of the fp32 logits of a slice of the vocabulary: on an accelerator enough for matrix products at full speed, on
# a host the size of its caches. A slice has at least NARROWEST columns, since the host's matrix products are slower
# with fewer (benchmarks/logprob.py).
CHUNK_BYTES = 128 << 20
CHUNK_BYTES_ON_HOST = 4 << 20
NARROWEST = 1024


# Megatron's and MindSpeed-LLM's coefficients of auxiliary losses of experts.
AUXILIARY = ("moe_aux_loss_coeff", "moe_device_level_aux_loss_coeff", "moe_comm_aux_loss_coeff", "moe_z_loss_coeff")


@dataclass(frozen=True)
class ForwardSettings:
    """Settings of all micro-batches of a run. The log-prob pass and the update must use the same object."""

    micro_batch_size: int  # rows
    seq_length: int  # most tokens of a row (--seq-length)
    vocab_size: int  # rows of the embedding that are real tokens; the rest is padding
    temperature: float = 1.0  # logits are divided by it
    multiple: int = 1  # padded lengths are multiples of this number
    fixed_length: bool = False  # pad to `seq_length`, since pipeline transfers have one shape; else to the longest row
    causal_mask: bool = True  # pass the model a mask; else its attention makes one
    # log-probs are computed in slices of the vocabulary, as large as the logits of this many tokens; 0: from all logits
    chunk_tokens: int = 0
    max_tokens: int | None = None  # limit of a micro-batch of any number of rows; None: `micro_batch_size` rows
    packed: bool = False  # rows are concatenated without padding
    bounded: bool = False  # the attention itself takes the boundaries of packed rows; else it is called for each row
    shared: bool = False  # packed rows run common prefixes once
    routed: tuple[int, ...] = ()  # Megatron's numbers of the layers with experts
    experts: int = 0  # of such a layer
    rounds_of: int = 1  # with `max_tokens` the number of micro-batches is a multiple of this number

    def __post_init__(self) -> None:
        if self.seq_length % self.multiple:
            raise ValueError(
                f"sequence length {self.seq_length} is not a multiple of {self.multiple}, which the parallel sizes "
                "need; change --seq-length"
            )
        assert self.packed or not self.shared, "a tree has packed rows"

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        *,
        vocab_size: int,
        temperature: float,
        chunk_tokens: int | None = None,
        max_tokens: int | None = None,
        packed: bool = False,
        shared: bool = False,
    ) -> ForwardSettings:
        """Settings of this job. args: Megatron's, validated; chunk_tokens: if None, the default. Raises ValueError for
        settings that cannot run; `checks` has already checked combinations of flags."""
        return cls(
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length,
            vocab_size=vocab_size,
            temperature=temperature,
            multiple=length_multiple(args),
            # MindSpeed's dualpipev always needs micro-batches of one length.
            fixed_length=args.pipeline_model_parallel_size > 1
            and (folds(args) or not args.variable_seq_lengths)
            and not max_tokens,
            # Attention over context parallel ranks is causal without a mask, and no mask could describe its positions.
            causal_mask=args.context_parallel_size == 1
            and (args.create_attention_mask_in_dataloader or _own_mask_has_one_shape(args)),
            chunk_tokens=_chunk_tokens(args, max_tokens, shared) if chunk_tokens is None else chunk_tokens,
            max_tokens=max_tokens,
            packed=packed,
            bounded=packed and takes_boundaries(args),
            shared=shared,
            routed=expert_layers(args),
            experts=getattr(args, "num_experts", None) or 0,
            # Interleaved schedules need complete rounds of stages.
            rounds_of=args.pipeline_model_parallel_size
            if getattr(args, "virtual_pipeline_model_parallel_size", None)
            else 1,
        )

    @property
    def budget(self) -> TokenBudget | None:
        """The limits of micro-batches by tokens; None: micro-batches have a fixed number of rows."""
        if self.max_tokens is None:
            return None
        return TokenBudget(self.max_tokens, self.packed, self.multiple, self.rounds_of, self.shared)

    def padded_length(self, longest: int) -> int:
        """Padded length S of a micro-batch whose longest row has `longest` tokens. Raises ValueError for a row longer
        than the model's sequence length."""
        if longest > self.seq_length:
            raise ValueError(
                f"a row of {longest} tokens is longer than --seq-length {self.seq_length}; lower "
                "--rl-max-prompt-length or --rl-max-response-length, or raise --seq-length"
            )
        return self.seq_length if self.fixed_length else padded(longest, self.multiple)


def length_multiple(args: argparse.Namespace) -> int:
    """The number of which padded lengths are multiples. Each context parallel rank has two equally long pieces of a row
    (under ulysses one of twice the length); with sequence parallelism tensor parallel ranks divide these equally."""
    pieces = 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    return pieces * (args.tensor_model_parallel_size if getattr(args, "sequence_parallel", False) else 1)


def default_chunk_tokens(width: int, tokens: int) -> int:
    """Default of `chunk_tokens`. width: columns of the vocabulary on this rank; tokens: of the largest micro-batch."""
    size = CHUNK_BYTES_ON_HOST if get_device().kind == "cpu" else CHUNK_BYTES
    return max(size // (4 * width), NARROWEST * tokens // width, 1)


def _chunk_tokens(args: argparse.Namespace, max_tokens: int | None, shared: bool) -> int:
    """Default of `chunk_tokens` in this job; 0 if rows share no prefixes, and all logits of a micro-batch are at most
    twice as large as a slice.

    Only sizes of the job count, not those of one micro-batch: passes that are compared must use the same method.
    """
    largest = (max_tokens or args.micro_batch_size * args.seq_length) // args.context_parallel_size
    tokens = default_chunk_tokens(args.padded_vocab_size // args.tensor_model_parallel_size, largest)
    return 0 if largest <= 2 * tokens and not shared else tokens


def takes_boundaries(args: argparse.Namespace) -> bool:
    """Whether the attention takes boundaries of packed rows, in Megatron's `PackedSeqParams`.

    TransformerEngine's does, and MindSpeed's flash attention (core/transformer/flash_attention/flash_attention/adaptor,
    v2.3.0), which passes them to the NPU's kernel. Megatron's own attention is called for each row. Raises ValueError,
    with the fix, for other attention.
    """
    flash, implementation = getattr(args, "use_flash_attn", False), getattr(args, "transformer_impl", "local")
    mindspeed = hasattr(args, "pre_tockens")
    if mindspeed and flash:
        if hasattr(args, "shape_order"):
            raise ValueError(
                "--rl-pack-sequences: MindSpeed-LLM's flash attention takes boundaries from its own dataset only; "
                "give no --use-flash-attn, or remove --rl-pack-sequences"
            )
        return True
    if implementation == "transformer_engine" and not mindspeed:
        return True
    if implementation != "local" and not mindspeed:
        raise ValueError(
            f"--rl-pack-sequences was not tested with --transformer-impl {implementation}; give "
            "--transformer-impl local, --transformer-impl transformer_engine, or remove --rl-pack-sequences"
        )
    for name, off in (
        ("use_flash_attn", "no --use-flash-attn"),
        ("masked_softmax_fusion", "--no-masked-softmax-fusion"),
    ):
        if getattr(args, name, False):  # takes any mask as a causal mask
            raise ValueError(
                f"--rl-pack-sequences needs attention that reads RL's mask or row boundaries: give {off}, or remove "
                "--rl-pack-sequences"
            )
    return False


def _own_mask_has_one_shape(args: argparse.Namespace) -> bool:
    """Whether attention without a given mask makes a mask for --seq-length tokens, whatever the micro-batch's length.

    MindSpeed does so (core/transformer/flash_attention/generate_mask, v2.3.0), unless flash attention uses a compressed
    mask. Only MindSpeed has the argument `pre_tockens`.
    """
    compressed = getattr(args, "use_flash_attn", False) and not getattr(args, "multi_latent_attention", False)
    return hasattr(args, "pre_tockens") and not compressed
