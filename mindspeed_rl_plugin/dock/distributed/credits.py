"""What a warehouse may still take in: bytes and rows. Producers wait for it; what states write back never does."""

from __future__ import annotations

from collections.abc import Mapping

FLAGS = {"bytes": "--rl-dock-gb", "rows": "--rl-dock-rows"}


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
                f"node holds {limit}; put fewer groups at once or raise {FLAGS[unit]}"
            )
    for unit, limit in limited.items():
        if taken[unit] + wanted[unit] > limit:
            return f"{taken[unit]} of {limit} {unit} are taken or promised, the put needs {wanted[unit]} more"
    return None
