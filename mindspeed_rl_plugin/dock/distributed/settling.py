"""A machine that was given up and answers again hears what was cleared while nobody reached it.

Whoever clears leaves out what it cannot reach; the records of the other warehouses tell every controller. Each process
that has controllers and had given the machine up tells it what they know, with its signs of life from then on: a
clearing may just have missed it when it came back.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.distributed.controller import Controller
from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.records import EpochSet, Shape


class Settling:
    """A part of `hosting.Host`, which has `controllers`, `directory`, `heartbeat` and the sending.

    lapsed: warehouses that were given up once, and what each was told last.
    """

    controllers: dict[str, Controller]
    lapsed: dict[int, dict[str, Any]]

    async def _settle(self, warehouse: int) -> None:
        """Tell a warehouse that was given up once what is over, where that is news."""
        if warehouse not in self.lapsed:
            return
        gone, parts = EpochSet(), dict[int, tuple[Shape, set[int]]]()
        for controller in self.controllers.values():
            over, partly = controller.cleared()
            gone.update(over)
            for number, (shape, groups) in partly.items():
                parts.setdefault(number, (shape, set()))[1].update(groups)
        note = {"gone": gone.to_list(), "parts": [[n, *s, sorted(g)] for n, (s, g) in sorted(parts.items())]}
        if note != self.lapsed[warehouse]:
            request = self._request(self.directory.warehouses[warehouse], "settle", note)
            answer = await asyncio.wait_for(request, self.heartbeat)
            if answer.kind == "settled":
                self.lapsed[warehouse] = note

    def _on_settle(self, peer: str, message: Message) -> Message:
        """What was cleared elsewhere is cleared here too."""
        house, gone = self._house(), EpochSet.from_list(message.note["gone"])
        over = [(r.epoch, r.shape, range(r.shape.groups)) for r in house.manifest() if r.epoch in gone]
        parts = [(number, Shape(*shape), groups) for number, *shape, groups in message.note["parts"]]
        for number, shape, groups in (*over, *parts):
            record = house.clear(number, shape, np.array(groups, np.int64))
            if record is not None:
                self._broadcast(record)
        house.gone.update(gone)
        self._wake("credits")
        return Message("settled", {"seq": house.seq})
