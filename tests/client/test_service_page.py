"""docs/service.md: the loop of an observer reads each row once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rl_plugin import client

PAGE = Path(__file__).parents[2] / "docs" / "service.md"


class Watched:
    """A job in which another row is graded in each turn, and one is trained and gone two turns later."""

    def __init__(self, *_: str) -> None:
        self.turn, self.read_ids = 0, []

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: Any) -> None:
        assert self.read_ids == [[(0, 0, 0)], [(0, 0, 1)], [(0, 0, 2)], [(0, 0, 3)], []]

    @property
    def ended(self) -> bool:
        self.turn += 1
        return self.turn > 5

    def metrics(self, deadline: float) -> list[dict[str, Any]]:
        return [{"iteration": self.turn, "reward/mean": 0.5}]

    def finished(self, stage: str) -> torch.Tensor:
        return torch.tensor([[0, 0, m] for m in range(max(self.turn - 3, 0), min(self.turn, 4))])

    def read(self, ids: list[tuple[int, int, int]], columns: list[str]) -> None:
        self.read_ids.append(ids)


def test_an_observer_reads_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Client", Watched)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "Client(" in code
    exec(code, {})
