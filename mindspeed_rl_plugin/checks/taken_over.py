"""Flags of pretraining that RL takes over: they are removed from the command line, or replaced, before any parser reads
it, and each change is printed.

To change an attribute of the parsed arguments would be too late: MindSpeed chooses its patches by `sys.argv` while its
adaptor is imported, and preprocesses data right after the arguments are parsed. Refused flags are in `refused_flags`.
All other flags are UNTESTED, or in docs/upstream-flags.toml: supported (a test or script shows it) or neutral.
tests/launch checks that every flag of the real parsers has one of these verdicts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple

# Reason, with what RL does instead -> flags that are removed; FLAG=VALUE: only with this value.
TAKEN_OVER = {
    "a row is one response with its prompt; each row has its own positions and a causal mask": """
        --reset-attention-mask --reset-position-ids --fix-sub-seq-length --neat-pack --pack
        --attention-mask-type=general --cp-attention-mask-type=general
    """,
    "no pretraining or fine-tuning data is read; prompts come from --rl-prompt-data": """
        --data-path --train-data-path --valid-data-path --test-data-path --data-args-path --per-split-data-args-path
        --data-cache-path --mock-data --split --eod-mask-loss --dataloader-type --num-workers --no-shared-storage
        --is-instruction-dataset --is-pairwise-dataset --handler-name --no-shuffle
        --full-shuffle-instruction-dataset --dataset-additional-keys --no-cut-token --cut-max-seqlen
        --pad-to-multiple-of --tokenizer-padding-side --padded-samples --workers --streaming --hf-datasets-params
        --datasets --json-keys --split-sentences --keep-newlines --interleave-probs --mix-strategy --dataset-dir
        --overwrite-cache --max-samples --cache-dir --map-keys --script-data-dir --append-eod --reward-tokens
        --output-prefix --dataset-impl --n-subs --merge-group-keys --phase-transition-iterations
    """,
    "prompts are rendered by the tokenizer's own template with --rl-apply-chat-template, else not at all": """
        --prompt-type --prompt-type-path --enable-thinking --reasoning-effort --drop-thinking
    """,
    "off: the engine and RL's messages need process groups on the CPU; checkpoints do not change": """
        --disable-gloo-group --hccl-slice-size
    """,
    "off: its buffers are as long as --seq-length, but a micro-batch of RL is only as long as its longest row": """
        --tp-comm-overlap
    """,
    "off: its schedule needs the loss that the model itself computes; without this flag the update is slower": """
        --moe-fb-overlap --moe-unperm2-mem-optim-swap --overlap-moe-expert-parallel-comm --delay-wgrad-compute
        --ep-overlap-early-attn-memory-release --mla-swap-core-attn-out
    """,
    "RL's own adapters need none of it": "--lora-fusion --lora-register-forward-hook --lora-ckpt-filter",
}
# MindSpeed-LLM's flags of LoRA -> ours, and its default. Its adapters are never built: with experts on several ranks,
# two of their four weights (posttrain/lora/moe/experts.py) get the mean gradient of different experts.
LORA_OF_LLM = {
    "--lora-r": ("--rl-lora-rank", "16"),
    "--lora-alpha": ("--rl-lora-alpha", "32"),
    "--lora-target-modules": ("--rl-lora-targets", ""),
}
# Reason -> flags that are removed where adapters are trained; what is computed stays the same.
BESIDE_ADAPTERS = {
    "off: with adapters the weights are frozen, and have no main parameters to share memory with": "--reuse-fp32-param",
    "off: with it experts run outside of their layer, where they have no adapters; the update is slower": """
        --moe-alltoall-overlap-comm --moe-allgather-overlap-comm --moe-zero-memory --moe-zero-memory-num-layers
    """,
}
# MindSpeed accepts flags that begin with NEED_ONE only together with BY_EXPERTS or OVERLAPPED.
BY_EXPERTS, OVERLAPPED, NEED_ONE = "--moe-fb-overlap", "--moe-alltoall-overlap-comm", "--moe-zero-memory"
BATCH_SCHEDULES = ("--step-batch-size-schedule", "--rampup-batch-size")
IN_SAMPLES = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--lr-wsd-decay-samples")
# Flags that no test or script uses with RL; FLAG=VALUE: only with this value.
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
    --hf-chat-template --hf-save-dir --save-layer-by-layer
"""

# Flags by which MindSpeed chooses patches. Its `repatch` does not restore all originals: a name that one of its modules
# has imported from Megatron keeps the patched function.
_PATCHING = (
    *("--reset-attention-mask", "--disable-gloo-group", "--moe-fb-overlap", "--lora-target-modules"),
    *("--reuse-fp32-param", "--moe-alltoall-overlap-comm", "--moe-allgather-overlap-comm"),
    "--moe-zero-memory",
)

_lines: list[str] = []
_late: list[str] = []


def lines() -> list[str]:
    """Lines about the flags that were taken over from this process's command line, one for each reason."""
    return list(_lines)


def problems() -> list[str]:
    """Messages about flags that could not be taken over, since MindSpeed had already read them."""
    return list(_late)


def from_command_line(read_by: str = "") -> None:
    """Take over flags in `sys.argv`. May be called again, since other code may have changed `sys.argv`.

    read_by: a module of MindSpeed that was imported before this call, and has read `sys.argv`; "": none.
    """
    before = _names(sys.argv)
    sys.argv[1:], said = take_over(sys.argv[1:])
    _lines.extend(line for line in said if line not in _lines)
    for flag in _PATCHING if read_by else ():
        if flag in before - _names(sys.argv):
            _late.append(
                f"{flag}: {read_by} has patched Megatron for it; import mindspeed_rl_plugin.adaptor earlier, start "
                "with -m mindspeed_rl_plugin, or remove the flag"
            )


