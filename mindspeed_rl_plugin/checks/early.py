"""The first second of a rank: prints the job's first line, and runs the checks that need neither torch nor Megatron.

No module that is imported here imports torch, except in `check_rows`. Everything is checked again after Megatron's
parser: arguments that the script adds, or sets without the command line, are not known yet.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.checks.refusal import Refusal
from mindspeed_rl_plugin.checks.refused_flags import OWN_RL
from mindspeed_rl_plugin.config import RLConfig, add_flags, limit_problems, rl_enabled
from mindspeed_rl_plugin.config.flag import spelt, valued
from mindspeed_rl_plugin.environment import launch_env, leave_to_first_rank, record_failure, say
from mindspeed_rl_plugin.reward.specs import parse_specs, time_limits

ALGORITHM = "--rl-algorithm"
CLOSE_MATCH = 0.75  # least similarity, by `difflib`, of a misspelt flag to one of our flags
CHECKED_BYTES = 16 << 20  # largest total size of the prompt files that are read here; others are read later
OURS = re.compile(r"\brl_[a-z]")  # one of our flags as an attribute in Python
# Imports make two million permanent objects and few cycles. With Python's thresholds the garbage collector would take a
# sixth of the time to the first iteration (benchmarks/startup.py).
THRESHOLDS = (100_000, 50, 100)

_args: argparse.Namespace | None = None  # RL's flags, once they are parsed
_began = time.monotonic()
_usual = gc.get_threshold()


def check_flags() -> None:
    """If --rl-algorithm is given (then the job's first line is printed) or misspelt, check the `--rl-*` flags of the
    command line and the files that they name. Problems are printed, and end the process. Files are not checked yet if
    this rank reads none, or if the script may change the directory or write the file. Idempotent."""
    global _args
    argv = sys.argv[1:]
    flags = [word.partition("=")[0] for word in argv if word.startswith("--rl-")]
    if _args is not None or not difflib.get_close_matches(ALGORITHM, flags, cutoff=0.9):
        return
    if ALGORITHM in flags:
        say(
            "starting: flags and files are checked now; then torch and Megatron are imported, model and vLLM are built "
            "(15 s in all for a small model, several times that if files are read for the first time)"
        )
        gc.set_threshold(*THRESHOLDS)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save", nargs="?")
    for flag in ("--seq-length", "--max-position-embeddings"):
        parser.add_argument(flag, nargs="?", type=lambda text: int(text) if text.isdigit() else None)
    parser = refuse_misspelt(add_flags(parser), passed=_perhaps_not_ours(sys.argv[0]))
    _args, _ = parser.parse_known_args(argv)
    if config := given_config():
        _end_if(_problems(_args, config))


def given_config() -> RLConfig | None:
    """RL's flags of the command line; None without RL, or before `check_flags`."""
    return RLConfig.from_args(_args) if _args is not None and rl_enabled(_args) else None


def given_save() -> str | None:
    """--save of the command line, once flags are checked."""
    return _args and _args.save


def check_rows() -> None:
    """Check that small JSON files of prompts can be read and (not for pairs) that their rows have the needed fields.
    Runs after the import of torch and before that of Megatron. Does not read Parquet files and saved datasets, since
    their readers import modules that MindSpeed must patch first, nor files that `check_flags` does not check yet.
    Reads nothing if the script's text names our flags, since the script may change them."""
    config = given_config()
    if config is None or not _reads(config) or OURS.search(_text(Path(sys.argv[0]))):
        return
    from mindspeed_rl_plugin.algorithms.presets import learns_from_pairs
    from mindspeed_rl_plugin.prompts.render import check_keys
    from mindspeed_rl_plugin.prompts.sources import open_source

    pairs, data = learns_from_pairs(config.algorithm.algorithm), config.data
    keys = ("", "") if pairs else (data.prompt_key, data.answer_key)

    def problems() -> Iterator[str]:
        left = CHECKED_BYTES
        for path in dict.fromkeys((*data.prompt_data, *config.monitor.eval_data)):
            try:
                is_json = path.endswith((".json", ".jsonl")) and os.path.isfile(path) and not _may_make(path)
                if is_json and os.path.getsize(path) <= left:
                    left -= os.path.getsize(path)
                    source = open_source(path)
                    for row in range(len(source)):
                        check_keys(source.row(row), source.where(row), *keys)
            except ValueError as error:
                yield str(error)

    _end_if(problems())


def ready() -> float:
    """Called when the start is over: the garbage collector gets its usual thresholds, and skips objects that exist now.
    Returns the seconds since this module was imported."""
    if gc.get_threshold() == THRESHOLDS:
        gc.freeze()
        gc.set_threshold(*_usual)
    return time.monotonic() - _began


def refuse_misspelt(
    parser: argparse.ArgumentParser, passed: Callable[[str, Sequence[str]], bool] = lambda *_: False
) -> argparse.ArgumentParser:
    """Let the parser end the process at an unknown `--rl-*` flag, and name the most similar flag; many scripts ignore
    unknown flags. passed: (unknown flag, known flags) -> whether to accept the unknown flag all the same."""
    parse, refuse = parser.parse_known_args, parser.error

    def stop(problems: Iterable[str]) -> None:
        _end_if(f"{p} `python -m mindspeed_rl_plugin flags` lists all flags" for p in problems)

    def error(message: str) -> None:
        if "--rl-" not in message:
            if given_config() is not None:
                words = (word.partition("=")[0] for word in message.split() if word.startswith("--"))
                options = parser._option_string_actions
                near = [flag for w in words if w not in options for flag in difflib.get_close_matches(w, options, n=1)]
                hint = f"; did you mean {near[0]}?" if near else ""
                say(line := f"the script's arguments are refused: {message}{hint}")
                record_failure(line)
            refuse(message)
        stop([f"{message};"])  # without argparse's usage of about 800 lines

    def parse_known_args(*positional: Any, **named: Any) -> Any:
        parsed, rest = parse(*positional, **named)
        known = [option for option in parser._option_string_actions if option.startswith("--rl-")]
        given = [word.partition("=")[0] for word in rest if word.startswith("--rl-")]
        unknown = [flag for flag in given if not passed(flag, known)]
        near = {flag: difflib.get_close_matches(flag, known, n=1) for flag in unknown}
        stop(f"{flag} is unknown;{f' did you mean {n[0]}?' if n else ''}" for flag, n in near.items())
        return parsed, rest

    parser.parse_known_args, parser.error = parse_known_args, error
    return parser


def _perhaps_not_ours(script: str) -> Callable[[str, Sequence[str]], bool]:
    """A function (unknown flag, known flags) -> whether the flag may be one of Megatron, the script or a module in the
    script's folder. True for a flag that resembles no known flag. Megatron's parser decides later."""
    megatrons = {spelt(flag.name) for flag in OWN_RL}

    def perhaps(flag: str, known: Sequence[str]) -> bool:
        alike = any(k.startswith(flag) for k in known) or difflib.get_close_matches(flag, known, 1, CLOSE_MATCH)
        if flag in megatrons or not alike:
            return True
        word = re.compile(rf"{re.escape(flag)}(?![\w-])")
        return any(word.search(_text(path)) for path in Path(script).absolute().parent.glob("*.py"))

    return perhaps


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _reads(config: RLConfig) -> bool:
    """Whether this rank reads files at the given paths. Generators read none; if the script changes the directory,
    relative paths name other files."""
    env = launch_env()
    generates = config.schedule.apart and env["rank"] >= env["world_size"] - config.schedule.generator_ranks
    return not generates and "chdir" not in _text(Path(sys.argv[0]))


def _may_make(path: str) -> bool:
    """Whether the script's text has the file's name at the end of a quoted text: then it may write this file."""
    name = re.escape(os.path.basename(path.rstrip("/")))
    return bool(name) and re.search(rf"""["'/]{name}/?["']""", _text(Path(sys.argv[0]))) is not None


def _end_if(problems: Iterable[str]) -> None:
    if not (problems := list(problems)):
        return
    refusal = Refusal.of_arguments(problems)
    leave_to_first_rank()
    record_failure(str(refusal))
    print(f"[rl] {refusal}", file=sys.stderr, flush=True)
    sys.exit(2)


def _problems(args: Any, config: RLConfig) -> Iterator[str]:
    yield from limit_problems(*vars(config).values())
    yield from lengths(args, config)
    if not _reads(config):
        return
    yield from prompt_data(args, config, made=_may_make)
    if config.graders:
        yield from rewards(args, config)


def prompt_data(args: Any, config: RLConfig, made: Callable[[str], bool] = lambda path: False) -> Iterator[str]:
    """Missing files of prompts. made: whether the script may still write the file of a path."""
    if not config.data.prompt_data:
        yield "--rl-prompt-data is missing: give JSONL, JSON or Parquet files or saved dataset directories"
    for flag, paths in (("--rl-prompt-data", config.data.prompt_data), ("--rl-eval-data", config.monitor.eval_data)):
        for path in paths:
            if not os.path.exists(path) and not made(path):
                yield f"{flag} {path}: no such file or directory"


def rewards(args: Any, config: RLConfig) -> Iterator[str]:
    """Invalid graders and invalid time limits."""
    try:
        graders = len(parse_specs(config.graders, config.reward.reward_regex))
    except ValueError as error:
        yield f"--rl-reward: {error}"
        return
    try:
        time_limits(config.reward.reward_timeout, graders, config.monitor.wait_timeout)
    except ValueError as error:
        yield str(error)


def lengths(args: Any, config: RLConfig) -> Iterator[str]:
    """Prompt and response that together may be longer than Megatron's sequences."""
    prompt, response, limit = config.data.max_prompt_length, config.rollout.max_response_length, args.seq_length
    if limit is not None and prompt + response > limit:
        positions = args.max_position_embeddings
        more = f" (and --max-position-embeddings {positions})" if positions and prompt + response > positions else ""
        yield (
            f"{longest(config)} = {prompt + response} tokens, more than --seq-length {limit}; lower one of the two, or "
            f"raise --seq-length{more}"
        )


def longest(config: RLConfig) -> str:
    """The two flags that determine the longest row."""
    return f"{valued(config.data, 'max_prompt_length')} + {valued(config.rollout, 'max_response_length')}"
