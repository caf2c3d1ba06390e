"""Reads and checks short arguments of plan, export and import: layouts such as "tp4,pp2,ep8", and models by name or
config.json."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.config.flag import spelt
from mindspeed_rl_plugin.layout.families import family_of
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel, engine_layout, megatron_layout
from mindspeed_rl_plugin.prompts.tokenizer import read_json

TRAIN = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "first", "last")
_ENGINE_SIZES = ("tp", "ep", "dp")
# Sizes of published models, from their config.json, for plans without a checkpoint.
_TIED = {"tied": True}
_QWEN3_MOE = {"experts": 128, "expert_ffn": 768}
_DEEPSEEK_EXPERTS = {"experts": 256, "expert_ffn": 2048, "shared_ffn": 2048, "dense_layers": (0, 1, 2)}
_DEEPSEEK_EXPERTS |= {"q_lora": 1536, "kv_lora": 512, "nope": 128, "rope": 64, "value": 128}
# name -> family, then layers, hidden, heads, groups, head_dim, ffn, vocab of `ModelShape`, then its further fields
MODELS = {
    "llama3.1-8b": ("llama", (32, 4096, 32, 8, 128, 14336, 128256), {}),
    "llama3.1-70b": ("llama", (80, 8192, 64, 8, 128, 28672, 128256), {}),
    "qwen2.5-0.5b": ("qwen2", (24, 896, 14, 2, 64, 4864, 151936), _TIED),
    "qwen2.5-1.5b": ("qwen2", (28, 1536, 12, 2, 128, 8960, 151936), _TIED),
    "qwen2.5-7b": ("qwen2", (28, 3584, 28, 4, 128, 18944, 152064), {}),
    "qwen2.5-14b": ("qwen2", (48, 5120, 40, 8, 128, 13824, 152064), {}),
    "qwen2.5-32b": ("qwen2", (64, 5120, 40, 8, 128, 27648, 152064), {}),
    "qwen2.5-72b": ("qwen2", (80, 8192, 64, 8, 128, 29568, 152064), {}),
    "qwen3-8b": ("qwen3", (36, 4096, 32, 8, 128, 12288, 151936), {}),
    "qwen3-32b": ("qwen3", (64, 5120, 64, 8, 128, 25600, 151936), {}),
    "qwen3-30b-a3b": ("qwen3_moe", (48, 2048, 32, 4, 128, 6144, 151936), _QWEN3_MOE),
    "qwen3-235b-a22b": ("qwen3_moe", (94, 4096, 64, 4, 128, 12288, 151936), _QWEN3_MOE | {"expert_ffn": 1536}),
    "deepseek-v3": ("deepseek_v3", (61, 7168, 128, 128, 192, 18432, 129280), _DEEPSEEK_EXPERTS),
    "deepseek-r1": ("deepseek_v3", (61, 7168, 128, 128, 192, 18432, 129280), _DEEPSEEK_EXPERTS),
}
# Required fields of a config.json.
_CONFIG_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def check_least(options: Namespace, least: int, *names: str) -> None:
    """Raise ValueError for the first of the options `names` that is less than `least`."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"{spelt(name)} must be at least {least}, got {value}")


def parse_sizes(text: str, known: tuple[str, ...], flag: str) -> dict[str, int]:
    """Sizes by name, from a text such as "tp4,pp2". Raises ValueError for a name that is unknown or repeated, or has no
    size of at least 1."""
    sizes: dict[str, int] = {}
    for word in filter(None, re.split(r"[,\s]+", text)):
        match = re.fullmatch(r"([a-z]+)(\d+)", word)
        if not match or match[1] not in known or int(match[2]) < 1:
            raise ValueError(f"{flag} {text}: {word!r} is not one of {', '.join(known)} with a number, as in tp4")
        if match[1] in sizes:
            raise ValueError(f"{flag} {text}: {match[1]} is given twice")
        sizes[match[1]] = int(match[2])
    return sizes


def train_layout(text: str, world: int | None) -> Parallel:
    """The trainer's layout. world: number of ranks; None: computed from the sizes. Raises ValueError if dp is wrong for
    this number of ranks, or if the other sizes do not divide it."""
    sizes = parse_sizes(text, TRAIN, "--train")
    dp, first, last = (sizes.pop(name, None) for name in ("dp", "first", "last"))
    replica = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    if world is None:
        world = replica * (dp or 1)
    if dp is not None and replica * dp != world:
        raise ValueError(f"--train {text}: tp x pp x cp x dp = {replica * dp}, but --world is {world}")
    return Parallel(world, first_layers=first, last_layers=last, **sizes)


