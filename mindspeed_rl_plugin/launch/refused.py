"""Arguments of Megatron, MindSpeed and MindSpeed-LLM that cannot work under RL: one row an argument, as data.

What a model family of the engine cannot express is refused by `reshard.shape`, from its own table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refused:
    """One argument that RL refuses.

    name: attribute of the parsed arguments, absent in versions that lack the flag; when: says of a value
    that it cannot work; why: the reason and the fix, appended to "--flag VALUE: "; flag: where it is not
    spelt like the attribute.
    """

    name: str
    when: Callable[[Any], bool]
    why: str
    flag: str = ""

    def message(self, args: Any) -> str | None:
        """The error for these arguments, or None when they are fine."""
        value = getattr(args, self.name, None)
        if value is None or not self.when(value):
            return None
        shown = "" if value is True else f" {_shown(value)}"
        return f"{self.flag or '--' + self.name.replace('_', '-')}{shown}: {self.why}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _given(value: Any) -> bool:
    return bool(value)


def _above(limit: float) -> Callable[[Any], bool]:
    return lambda value: value > limit


_DROPOUT = "dropout makes old and new log-probs differ before any update, so the ratio is not 1; pass --{} 0"
_ENTRY = "only GPT decoders can be generated from; use the plain pretrain_gpt.py entry script"
_FSDP = "weights move to the engine through Megatron's DDP buffers; use --use-distributed-optimizer instead"
_CUDA_GRAPH = "a captured graph keeps addresses that the swap to host memory frees; remove it"
_PACKED = "one RL sequence is one document, there is nothing to reset at an end-of-document token; remove it"
_FIXED_BATCH = "--global-batch-size must stay sequences per optimizer step; remove it"
_COARSE = "trainer and engine would round differently and disagree on log-probs; use --bf16"
_OWN_LOOP = "this is another training mode of the script, with its own batches or loss; remove it to use RL"
_RESUME = "a run could not be resumed from its own checkpoints; remove it"

REFUSED: tuple[Refused, ...] = (
    Refused("hidden_dropout", _above(0), _DROPOUT.format("hidden-dropout")),
    Refused("attention_dropout", _above(0), _DROPOUT.format("attention-dropout")),
    Refused("lora_dropout", _above(0), _DROPOUT.format("lora-dropout")),
    # What replaces parts of the training loop that the plugin relies on.
    Refused("async_log_allreduce", _given, "MindSpeed then replaces train_step by one of its own; remove the flag"),
    Refused("reuse_fp32_param", _given, "weights and fp32 copies then share memory, swap cannot follow; remove it"),
    Refused("optimize_send_recv_comm", _given, "it keeps the first pass's number of micro-batches for all; remove it"),
    Refused("iterations_to_skip", _given, "a skipped iteration would throw rollouts away; remove the flag"),
    Refused("inprocess_restart", _given, "the engine does not survive it; let torchrun restart the job"),
    Refused("perform_rl_step", _given, "this is Megatron's own RL; use either that or --rl-algorithm"),
    Refused("skip_train", _given, "RL is training; remove --skip-train"),
    Refused("sft", _given, _OWN_LOOP),
    Refused("stage", _given, _OWN_LOOP),
    Refused("enable_high_availability", _given, _OWN_LOOP),
    # Batch sizes and lengths of the run.
    Refused("train_samples", _given, "RL counts optimizer steps; give --train-iters instead"),
    Refused("rampup_batch_size", _given, _FIXED_BATCH),
    Refused("decrease_batch_size_if_needed", _given, _FIXED_BATCH),
    Refused("step_batch_size_schedule", _given, _FIXED_BATCH),
    Refused("phase_transition_iterations", _given, _FIXED_BATCH),
    Refused("reset_position_ids", _given, _PACKED),
    Refused("reset_attention_mask", _given, _PACKED),
    # Parallelism and precision.
    Refused("use_custom_fsdp", _given, _FSDP),
    Refused("layerzero", _given, _FSDP),
    Refused("enable_cuda_graph", _given, _CUDA_GRAPH),
    Refused("external_cuda_graph", _given, _CUDA_GRAPH),
    Refused("cuda_graph_impl", lambda value: value not in (None, "none"), _CUDA_GRAPH),
    Refused("fp16", _given, "too coarse for a ratio near 1, and loss scaling skips steps; use --bf16"),
    Refused("fp8", _given, _COARSE, flag="--fp8-format"),
    Refused("fp4", _given, _COARSE, flag="--fp4-format"),
    # Models.
    Refused("hybrid_override_pattern", _given, "hybrid models are not supported; " + _ENTRY),
    Refused("retro_add_retriever", _given, "retrieval models are not supported; " + _ENTRY),
    Refused("vision_pretraining", _given, "vision and multimodal models are not supported; " + _ENTRY),
    Refused("lora_target_modules", _given, "LoRA is not supported yet; train the whole model"),
    # Checkpoints.
    Refused("no_save_optim", _given, _RESUME),
    Refused("no_save_rng", _given, _RESUME),
    Refused("non_persistent_save_interval", _given, "RL state is kept in persistent checkpoints only; remove it"),
    Refused("ckpt_convert_format", _given, "convert checkpoints before RL, in a run without --rl-algorithm"),
    Refused("moe_use_upcycling", _given, "upcycle before RL, in a run without --rl-algorithm"),
)
