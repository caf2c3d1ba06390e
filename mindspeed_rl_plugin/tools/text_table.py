"""Tables of text, for the commands."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """A line per row. The first `left` columns are aligned to the left, the other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust if i < left else str.rjust for i in range(len(widths))]
    return ["  ".join(pad(*cell) for pad, *cell in zip(pads, row, widths, strict=True)).rstrip() for row in rows]
