"""Docks of every layout as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from dock_help import LAYOUTS, Maker, make_members

from mindspeed_rl_plugin.dock.factory import Member


@pytest.fixture(params=LAYOUTS)
def make(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Of every layout in turn."""
    made = Maker(LAYOUTS[request.param])
    yield made
    made.end()


@pytest.fixture
def make_one() -> Iterator[Maker]:
    """Of one process."""
    made = Maker(["a"])
    yield made
    made.end()


@pytest.fixture
def members() -> Iterator[Callable[..., list[Member]]]:
    """`make_members`, closed at the end."""
    made: list[Member] = []

    def make(*args, **more) -> list[Member]:
        members = make_members(*args, **more)
        made.extend(members)
        return members

    yield make
    for member in made:
        member.close()
