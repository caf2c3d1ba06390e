"""Rows at the edge of the dock: into TensorDicts and back, bit for bit, and in pieces."""

import pytest
import torch

from mindspeed_rl_plugin.dock import from_tensordict, to_tensordict
from mindspeed_rl_plugin.dock.cells import pieces
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


@pytest.mark.parametrize("lengths", [[3, 0, 5], [0, 0]])
def test_tensordict_round_trip(lengths: list[int]) -> None:
    rows = rows_of(lengths)
    td = to_tensordict(rows)
    assert td.batch_size == (len(rows),) and td["ids"].tolist() == [list(i) for i in rows.ids]
    assert [r.tolist() for r in td["tokens"].unbind()] == [r.tolist() for r in rows["tokens"].rows()]
    back = from_tensordict(td)
    assert back.ids == rows.ids and back.columns.keys() == rows.columns.keys()
    for name, column in rows.columns.items():
        for one, other in zip(tensors(column), tensors(back[name]), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), name


def tensors(column: Ragged | torch.Tensor) -> list[torch.Tensor]:
    return [column.values, column.offsets] if isinstance(column, Ragged) else [column]


def test_tensordict_errors() -> None:
    with pytest.raises(ValueError, match="collides with the ids"):
        to_tensordict(Rows((SampleId(0, 0, 0),), {"ids": torch.ones(1)}))
    with pytest.raises(ValueError, match="has no 'ids'"):
        from_tensordict(to_tensordict(rows_of([1, 2])).exclude("ids"))


@pytest.mark.parametrize(
    ("most", "counts"), [(223, [4]), (222, [3, 1]), (120, [2, 1, 1]), (128, [2, 2]), (1, [1, 1, 1, 1])]
)
def test_pieces_of_rows_have_at_most_so_many_bytes(most: int, counts: list[int]) -> None:
    """Rows of 20 bytes, and 11 bytes a token: 75, 20, 42 and 86."""
    rows = rows_of([5, 0, 2, 6])
    each = list(pieces(rows, most))
    assert [len(piece) for piece in each] == counts
    assert sum((piece.ids for piece in each), ()) == rows.ids
    assert torch.equal(torch.cat([piece["vectors"].values for piece in each]), rows["vectors"].values)
