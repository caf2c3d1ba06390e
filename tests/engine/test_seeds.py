"""Response seeds: stable, in range, and different for every id."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_rl_plugin.engine.rollout_engine import response_seed

pytestmark = pytest.mark.quick

int64 = st.integers(-(2**63), 2**63 - 1)


def test_values_never_change() -> None:
    # A change here would make every saved run sample other responses after a resume.
    assert response_seed(0, 0, 0, 0) == 7099512655766331600
    assert response_seed(1234, 7, 3, 15) == 5320631273384437274
    assert response_seed(1234, -1, 3, 15) == 8065633560909812581


@given(int64, int64, int64, int64)
def test_fits_a_signed_64_bit_integer(base: int, epoch: int, group: int, member: int) -> None:
    assert 0 <= response_seed(base, epoch, group, member) < 2**63


def test_every_field_counts() -> None:
    seeds = [response_seed(*key) for key in itertools.product(range(4), range(4), range(8), range(8), range(3))]
    assert len(set(seeds)) == len(seeds)
