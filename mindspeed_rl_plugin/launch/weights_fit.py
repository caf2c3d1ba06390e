"""Refuses weights that do not fit the model, while Megatron loads them.

If a strict load fails, Megatron (core 0.16 and later) loads the parameters that fit and continues. (This is
`load_model_state_dict` of megatron/training/checkpointing.py, made for extra states of TransformerEngine.) Other layers
in the file would be ignored, and layers that are missing in the file would keep their initial values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.weights.live import differences, mtp_only, raise_if, sizes_of
from mindspeed_rl_plugin.weights.storages import unwrap

_EXTRA = "_extra_state"  # of TransformerEngine; present only in some versions
_MEND = (
    "give the sizes and the layout with which it was saved (tensor, pipeline and expert parallel sizes, layers of each "
    "stage, padding of the vocabulary), or convert it to this layout: `python -m mindspeed_rl_plugin export`, then "
    "`import`, which prints the flags in its last line"
)


@contextmanager
def must_fit(chunks: Sequence[torch.nn.Module], where: str, free: str = _EXTRA) -> Iterator[None]:
    """Within the context, `load_state_dict` of these chunks raises ValueError if names or sizes are not the model's.

    ValueError is also raised instead of Megatron's exit with status 0 for an unreadable file, and instead of its error
    for a distributed checkpoint of another model. where: names what is loaded, in messages; free: suffix of names that
    need not fit, in addition to extra states.
    """
    # Core 0.12 loads into the model itself, later versions into its wrapper.
    modules = list({id(module): module for chunk in chunks for module in (chunk, unwrap(chunk))}.values())
    for module in modules:
        module.load_state_dict = _checked(module, where, (_EXTRA, free))
    try:
        yield
    except SystemExit:
        raise ValueError(
            f"Megatron could not load {where} (the reason is on standard output); give the layout of the saved model"
        ) from None
    except _of_distributed_files() as error:
        raise ValueError(f"Megatron could not load {where}: {error}; {_MEND}") from error
    finally:
        for module in modules:
            del module.load_state_dict


def _checked(chunk: torch.nn.Module, where: str, free: tuple[str, ...]) -> Any:
    load, model = chunk.load_state_dict, unwrap(chunk)
    # With dualpipev MTP layers share the embedding of their stage, but files of pretraining have it twice.
    again = mtp_only(getattr(model, "mtp", None) is not None, getattr(model, "pre_process", True))[1:]

    def tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: t for name, t in state.items() if isinstance(t, Tensor) and not name.endswith(free)}

    def load_state_dict(state: Mapping[str, Any], *positional: Any, **named: Any) -> Any:
        expected = sizes_of(tensors(chunk.state_dict()))
        saved = {name: t for name, t in tensors(state).items() if name in expected or not name.startswith(again)}
        raise_if(
            differences(expected, sizes_of(saved)),
            f"{where} does not fit the model that the arguments describe: {_MEND}",
        )
        return load(state, *positional, **named)

    return load_state_dict


def _of_distributed_files() -> type[BaseException] | tuple[()]:
    """Megatron's error class of distributed checkpoints, if its module is imported."""
    return getattr(sys.modules.get("megatron.core.dist_checkpointing.core"), "CheckpointingException", ())