def engine_layout_of(text: str, world: int) -> tuple[EngineParallel, int]:
    """Layout of one engine, and number of engines on `world` ranks. dp in `text` is only checked: it must be the number
    of engines, or of data parallel ranks in all of them."""
    sizes = parse_sizes(text, _ENGINE_SIZES, "--generate")
    dp = sizes.pop("dp", None)
    engine = EngineParallel(**sizes)
    if world % engine.ranks:
        raise ValueError(f"--generate {text}: {world} ranks are no multiple of the {engine.ranks} ranks of an engine")
    if dp is not None and dp not in (world // engine.ranks, world // engine.tp):
        raise ValueError(
            f"--generate {text}: dp{dp} is wrong; {world} ranks: give {world // engine.ranks}, the number of engines, "
            f"or {world // engine.tp}, the data parallel size of all engines ({world} ranks / tp{engine.tp})"
        )
    return engine, world // engine.ranks


def check_experts(shape: ModelShape, text: str, flag: str) -> None:
    """Raise ValueError if the layout in `text`, such as tp4,ep8, has ep above 1 and the model has no experts."""
    spread = re.search(r"\bep([2-9]|[1-9]\d+)\b", text)
    if spread and not shape.experts:
        raise ValueError(f"{flag}: leave {spread[0]} out; a model of family {shape.family} has no experts")


def check_train(shape: ModelShape, train: Parallel, flag: str) -> None:
    """Raise ValueError if the trainer's layout does not divide the model; for a wrong tp it names those that work."""
    check_experts(shape, f"ep{train.ep}", flag)

    def cut(tp: int) -> None:
        parallel = Parallel(lcm(tp, train.etp or tp), tp=tp, etp=train.etp)
        megatron_layout(replace(shape, padded_vocab=_padded(shape.vocab, tp)), parallel, 0)

    with _explained(flag, shape, train.tp, cut):
        train.chunk_sizes(shape.layers)
        for rank in (0, train.world - 1):
            megatron_layout(shape, train, rank)


def check_engine(shape: ModelShape, engine: EngineParallel, flag: str) -> None:
    check_experts(shape, f"ep{engine.ep}", flag)
    if engine.ep > max(shape.experts, 1):
        raise ValueError(f"{flag}: ep{engine.ep} is more than the number of experts, {shape.experts}; lower it")
    with _explained(flag, shape, engine.tp, lambda tp: engine_layout(shape, EngineParallel(tp), 0)):
        engine_layout(shape, engine, 0)


@contextmanager
def _explained(flag: str, shape: ModelShape, tp: int, cut: Callable[[int], object]) -> Iterator[None]:
    """Add the flag to a ValueError of the block; if `cut` raises for this tp, also each tp for which `cut` succeeds."""
    try:
        yield
    except ValueError as error:
        works = []
        for size in (size for size in range(1, shape.heads + 1) if shape.heads % size == 0):
            with suppress(ValueError):
                cut(size)
                works.append(size)
        more = "" if tp in works else f"; tp that works: {', '.join(map(str, works))}"
        raise ValueError(f"{flag}: {error}{more}") from None


def model_shape(text: str, multiple: int) -> ModelShape:
    """Shape of the model of this name or config.json; the vocabulary is padded to a multiple of `multiple`."""
    path, flag = Path(text), f"--model {text}"
    if path.exists():
        return shape_of(read_config(path, flag), multiple, flag)
    if text.lower() not in MODELS:
        raise ValueError(f"{flag}: no such path; give a config.json, its folder, or one of {', '.join(MODELS)}")
    family, sizes, more = MODELS[text.lower()]
    return ModelShape(family, *sizes, padded_vocab=_padded(sizes[-1], multiple), **more)


def _padded(vocab: int, multiple: int) -> int:
    return -(-vocab // multiple) * multiple


def read_config(path: Path, flag: str) -> dict[str, Any]:
    """Contents of a config.json. path: of this file or of its folder. Raises ValueError if it is missing or invalid."""
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"{flag}: {path} is missing; give the folder of a Hugging Face model")
    return read_json(path)


def shape_of(config: Mapping[str, Any], multiple: int, flag: str) -> ModelShape:
    """Shape of the model of a config.json, with the vocabulary padded to a multiple of `multiple`. Raises ValueError
    for a missing field or an invalid size."""
    for name in _CONFIG_SIZES if family_of(config) else ():
        if name not in config:
            raise ValueError(f"{flag}: config.json has no {name}; give the config.json of a text-only language model")
        if not isinstance(config[name], int) or config[name] < 1:
            raise ValueError(f"{flag}: {name} of config.json is {config[name]!r}; it must be an integer of at least 1")
    try:
        return ModelShape.from_hf_config(config, _padded(config.get("vocab_size", 1), multiple))
    except KeyError as error:
        raise ValueError(f"{flag}: config.json has no {error.args[0]}, which a model of its family needs") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{flag}: sizes in config.json must be numbers of at least 1 ({error})") from None
