"""TensorDict edge: what goes in comes out, bit for bit."""

import pytest
import torch

from mindspeed_rl_plugin.dock import from_tensordict, to_tensordict
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId


def rows_of(lengths: list[int]) -> Rows:
    total, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    columns = {
        "tokens": Ragged(torch.arange(total, dtype=torch.int32), offsets),
        "mask": Ragged(torch.arange(total) % 2 == 0, offsets),
        "vectors": Ragged(torch.arange(3 * total).reshape(-1, 3).to(torch.bfloat16), offsets),
        "reward": torch.arange(len(lengths)) / 7,
        "parts": torch.ones(len(lengths), 2, dtype=torch.float64),
    }
    return Rows(tuple(SampleId(7, i, i % 2) for i in range(len(lengths))), columns)


def assert_same(a: Rows, b: Rows) -> None:
    assert a.ids == b.ids and set(a.columns) == set(b.columns)
    for name, x in a.columns.items():
        y = b[name]
        assert type(x) is type(y), name
        pairs = [(x.values, y.values), (x.offsets, y.offsets)] if isinstance(x, Ragged) else [(x, y)]
        for p, q in pairs:
            assert p.dtype == q.dtype and torch.equal(p, q), name


@pytest.mark.parametrize("lengths", [[3, 0, 5], [1], [0, 0]])
def test_tensordict_round_trip(lengths: list[int]) -> None:
    rows = rows_of(lengths)
    td = to_tensordict(rows)
    assert td.batch_size == (len(rows),) and td["ids"].tolist() == [list(i) for i in rows.ids]
    assert [r.tolist() for r in td["tokens"].unbind()] == [r.tolist() for r in rows["tokens"].rows()]
    assert_same(from_tensordict(td), rows)


def test_tensordict_errors() -> None:
    with pytest.raises(ValueError, match="collides with the ids"):
        to_tensordict(Rows((SampleId(0, 0, 0),), {"ids": torch.ones(1)}))
    td = to_tensordict(rows_of([1, 2]))
    with pytest.raises(ValueError, match="has no 'ids'"):
        from_tensordict(td.exclude("ids"))
