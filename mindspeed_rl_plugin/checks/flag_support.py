"""Flags of Megatron-LM, MindSpeed and MindSpeed-LLM that RL takes over, and those that nothing shows under RL.

`refused_flags` refuses flags, where the result would be wrong with these values; `unsupported_models` families. All
others are supported, as a test or script shows, or neutral: docs/upstream-flags.toml. tests/launch walks the real
parsers: each of their flags has one of these verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

# What RL does with them -> flags, which leave the command line; FLAG=VALUE: with this value only.
TAKEN_OVER = {
    "a row is one response with its prompt, which has its own positions and a causal mask": """
        --reset-attention-mask --reset-position-ids --fix-sub-seq-length --neat-pack --pack
        --attention-mask-type=general --cp-attention-mask-type=general
    """,
    "no pretraining or fine-tuning data is read, prompts are those of --rl-prompt-data": """
        --data-path --train-data-path --valid-data-path --test-data-path --data-args-path --per-split-data-args-path
        --data-cache-path --mock-data --split --eod-mask-loss --dataloader-type --num-workers --no-shared-storage
        --is-instruction-dataset --is-pairwise-dataset --handler-name --no-shuffle
        --full-shuffle-instruction-dataset --dataset-additional-keys --no-cut-token --cut-max-seqlen
        --pad-to-multiple-of --tokenizer-padding-side --padded-samples --workers --streaming --hf-datasets-params
        --datasets --json-keys --split-sentences --keep-newlines --interleave-probs --mix-strategy --dataset-dir
        --overwrite-cache --max-samples --cache-dir --map-keys --script-data-dir --append-eod --reward-tokens
        --output-prefix --dataset-impl --n-subs --merge-group-keys --phase-transition-iterations
    """,
    "prompts are rendered by the tokenizer's own template under --rl-apply-chat-template, else taken as they are": """
        --prompt-type --prompt-type-path --enable-thinking --reasoning-effort --drop-thinking
    """,
    "off: the engine and RL's own messages need groups over the CPU; checkpoints stay the same": """
        --disable-gloo-group --hccl-slice-size
    """,
    "off: its buffers are as long as --seq-length, and a micro-batch of RL is as long as its longest row": """
        --tp-comm-overlap
    """,
    "off: its schedule takes the loss out of the model's own layers; without it the update is slower": """
        --moe-fb-overlap --moe-unperm2-mem-optim-swap --overlap-moe-expert-parallel-comm --delay-wgrad-compute
        --ep-overlap-early-attn-memory-release --mla-swap-core-attn-out
    """,
}
# MindSpeed serves the second with either of the first two.
BY_EXPERTS, OVERLAPPED, NEED_ONE = "--moe-fb-overlap", "--moe-alltoall-overlap-comm", "--moe-zero-memory"
BATCH_SCHEDULES = ("--step-batch-size-schedule", "--rampup-batch-size")
IN_SAMPLES = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--lr-wsd-decay-samples")
# Nothing in the tests or scripts uses them under RL; FLAG=VALUE: with this value.
UNTESTED = """
    --use-multiparameter-pipeline-model-parallel --param-and-grad-buffer-pad
    --reset-bucket-group-order --swap-layer-input --compress-dense --compress-activation --compress-optimizer
    --smart-swap --ema-decay --quant-* --tp-comm-bootstrap-backend --tp-comm-overlap-*
    --optimizer-*offload* --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-*
    --use-precision-aware-optimizer --main-*-dtype --exp-avg-*dtype --no-use-layer-wise-param-layout
    --partial-rotary-factor --optimizer=[!a]* --optimizer=adaptive_muon
    --fp32-residual-connection --qk-clip* --moe-enable-* --moe-flex-* --moe-*deepep* --moe-*hybridep* --moe-ncclep-*
    --moe-revert-* --moe-router-padding-* --moe-router-quantile-* --moe-single-grouped-*
    --moe-pad-experts-* --use-grouped-gemm-for-* --overlap-dispatch-* --high-priority-a2a-comm-stream
    --use-fused-weighted-squared-relu --fused-residual-rmsnorm
    --use-transformer-engine-op-fuser --use-te-activation-func --use-kitchen-attention --kitchen-attention-backend
    --mlp-chunks-for-training --batch-invariant-mode --cache-mla-latents --cpu-offloading-* --offload-modules
    --fine-grained-*offload*
    --min-offloaded-* --delay-offload-* --delta-offload-* --activation-offload-* --max-seqlen-per-dp-cp-rank
    --disable-gloo-process-groups --overlap-param-gather-with-optimizer-step --ddp-param-name-patterns-*
    --te-* --no-use-gmm-fp8 --enable-experimental --context-parallel-kv-*
    --context-parallel-cache-* --use-ulysses-allgather-kv --dualpipev-dw-detach --ai-framework --async-*
    --replication* --load-main-params-from-ckpt --override-ckpt-iteration --distrib-optim-*
    --ckpt-fully-parallel-*-* --save-[!r]*-interval --dump-param-to-*
    --hf-chat-template --hf-save-dir --save-layer-by-layer --save-lora-to-hf
"""


def untested(given: Mapping[str, Sequence[str]]) -> list[str]:
    """Those of these flags, with their values, that nothing shows under RL."""
    rows = UNTESTED.split()
    return [
        flag
        for flag, values in given.items()
        if any(fnmatchcase("=".join((flag, *values)) if "=" in row else flag, row) for row in rows)
    ]
