"""What a warehouse may still take in: bytes and rows. Producers wait for it; what states write back never does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mindspeed_rl_plugin.dock.distributed.arena import LINE, rounded

FLAGS = {"bytes": "--rl-dock-gb", "rows": "--rl-dock-rows"}


def write_back_bytes(nbytes: int, cells: int = 1) -> int:
    """Room for `cells` written back, of `nbytes` together. Two lines more each: extents are whole lines, and a cell may
    begin and end inside one."""
    return nbytes + 2 * LINE * cells


def row_reserve(write_backs: Mapping[str, int]) -> int:
    """Bytes that an admitted row keeps free. write_backs: most bytes that states write into one row, by column."""
    return sum(write_back_bytes(nbytes) for nbytes in write_backs.values())


def put_bytes(blocks: Iterable[int]) -> int:
    """Bytes that a producer's blocks of these sizes take: whole lines."""
    return sum(rounded(max(nbytes, 1)) for nbytes in blocks)


def missing(
    wanted: Mapping[str, int], taken: Mapping[str, int], limits: Mapping[str, int | None], groups: int
) -> str | None:
    """Why a put of `groups` must wait, None where it need not.

    wanted: what the put needs, with what states write back; taken: used or promised by now; limits: None for no limit;
    each by unit. Raises ValueError when it would not fit into an empty warehouse either.
    """
    limited = {unit: limit for unit, limit in limits.items() if limit is not None}
    for unit, limit in limited.items():
        if wanted[unit] > limit:
            raise ValueError(
                f"a put of {groups} groups needs {wanted[unit]} {unit}, with what states write back; the dock of this "
                f"node holds {limit}; lower --rl-rollout-prompts or raise {FLAGS[unit]}"
            )
    for unit, limit in limited.items():
        if taken[unit] + wanted[unit] > limit:
            return f"{taken[unit]} of {limit} {unit} are taken or promised, the put needs {wanted[unit]} more"
    return None
