"""The first second of a rank: what comes is said, and what needs neither torch nor Megatron is checked.

Nothing that is imported here imports torch, but for `check_rows`. All that is checked here is checked again later, when
Megatron's parser has spoken: what a script adds to it, or sets without the command line, cannot be seen yet.
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
CLOSE_MATCH = 0.75  # of a flag that is ours but for its spelling, by `difflib`
CHECKED_BYTES = 16 << 20  # of files of prompts; those beyond are read once, later
OURS = re.compile(r"\brl_[a-z]")  # a flag of ours by its name in Python
# Imports make two million objects that stay, and no cycle worth collecting: by Python's own thresholds a sixth of the
# time from the launch to the first iteration is the collector's (benchmarks/startup.py).
THRESHOLDS = (100_000, 50, 100)

_args: argparse.Namespace | None = None  # RL's flags, from when they are checked
_began = time.monotonic()
_usual = gc.get_threshold()


def check_flags() -> None:
    """Check the `--rl-*` flags of the command line, where --rl-algorithm or nearly that is there, and the files that
    they name. Ends the process with all that is wrong. Where RL is asked for, the first line of the job is said before.
    Files are left to later where this rank reads none, and where the script may change directory or write them.
    Idempotent."""
    global _args
    argv = sys.argv[1:]
    flags = [word.partition("=")[0] for word in argv if word.startswith("--rl-")]
    if _args is not None or not difflib.get_close_matches(ALGORITHM, flags, cutoff=0.9):
        return
    if ALGORITHM in flags:
        say(
            "starting: flags and files are checked now; then torch and Megatron are imported, the model and vLLM built "
            "(a quarter of a minute in all for a small model, several times that where files are read the first time)"
        )
        gc.set_threshold(*THRESHOLDS)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--seq-length", "--max-position-embeddings"):
        parser.add_argument(flag, nargs="?", type=lambda text: int(text) if text.isdigit() else None)
    parser = refuse_misspelt(add_flags(parser), passed=_perhaps_not_ours(sys.argv[0]))
    _args, _ = parser.parse_known_args(argv)
    if config := given_config():
        _end_if(_problems(_args, config))


def given_config() -> RLConfig | None:
    """RL's flags of the command line, once they are checked; None where RL is not asked for."""
    return RLConfig.from_args(_args) if _args is not None and rl_enabled(_args) else None


def check_rows() -> None:
    """Check that JSON files of prompts, but for large ones, can be read and have rows with their fields; pairs may lack
    them. After the import of torch, before Megatron; not Parquet and saved datasets, whose readers import what
    MindSpeed must patch first, and nothing where the script itself names flags of ours."""
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
    """The start is over: Python collects as ever, but for what is there to stay. Returns seconds since this rank's
    first line."""
    if gc.get_threshold() == THRESHOLDS:
        gc.freeze()
        gc.set_threshold(*_usual)
    return time.monotonic() - _began


def refuse_misspelt(
    parser: argparse.ArgumentParser, passed: Callable[[str, Sequence[str]], bool] = lambda *_: False
) -> argparse.ArgumentParser:
    """End with the nearest flag for a `--rl-*` that nobody knows; scripts that ignore unknown flags would lose it.

    passed: of such a flag and the known ones, whether to let it pass.
    """
    parse, refuse = parser.parse_known_args, parser.error

    def stop(problems: Iterable[str]) -> None:
        _end_if(f"{p} `python -m mindspeed_rl_plugin flags` lists them" for p in problems)

    def error(message: str) -> None:
        if "--rl-" not in message:
            refuse(message)
        stop([f"{message};"])  # without the usage of some 800 lines that argparse prints first

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
    """Whether a flag may be Megatron's, or the script's own, of a module beside it too: Megatron's parser will say."""
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
    """Whether this rank reads files by the paths as they are given: no generator reads any, and a script that changes
    directory looks elsewhere."""
    env = launch_env()
    generates = config.schedule.apart and env["rank"] >= env["world_size"] - config.schedule.generator_ranks
    return not generates and "chdir" not in _text(Path(sys.argv[0]))


def _may_make(path: str) -> bool:
    """Whether the script names this file, in quotes or as the end of a path in quotes: then it may write it first."""
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
    """Files of prompts that are not there, but for those that are perhaps made later."""
    if not config.data.prompt_data:
        yield "--rl-prompt-data is missing: give JSONL, JSON or Parquet files or saved dataset directories"
    for flag, paths in (("--rl-prompt-data", config.data.prompt_data), ("--rl-eval-data", config.monitor.eval_data)):
        for path in paths:
            if not os.path.exists(path) and not made(path):
                yield f"{flag} {path}: no such file or directory"


def rewards(args: Any, config: RLConfig) -> Iterator[str]:
    """Graders that are none, and their time limits."""
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
    """Rows longer than Megatron's sequences."""
    prompt, response, limit = config.data.max_prompt_length, config.rollout.max_response_length, args.seq_length
    if limit is not None and prompt + response > limit:
        positions = args.max_position_embeddings
        more = f" (and --max-position-embeddings {positions})" if positions and prompt + response > positions else ""
        yield (
            f"{longest(config)} = {prompt + response} tokens, more than --seq-length {limit}; shorten one of them, or "
            f"raise --seq-length{more}"
        )


def longest(config: RLConfig) -> str:
    """The two flags that make the longest row."""
    return f"{valued(config.data, 'max_prompt_length')} + {valued(config.rollout, 'max_response_length')}"
