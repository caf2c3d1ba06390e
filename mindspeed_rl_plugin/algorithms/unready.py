"""What an algorithm can ask for and the loop does not have yet: refused at start, never approximated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mindspeed_rl_plugin.algorithms.algorithm import Algorithm

# (short name, whether an algorithm asks for it, what to do instead)
UNREADY: tuple[tuple[str, Callable[[Algorithm], bool], str], ...] = ()  # nothing at present


def lacking(algorithm: Algorithm) -> list[str]:
    """Short names of what the loop lacks for `algorithm`."""
    return [name for name, asks, _ in UNREADY if asks(algorithm)]


def messages(algorithm: Algorithm) -> Iterator[str]:
    """One error for each thing that the loop lacks for `algorithm`."""
    for _, asks, text in UNREADY:
        if asks(algorithm):
            yield f"--rl-algorithm {algorithm.name}: {text.format(a=algorithm)}"
