"""Flags of pretraining that RL takes over: they leave the command line before anybody reads it, and leave a line.

MindSpeed chooses its patches by `sys.argv` while its adaptor is imported, and preprocesses data right after the
arguments are parsed: an attribute that is changed later comes too late for both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

# What RL does with them -> flags; FLAG=VALUE: with this value only.
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
# By which MindSpeed chooses patches.
_PATCHED = {"reset_attention_mask": False, "disable_gloo_group": False, "moe_fb_overlap": False}
_SAMPLES = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--lr-wsd-decay-samples")

_lines: list[str] = []


def lines() -> list[str]:
    """What was taken over from this process's command line, one line per reason."""
    return list(_lines)


def from_command_line() -> dict[str, bool]:
    """Take over what `sys.argv` holds. Returns the attributes that MindSpeed must be given anew if it has read it."""
    before = _names(sys.argv)
    sys.argv[1:], said = take_over(sys.argv[1:])
    _lines.extend(said)
    gone = before - _names(sys.argv)
    return {name: value for name, value in _PATCHED.items() if "--" + name.replace("_", "-") in gone}


def take_over(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line without what RL takes over, and a line for each reason. Without --rl-algorithm: as it is."""
    if "--rl-algorithm" not in _names(argv):
        return list(argv), []
    words, said = _in_iterations(_words(argv))
    for reason, flags in TAKEN_OVER.items():
        taken = [word for word in words if {word.flag, "=".join((word.flag, *word.values))} & set(flags.split())]
        if taken:
            words = [word for word in words if word not in taken]
            said.append(f"{' '.join(dict.fromkeys(word.flag for word in taken))}: {reason}")
    return [token for word in words for token in word.tokens], said


class _Word(NamedTuple):
    """A flag with its values, and as it was written."""

    flag: str
    values: tuple[str, ...]
    tokens: tuple[str, ...]


def _words(argv: Sequence[str]) -> list[_Word]:
    """The command line cut before each flag; what stands before the first is a word without flag."""
    cuts = [0, *(i for i, token in enumerate(argv) if token.startswith("--")), len(argv)]
    words = []
    for tokens in (tuple(argv[start:end]) for start, end in pairwise(cuts) if start < end):
        flag, equals, value = tokens[0].partition("=") if tokens[0].startswith("--") else ("", "", "")
        words.append(_Word(flag, (*([value] if equals else []), *tokens[1:]), tokens))
    return words


def _names(argv: Sequence[str]) -> set[str]:
    return {word.flag for word in _words(argv)}


def _in_iterations(words: list[_Word]) -> tuple[list[_Word], list[str]]:
    """Lengths that are given in samples, in iterations of --global-batch-size, with the lines that say so."""
    given = {word.flag: word.values for word in words}
    batch = " ".join(given.get("--global-batch-size", ()))
    if "--train-samples" not in given or "--train-iters" in given or not batch.isdigit() or not int(batch):
        return words, []
    said, changed = [], []
    for word in words:
        if word.flag in _SAMPLES and word.values and word.values[0].isdigit():
            flag, value = word.flag.replace("samples", "iters"), str(int(word.values[0]) // int(batch))
            said.append(f"{word.flag} {word.values[0]}: RL counts optimizer steps, so it is {flag} {value}")
            word = _Word(flag, (value,), (flag, value))
        changed.append(word)
    return changed, said
