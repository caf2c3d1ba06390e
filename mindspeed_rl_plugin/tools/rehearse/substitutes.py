"""Replaces files of a launch script by generated ones: tokenizer, data, prompts, checkpoints, output folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mindspeed_rl_plugin.algorithms.presets import learns_from_pairs
from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.shrink import VOCABULARY

_DATA = """
    --data-path --train-data-path --valid-data-path --test-data-path --data-args-path --per-split-data-args-path
    --mock-data=
"""
_FOLDERS = (
    "--save --tensorboard-dir --data-cache-path --rl-run-dir --rl-dump-dir --mg-save-dir --mg-cache-dir --hf-save-dir "
    "--hf-cfg-dir"
)
_TRACKERS = "--wandb-project --wandb-exp-name --wandb-entity --wandb-save-dir --one-logger-project"
# Flags by which a job writes, but for --save.
WRITES = "--tensorboard-dir --rl-run-dir --rl-dump-dir --rl-trace* --mg-save-dir --hf-save-dir --enable-mg2hf-convert"
WRITES += f" --async-save {_TRACKERS}"
_MADE_TOKENIZER = "here: a generated tokenizer of characters"
VARIED = """
def grade(response):
    return sum(map(ord, response)) % 8 / 8
"""


def substitute(flags: Flags, scratch: Path, mindspeed_llm: bool) -> None:
    """Replace the script's files. scratch: folder of the generated files; mindspeed_llm: whether tokenizer flags are
    MindSpeed-LLM's."""
    tokenizer = make_tokenizer(scratch / "tokenizer")
    flags.apply(_MADE_TOKENIZER, "--vocab-file --merge-file --tiktoken-pattern --tokenizer-not-use-fast")
    megatrons = "--tokenizer-type=HuggingFaceTokenizer --tokenizer-model={0} --tokenizer-name-or-path"
    theirs = "--tokenizer-type=PretrainedFromHF --tokenizer-name-or-path={0} --tokenizer-model"
    flags.apply(_MADE_TOKENIZER, theirs if mindspeed_llm else megatrons, tokenizer)
    flags.apply("here: a mock data set", _DATA)
    for flag in _FOLDERS.split():
        flags.apply("here: a folder that the rehearsal removes", flag + "~{0}", scratch / flag.strip("-"))
    _checkpoint(flags, scratch)
    flags.apply("nothing is reported to outside", _TRACKERS)
    if "--rl-algorithm" in flags:
        _prompts(flags, scratch)
        flags.apply(_MADE_TOKENIZER, "--rl-tokenizer~{0}", tokenizer)
        flags.apply("its config describes the model at its real size", "--rl-hf-model")
        _graders(flags, scratch / "varied.py")


def converted(flags: Flags) -> bool:
    """Whether MindSpeed-LLM converts `--load` from a Hugging Face model."""
    return "--enable-hf2mg-convert" in flags and "--load" in flags


def _checkpoint(flags: Flags, scratch: Path) -> None:
    """Make a folder for the checkpoint that is loaded, with the files that the check of the arguments needs. The
    checkpoint itself is made later."""
    if "--mtp-num-layers" in flags:
        why = "`export`, which makes the model to convert, leaves out layers for multi-token prediction"
        flags.apply(why, "--enable-hf2mg-convert --enable-mg2hf-convert")
    folder = scratch / ("hugging-face" if converted(flags) else "pretrained")
    folder.mkdir()
    if converted(flags):
        (folder / "config.json").write_text('{"transformers_version": ""}')
        (folder / "model.safetensors").touch()
        flags.apply("here: the model that the rehearsal makes", "--load~{0} --hf-cfg-dir~{0}", folder)
    else:
        (folder / TRACKER).write_text("1")
    flags.apply("here: a checkpoint that the rehearsal makes", "--load~{0} --pretrained-checkpoint~{0}", folder)


def make_tokenizer(folder: Path) -> Path:
    """A Hugging Face tokenizer directory of `VOCABULARY` tokens: ASCII characters, special tokens, fillers. The fillers
    are needed, since Megatron's mock data set samples ids up to 4096."""
    from transformers import PreTrainedTokenizerFast

    tokens = [chr(c) for c in range(32, 127)] + ["<pad>", "<eos>"]
    tokens += [f"<filler{i}>" for i in range(VOCABULARY - len(tokens))]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "chat_template": template}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return folder


def _prompts(flags: Flags, scratch: Path) -> None:
    prompt, answer = flags.get("--rl-prompt-key") or "prompt", flags.get("--rl-answer-key") or "answer"
    rows = [json.dumps({prompt: f"{a}+{b}=", answer: str(a + b)}) for a in range(8) for b in range(4)]
    (scratch / "prompts.jsonl").write_text("\n".join(rows))
    flags.apply("here: 32 generated sums", "--rl-prompt-data={0}", scratch / "prompts.jsonl")
    if not learns_from_pairs(flags.get("--rl-algorithm") or ""):
        every = "--rl-eval-data={0} --rl-eval-every=1 --rl-dump-dir={1} --save={2}"
        folders = (scratch / "rl-dump-dir", scratch / "save")
        flags.apply("so that evaluation, dump and a resume are rehearsed", every, scratch / "prompts.jsonl", *folders)


def _graders(flags: Flags, varied: Path) -> None:
    """Graders: `path/to/file.py:function=WEIGHT` is kept if the file exists, else replaced by `exact=WEIGHT`. One more
    is written to `varied`."""
    graders = []
    for spec in (flags.get("--rl-reward") or "").split():
        path, dot_py, rest = spec.partition(".py:")
        _, equals, weight = rest.partition("=")
        graders.append(f"exact{equals}{weight}" if dot_py and not os.path.exists(path + ".py") else spec)
    if graders:
        varied.write_text(VARIED)
        why = "here: one more grader, whose rewards differ, so that there is a gradient"
        flags.set("--rl-reward", *graders, f"{varied}:grade", why=why)
