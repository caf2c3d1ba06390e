"""Weights that do not fit the model are refused while Megatron loads them.

Where a strict load fails, Megatron from core 0.16 on loads what fits and goes on (`load_model_state_dict` of
megatron/training/checkpointing.py, there for extra states of TransformerEngine): a layer that another stage holds would
be left out, and one that is not in the file stay as it was initialised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SHOWN = 3  # names of each kind
_EXTRA = "_extra_state"  # TransformerEngine's, which versions add and leave out


@contextmanager
def must_fit(chunks: Sequence[torch.nn.Module], where: str) -> Iterator[None]:
    """Inside, `load_state_dict` of these chunks raises ValueError for weights that are not exactly the model's.

    So does an end of the process with status 0, with which Megatron leaves a file that it cannot read. where: what is
    loaded, as messages name it.
    """
    for chunk in chunks:
        chunk.load_state_dict = _checked(chunk, where)
    try:
        yield
    except SystemExit:
        raise ValueError(
            f"Megatron could not load {where}, and says why on standard output; give the layout that it was saved with"
        ) from None
    finally:
        for chunk in chunks:
            del chunk.load_state_dict


def _checked(chunk: torch.nn.Module, where: str) -> Any:
    load = chunk.load_state_dict

    def load_state_dict(state: Mapping[str, Any], *positional: Any, **named: Any) -> Any:
        if differences := misfits(chunk.state_dict(), state):
            raise ValueError(
                f"{where} does not fit the model that the arguments describe: {'; '.join(differences)}. Give the sizes "
                "and the layout that it was saved with (tensor, pipeline and expert parallel sizes, layers of each "
                "stage, padding of the vocabulary), or bring it into this one: `python -m mindspeed_rl_plugin export`, "
                "then `import`, whose last line is the flags"
            )
        return load(state, *positional, **named)

    return load_state_dict


def misfits(model: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """What is not alike in two state dicts, for a message; empty where names and shapes are."""
    mine, theirs = ({k: v for k, v in d.items() if not k.endswith(_EXTRA)} for d in (model, state))
    other = [
        f"{name} {tuple(theirs[name].shape)} there and {tuple(mine[name].shape)} here"
        for name in mine.keys() & theirs.keys()
        if isinstance(mine[name], Tensor) and isinstance(theirs[name], Tensor)
        if mine[name].shape != theirs[name].shape
    ]
    kinds = (
        ("weights of the model are not in it", mine.keys() - theirs.keys()),
        ("of its weights have no place here", theirs.keys() - mine.keys()),
        ("have other shapes", other),
    )
    return [f"{len(names)} {what} ({_some(names)})" for what, names in kinds if names]


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (", ..." if len(listed) > SHOWN else "")
