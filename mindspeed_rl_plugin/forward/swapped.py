"""Other values in the place of Megatron's own, for as long as one call takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def swapped(names: dict[str, Any], **values: Any) -> Iterator[None]:
    """Inside, the names of an object or a module (its `vars`) have these values; afterwards they have their old ones,
    and names that did not exist are removed."""
    before = {name: names[name] for name in values if name in names}
    names.update(values)
    try:
        yield
    finally:
        for name in values:
            names.pop(name, None)
        names.update(before)