def take_over(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line without the flags that RL takes over (without --rl-algorithm: unchanged), and lines for the
    user: one for each reason, and one for untested flags."""
    if "--rl-algorithm" not in _names(argv):
        return list(argv), []
    words, said = _one_batch_size(_words(argv))
    words, counted = _in_iterations(words)
    words, adapted = _own_adapters(words)
    said += [*counted, *adapted]
    adapters = "--rl-lora-rank" in {word.flag for word in words}
    for reason, flags in (TAKEN_OVER | (BESIDE_ADAPTERS if adapters else {})).items():
        leaving = {*flags.split(), *_left_alone(flags, _names(argv))}
        taken = [word for word in words if {word.flag, "=".join((word.flag, *word.values))} & leaving]
        if taken:
            words = [word for word in words if word not in taken]
            said.append(f"{' '.join(dict.fromkeys(word.flag for word in taken))}: {reason}")
    if unshown := untested({word.flag: word.values for word in words}):
        said.append(f"{' '.join(unshown)}: untested, no test or script uses it; compare with a short run without it")
    return [token for word in words for token in word.tokens], said


def untested(given: Mapping[str, Sequence[str]]) -> list[str]:
    """Those of the given flags that are UNTESTED. given: flag -> its values."""
    rows = UNTESTED.split()
    return [
        flag
        for flag, values in given.items()
        if any(fnmatchcase("=".join((flag, *values)) if "=" in row else flag, row) for row in rows)
    ]


def _left_alone(flags: str, given: set[str]) -> list[str]:
    """Given flags that MindSpeed would refuse if `flags` are removed."""
    if BY_EXPERTS not in given.intersection(flags.split()) or OVERLAPPED in given:
        return []
    return [flag for flag in given if flag.startswith(NEED_ONE)]


class _Word(NamedTuple):
    """A flag with its values, and its words on the command line."""

    flag: str
    values: tuple[str, ...]
    tokens: tuple[str, ...]


def _words(argv: Sequence[str]) -> list[_Word]:
    """The command line, divided before each flag. Words before the first flag are an item with the flag ""."""
    cuts = [0, *(i for i, token in enumerate(argv) if token.startswith("--")), len(argv)]
    words = []
    for tokens in (tuple(argv[start:end]) for start, end in pairwise(cuts) if start < end):
        flag, equals, value = tokens[0].partition("=") if tokens[0].startswith("--") else ("", "", "")
        words.append(_Word(flag, (*([value] if equals else []), *tokens[1:]), tokens))
    return words


def _names(argv: Sequence[str]) -> set[str]:
    return {word.flag for word in _words(argv)}


def _one_batch_size(words: list[_Word]) -> tuple[list[_Word], list[str]]:
    """Remove schedules of the batch size. A missing --global-batch-size becomes their last size. Also returns lines."""
    flag, kept, said = "--global-batch-size", [], []
    sized = flag in {word.flag for word in words}
    for word in words:
        given = " ".join(word.values)
        last = re.findall(r":(\d+)", given)[-1:]
        if word.flag not in BATCH_SCHEDULES or not (sized or last):
            kept.append(word)
            continue
        kept += [] if sized else [_Word(flag, tuple(last), (flag, *last))]
        sized = True
        said.append(f"{word.flag} {given}: each optimizer step of RL has --global-batch-size sequences")
    return kept, said


def _own_adapters(words: list[_Word]) -> tuple[list[_Word], list[str]]:
    """Replace MindSpeed-LLM's flags of LoRA by RL's, if these are not given, too. Also returns lines."""
    given = {word.flag: word.values for word in words}
    theirs = " ".join(token for word in words if word.flag in LORA_OF_LLM for token in word.tokens)
    kept = [word for word in words if word.flag not in LORA_OF_LLM]
    if not theirs:
        return words, []
    if "--lora-target-modules" not in given:
        return kept, [f"{theirs}: of no effect in MindSpeed-LLM without --lora-target-modules, so removed"]
    made = [(ours, given.get(flag, (default,))) for flag, (ours, default) in LORA_OF_LLM.items() if ours not in given]
    kept += [_Word(ours, values, (ours, *values)) for ours, values in made]
    ours = " ".join(token for word in kept if word.flag.startswith("--rl-lora-") for token in word.tokens)
    return kept, [f"{theirs}: RL's own adapters instead (q, k and v have an A each): {ours}"]


def _in_iterations(words: list[_Word]) -> tuple[list[_Word], list[str]]:
    """Convert lengths in samples to iterations, if the run's length is only given in samples. Also returns lines."""
    given = {word.flag: word.values for word in words}
    batch = " ".join(given.get("--global-batch-size", ()))
    if "--train-samples" not in given or "--train-iters" in given or not batch.isdigit() or not int(batch):
        return words, []
    said, changed = [], []
    for word in words:
        if word.flag in IN_SAMPLES and word.values and word.values[0].isdigit():
            flag, value = word.flag.replace("samples", "iters"), str(int(word.values[0]) // int(batch))
            said.append(f"{word.flag} {word.values[0]}: RL counts optimizer steps, so it becomes {flag} {value}")
            word = _Word(flag, (value,), (flag, value))
        changed.append(word)
    return changed, said
