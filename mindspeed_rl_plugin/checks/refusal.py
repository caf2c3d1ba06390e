"""A refusal: what the user gave cannot work, and its text says all, so it is shown without a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Refusal(ValueError):
    """What the user gave cannot work; its text says all, so it is shown without a traceback."""

    @classmethod
    def of_arguments(cls, problems: Iterable[str]) -> Refusal:
        """All that is wrong with the arguments, one line each."""
        return cls("RL cannot run with these arguments:\n  - " + "\n  - ".join(dict.fromkeys(problems)))


def lines_of(error: ValueError) -> list[str]:
    """The lines of an error's text, as a list of problems shows them; those of a traceback stay below their line. A
    heading takes a single line behind it up."""
    head, *more = re.split(r"\s*\n(?!    )", str(error).strip() or repr(error))
    more = [line.strip().replace("\n", "\n  ") for line in more]
    return [f"{head} {more[0]}"] if len(more) == 1 and head.endswith(":") else [head.replace("\n", "\n  "), *more]
