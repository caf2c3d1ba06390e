"""What RL does with flags of Megatron-LM, MindSpeed and MindSpeed-LLM that it takes over."""

from __future__ import annotations

# What RL does with them -> flags, which leave the command line; FLAG=VALUE: with this value only.
TAKEN_OVER = {
    "a row is one response with its prompt, which has its own positions and a causal mask": """
        --reset-attention-mask --reset-position-ids --fix-sub-seq-length --neat-pack --pack
        --attention-mask-type=general --cp-attention-mask-type=general
    """,
    "no pretraining or fine-tuning data is read, prompts are those of --rl-prompt-data": """
        --data-path --train-data-path --valid-data-path --test-data-path --data-args-path --per-split-data-args-path
        --data-cache-path --mock-data --split --eod-mask-loss --dataloader-type --num-workers --no-shared-storage
        --is-instruction-dataset --is-pairwise-dataset --handler-name --no-shuffle --full-shuffle-instruction-dataset
        --dataset-additional-keys --no-cut-token --cut-max-seqlen --pad-to-multiple-of --tokenizer-padding-side
        --padded-samples --workers --streaming --hf-datasets-params --datasets --json-keys --split-sentences
        --keep-newlines --interleave-probs --mix-strategy --dataset-dir --overwrite-cache --max-samples --cache-dir
        --map-keys --script-data-dir --append-eod --reward-tokens --output-prefix --dataset-impl --n-subs
        --merge-group-keys
    """,
    "prompts are rendered by the tokenizer's own template under --rl-apply-chat-template, else taken as they are": """
        --prompt-type --prompt-type-path --enable-thinking --reasoning-effort --drop-thinking
    """,
    "off: the engine and RL's own messages need groups over the CPU; checkpoints stay the same": """
        --disable-gloo-group --hccl-slice-size
    """,
    "off: its schedule takes the loss out of the model's own layers; the update gives the same numbers, slower": """
        --moe-fb-overlap --moe-unperm2-mem-optim-swap
    """,
}
IN_SAMPLES = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--lr-wsd-decay-samples")
