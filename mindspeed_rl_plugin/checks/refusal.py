"""A refusal of the user's arguments or data. Its text explains everything, so no traceback is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Refusal(ValueError):
    """Arguments or data of the user cannot work. The text says why."""

    @classmethod
    def of_arguments(cls, problems: Iterable[str]) -> Refusal:
        """The problems of the arguments, one line each."""
        return cls("RL cannot run with these arguments:\n  - " + "\n  - ".join(dict.fromkeys(problems)))


def lines_of(error: ValueError) -> list[str]:
    """The lines of an error's text, for a list of problems. Lines indented by four spaces (a traceback) stay with the
    line before them. A heading and a single line after it become one line."""
    head, *more = re.split(r"\s*\n(?!    )", str(error).strip() or repr(error))
    more = [line.strip().replace("\n", "\n  ") for line in more]
    return [f"{head} {more[0]}"] if len(more) == 1 and head.endswith(":") else [head.replace("\n", "\n  "), *more]
