"""What the command line of a plan says in short: layouts such as "tp4,pp2,ep8", and models by name or config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from mindspeed_rl_plugin.reshard.known import known_model, known_models
from mindspeed_rl_plugin.reshard.layout import EngineParallel, ModelShape, Parallel

_TRAIN = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "first", "last")
_GENERATE = ("tp", "ep", "dp")


def parse_sizes(text: str, known: tuple[str, ...], flag: str) -> dict[str, int]:
    """Sizes of "tp4,pp2". Raises ValueError naming the flag, the word and what is known."""
    sizes: dict[str, int] = {}
    for word in filter(None, re.split(r"[,\s]+", text)):
        found = re.fullmatch(r"([a-z]+)(\d+)", word)
        if not found or found[1] not in known or int(found[2]) < 1:
            raise ValueError(f"{flag} {text}: {word!r} is not one of {', '.join(known)} with a number, as in tp4")
        if found[1] in sizes:
            raise ValueError(f"{flag} {text}: {found[1]} is given twice")
        sizes[found[1]] = int(found[2])
    return sizes


def train_layout(text: str, world: int | None) -> Parallel:
    """The trainer's layout; the world follows from dp where it is not given.

    Raises ValueError when dp and the world disagree, or sizes do not divide.
    """
    sizes = parse_sizes(text, _TRAIN, "--train")
    dp, first, last = (sizes.pop(name, None) for name in ("dp", "first", "last"))
    replica = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    if world is None:
        world = replica * (dp or 1)
    if dp is not None and replica * dp != world:
        raise ValueError(f"--train {text}: tp x pp x cp x dp = {replica * dp}, but --world is {world}")
    return Parallel(world, first_layers=first, last_layers=last, **sizes)


def engine_layout_of(text: str, world: int, **traits: bool) -> tuple[EngineParallel, int]:
    """One engine, and how many there are. dp counts engines, or their data parallel ranks, and is only checked."""
    sizes = parse_sizes(text, _GENERATE, "--generate")
    dp = sizes.pop("dp", None)
    engine = EngineParallel(**sizes, **traits)
    if world % engine.ranks:
        raise ValueError(f"--generate {text}: engines of {engine.ranks} ranks do not divide {world} ranks")
    if dp is not None and dp not in (world // engine.ranks, world // engine.tp):
        raise ValueError(
            f"--generate {text}: {world} ranks have {world // engine.ranks} engines and {world // engine.tp} data "
            f"parallel ranks of tp {engine.tp}, not {dp}"
        )
    return engine, world // engine.ranks


def model_shape(text: str, multiple: int) -> ModelShape:
    """A published model by name, or that of a config.json; multiple: what Megatron pads its vocabulary to."""
    path = Path(text)
    if not path.exists():
        try:
            return known_model(text.lower(), multiple)
        except ValueError:
            raise ValueError(
                f"--model {text}: neither a config.json, nor a folder with one, nor one of {', '.join(known_models())}"
            ) from None
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    return from_config(config, multiple)


def from_config(config: Mapping, multiple: int) -> ModelShape:
    """Shape of a config.json, its vocabulary padded to a multiple."""
    return ModelShape.from_hf_config(config, -(-config["vocab_size"] // multiple) * multiple)
