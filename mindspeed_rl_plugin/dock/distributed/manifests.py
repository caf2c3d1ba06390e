"""A warehouse's manifest as one message."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_rl_plugin.dock.distributed.frames import Message
from mindspeed_rl_plugin.dock.distributed.records import EpochSet, Record
from mindspeed_rl_plugin.dock.distributed.warehouse import Warehouse


def packed(house: Warehouse) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A manifest as one message: each record's note in a list, its arrays under the record's number."""
    notes, arrays = [], {}
    for i, record in enumerate(house.manifest()):
        message = record.to_message()
        notes.append(dict(message.note))
        arrays.update({f"{i}/{name}": a for name, a in message.arrays.items()})
    return {"seq": house.seq, "gone": house.gone.to_list(), "records": notes}, arrays


def unpacked(message: Message) -> tuple[int, EpochSet, list[Record]]:
    """Running number, epochs that are over, and records of a manifest message."""
    records = []
    for i, note in enumerate(message.note["records"]):
        start = f"{i}/"
        arrays = {n.removeprefix(start): a for n, a in message.arrays.items() if n.startswith(start)}
        records.append(Record.from_message(Message("record", note, arrays)))
    return message.note["seq"], EpochSet.from_list(message.note["gone"]), records
