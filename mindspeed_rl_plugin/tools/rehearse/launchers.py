"""How a launch script calls its launcher, from its text: a launcher that is called by a path has no stand-in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindspeed_rl_plugin.tools.rehearse.standins import LAUNCHERS

# Commands with which a script starts others of its kind on other machines, in a container, or without torchrun.
ELSEWHERE = (
    *("ssh", "pdsh", "clush", "srun", "sbatch", "mpirun"),
    *("docker", "podman", "nerdctl", "kubectl", "sudo", "su", "deepspeed", "accelerate", "msrun"),
)
# What stands before a command without being it.
_BEFORE = ("exec", "nohup", "time", "env", "eval", "numactl", "taskset", "nice", "timeout", "stdbuf")
_BEFORE += ("if", "then", "do", "else", "while", "until", "{", "!")
# After these a path is an argument.
_NO_LAUNCH = ("torchrun", "[", "[[", "test", "command", "which", "echo")
_ENDS = re.compile(r"&&|\|\||[;|&(]")
_ASSIGNED = re.compile(r"(\w+)=(.*)")
_DEFAULT = re.compile(r"\$\{(\w+):?-([^}]*/torchrun)\}")


def check_launchers(script: Path, env: Mapping[str, str]) -> None:
    """Raise ValueError where the script's text calls torchrun, or python -m torch.distributed.run, by a path.

    env: its environment, which may give a variable another value than its default in the script.
    """
    text = script.read_text(errors="replace")
    for number, command in _commands(text):
        words = [word.strip("\"'") for word in command.split()]
        while words and words[0] == "export":
            del words[0]
        assigned = []
        while words and (found := _ASSIGNED.fullmatch(words[0])):
            assigned.append((found[1], found[2].strip("\"'")))
            del words[0]
        path, fix = _by_path(words, env)
        if not words and assigned and assigned[-1][1].endswith("/torchrun"):
            name, value = assigned[-1]
            path = value if re.search(rf"\$\{{?{name}\b", text) else None
        if path:
            raise ValueError(
                f"{script} line {number}: {path} is called by its path, so it would start training instead of being "
                f"taken down; {fix}"
            )


def _by_path(words: list[str], env: Mapping[str, str]) -> tuple[str | None, str]:
    """The launcher that a command calls by a path, None where it calls none so, and what to do about it."""
    fix = "call torchrun by name"
    wrapped = bool(words) and words[0] in _BEFORE
    for i, word in enumerate(words):
        default = _DEFAULT.fullmatch(word)
        if default and "/" in (env.get(default[1]) or "/"):
            return default[2], f"set {default[1]}=torchrun"
        if word.endswith("/torchrun"):
            return word, fix
        if re.fullmatch(r"\S+/python[\d.]*", word) and set(LAUNCHERS) & set(words[i + 1 : i + 4]):
            return word, "call python by name"
        if not wrapped or word in _NO_LAUNCH:
            break
    return None, fix


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """(line, simple command) of a script, comments left out and continued lines joined."""
    start, whole = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not whole:
            start = number
        if line.lstrip().startswith("#"):
            continue
        whole += line.removesuffix("\\") + " "
        if line.endswith("\\"):
            continue
        if not set(whole.split()) & set(ELSEWHERE):  # what those start is not run here
            for command in _ENDS.split(whole):
                yield start, command
        whole = ""
