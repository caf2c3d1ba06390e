"""Byte ranges of a segment: sorted lists of (offset, bytes) that neither overlap nor touch."""

from __future__ import annotations

import bisect
import sys

Range = tuple[int, int]


def insert(ranges: list[Range], begin: int, end: int) -> None:
    """Add what is not in `ranges`; neighbours become one."""
    at = bisect.bisect(ranges, (begin, 0))
    low, high = at, at
    if at > 0 and sum(ranges[at - 1]) == begin:
        low, begin = at - 1, ranges[at - 1][0]
    if at < len(ranges) and ranges[at][0] == end:
        high, end = at + 1, sum(ranges[at])
    ranges[low:high] = [(begin, end - begin)]


def take(ranges: list[Range], begin: int, end: int) -> bool:
    """Take out begin..end where it lies in one of `ranges` whole; else False, and no change."""
    at = bisect.bisect(ranges, (begin, sys.maxsize)) - 1
    if at < 0 or end > sum(ranges[at]):
        return False
    offset, nbytes = ranges[at]
    ranges[at : at + 1] = [part for part in ((offset, begin - offset), (end, offset + nbytes - end)) if part[1]]
    return True


def cut(ranges: list[Range], begin: int, end: int) -> list[Range]:
    """Take out what of begin..end lies in `ranges`, and return it."""
    kept, out = [], []
    for offset, nbytes in ranges:
        low, high = max(begin, offset), min(end, offset + nbytes)
        if low < high:
            out.append((low, high - low))
            parts = (offset, low - offset), (high, offset + nbytes - high)
            kept += [part for part in parts if part[1]]
        else:
            kept.append((offset, nbytes))
    ranges[:] = kept
    return out


def overlap(ranges: list[Range], begin: int, end: int) -> int:
    """Bytes of begin..end that lie in `ranges`."""
    return sum(max(min(end, offset + nbytes) - max(begin, offset), 0) for offset, nbytes in ranges)
