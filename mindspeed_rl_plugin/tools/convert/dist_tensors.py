"""The tensors of a checkpoint of `--ckpt-format torch_dist`, as one rank that holds the whole model would store them.

Its entries are whole: [gate; up], query groups one after the other, the embedding with its padding. Sources, alike in
core 0.12.1, 0.16.1 and 0.19: sharded_state_dict of transformer_block.py, mlp.py and moe/experts.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from mindspeed_rl_plugin.launch.dist_files import DistFiles, Stored
from mindspeed_rl_plugin.reshard.live import table_name

_LAYERS, _EXPERTS = "decoder.layers.", ".mlp.experts.experts."
_NUMBERED = re.compile(re.escape(_LAYERS) + r"\d+\.")
# Names that norms have there in every implementation -> those of the plain one.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
    "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
}
_OTHER_STATE = ("optimizer.", "mtp.")


def whole_model(files: DistFiles) -> dict[str, Stored]:
    """Parameter name of the plain implementation, with experts one by one -> tensor, which is read when it is used."""
    return dict(_each(files))


def _each(files: DistFiles) -> Iterator[tuple[str, Stored]]:
    for name, (size, dtype) in files.tensors().items():
        if name.startswith(_OTHER_STATE):
            continue
        layered = name.startswith(_LAYERS) and not _NUMBERED.match(name)
        leading = layered + (_EXPERTS in name)  # an axis of layers, one of experts
        for at in product(*map(range, size[:leading])):
            box = tuple((i, i + 1) for i in at) + tuple((0, n) for n in size[leading:])
            yield _plain(name, list(at), layered), Stored(files, name, box, size[leading:], dtype)


def _plain(name: str, at: list[int], layered: bool) -> str:
    if layered:
        name = f"{_LAYERS}{at.pop(0)}.{name.removeprefix(_LAYERS)}"
    if _EXPERTS in name:
        name = name.replace(_EXPERTS, f".mlp.experts.local_experts.{at.pop(0)}.")
    for fused, plain in _NORMS.items():
        name = name.replace(fused, plain)
    return table_name(name)
