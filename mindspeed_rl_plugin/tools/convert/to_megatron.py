"""`python -m mindspeed_rl_plugin import`: writes a Hugging Face model as a Megatron checkpoint (tracker: `release`).

python -m mindspeed_rl_plugin import --load DIR --out CKPT --train tp2,pp2
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mindspeed_rl_plugin.checkpoints.checkpoint_files import TRACKER
from mindspeed_rl_plugin.engine.hf_config import compare_configs, derive_config
from mindspeed_rl_plugin.layout.family_rows import HEAD_WEIGHT
from mindspeed_rl_plugin.layout.family_table import EXPERTS, IMPLS
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel, Segment, canonical_tensors, megatron_layout
from mindspeed_rl_plugin.layout.parallel import chunk_prefix, noop_layers
from mindspeed_rl_plugin.prompts.ends import model_tokens
from mindspeed_rl_plugin.tools.convert.arguments import flags, megatron_arguments
from mindspeed_rl_plugin.tools.convert.checkpoint import MODEL_FILE, rank_folders
from mindspeed_rl_plugin.tools.convert.cli import FLAG_DTYPES, make_parser, run
from mindspeed_rl_plugin.tools.convert.files import open_tensors
from mindspeed_rl_plugin.tools.layout_args import TRAIN, check_train, parse_sizes, read_config, shape_of, train_layout
from mindspeed_rl_plugin.weights.live import LISTED_DIFFERENCES, differences, raise_if

# Tensors that are left out: layers for multi-token prediction, whose numbers are the highest; rotary frequencies.
_LAYER, _FREQUENCIES = re.compile(r"model\.layers\.(\d+)\."), "rotary_emb.inv_freq"
_MTP = "model.layers.{}.eh_proj.weight"  # every layer for multi-token prediction has this tensor, and no other layer


def main(argv: list[str]) -> int:
    """Run `import`. Returns 0, or 1 with a message."""
    parser = make_parser("import", "directory of a Hugging Face model", "Megatron checkpoint of weights, iteration 0")
    sizes = "trainer's layout, such as tp2,pp2: tp pp vpp cp ep etp, and first, last (layers of the first, last stage)"
    parser.add_argument("--train", required=True, help=sizes)
    parser.add_argument("--noop-layers", metavar="61,62", help="numbers of layers that do nothing, as in MindSpeed")
    folded = "two model chunks on each pipeline stage, placed as MindSpeed's dualpipev does"
    parser.add_argument("--schedules-method", choices=("dualpipev",), help=folded)
    parser.add_argument("--impl", choices=IMPLS, default="local", help="layer specs of the run (default: local)")
    parser.add_argument("--experts", choices=EXPERTS, default="sequential", help="expert storage (default: sequential)")
    parser.add_argument("--pad", type=int, default=128, help="--make-vocab-size-divisible-by (default: 128)")
    return run(parser, argv, import_)


def import_(options: argparse.Namespace) -> str:
    """Write the Megatron checkpoint; returns what was done, and the flags to load it with. Raises ValueError."""
    flag = f"--load {options.load}"
    config = read_config(options.load / "config.json", flag)
    parallel = _layout(options.train, bool(options.schedules_method))
    shape = shape_of(config, options.pad * parallel.tp, flag)
    parallel = replace(parallel, noop=_noop_layers(options.noop_layers, shape.layers))
    check_train(shape, parallel, f"--train {options.train}")
    args = megatron_arguments(shape, parallel, config)
    args.hf_tokens = model_tokens(options.load)
    wrong = compare_configs(derive_config(args, vocab_size=config["vocab_size"]), config)
    raise_if(wrong, "Megatron's arguments cannot express the model of config.json")
    source = open_tensors(options.load)
    extra = _left_out(source, shape, config.get(shape.table.hf.mtp) or 0)
    notes = [f"note: left out: {name}" for name in extra]
    if shape.groups % parallel.tp:
        notes.append(
            f"note: {shape.groups} query groups are fewer than tp{parallel.tp}: Megatron core 0.12 and MindSpeed "
            f"do not accept this (tp is at most {shape.groups}); core 0.16 and later do"
        )
    count = _write(shape, parallel, source, args, options)
    done = f"imported {options.load} to {options.out}, files: {count}; load it with"
    return "\n".join([*notes, done, shlex.join(flags(args))])


def _layout(text: str, folded: bool) -> Parallel:
    """Layout with the smallest possible number of ranks. folded: place layers as MindSpeed's dualpipev does."""
    if dp := re.search(r"\bdp\d+", text):
        raise ValueError(f"--train {text}: leave {dp[0]} out; data parallel ranks load the same files")
    sizes = parse_sizes(text, TRAIN, "--train")
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    layout = train_layout(text, pp * math.lcm(tp * sizes.get("cp", 1), sizes.get("etp", tp) * sizes.get("ep", 1)))
    if not folded:
        return layout
    if pp == 1 or {"vpp", "first", "last"} & sizes.keys():
        raise ValueError(
            f"--train {text}: --schedules-method dualpipev needs pp of at least 2, and no vpp, first or last"
        )
    return replace(layout, vpp=2, folded=True)


def _noop_layers(text: str | None, layers: int) -> tuple[int, ...]:
    """Numbers of the noop layers in `text`. layers: number of the model's layers without them."""
    given = len(set(text.split(","))) if text else 0
    return noop_layers(argparse.Namespace(noop_layers=text, num_layers=layers + given))


def _left_out(source: Mapping[str, Any], shape: ModelShape, mtp: int) -> list[str]:
    """Tensors in the files that are left out, since they do not change the model. mtp: number of layers for multi-token
    prediction in config.json. Raises ValueError if weights are quantised, or if the other tensors are not those of
    the model: in names, shapes, or the values of a tied head."""
    if quantised := [name for name in source if name.endswith(("_scale_inv", "_scale", "qweight"))]:
        raise ValueError(f"the weights are quantised ({quantised[0]}); convert them to bf16 first")
    expected = {name: tensor.shape for name, tensor in canonical_tensors(shape).items()}
    wrong = differences(expected, {n: tuple(source[n].get_shape()) for n in source.keys() & expected.keys()})
    extra, ahead, embedding = [], Counter(), shape.table.embedding
    for name in sorted(source.keys() - expected.keys()):
        match = _LAYER.match(name)
        layer = int(match[1]) if match else -1
        if name.endswith(_FREQUENCIES):
            extra.append(name)
        elif shape.layers <= layer < shape.layers + mtp and _MTP.format(layer) in source:
            ahead[layer] += 1
        elif layer >= shape.layers:
            declared = f", and {field} is {mtp}" if (field := shape.table.hf.mtp) else ""
            has = f"num_hidden_layers is {shape.layers}{declared}"
            wrong.append(f"{name} belongs to no layer of config.json: {has}")
        elif name != HEAD_WEIGHT or not shape.tied or embedding not in source:
            wrong.append(f"{name} does not belong to this model")
        elif _same(source, embedding, shape.vocab):
            extra.append(f"{name}, a copy of {embedding}")
        else:
            wrong.append(f"{HEAD_WEIGHT} and {embedding} differ, though config.json has tie_word_embeddings")
    raise_if(wrong, "the files do not hold the model of config.json")
    if len(extra) > LISTED_DIFFERENCES:
        extra[LISTED_DIFFERENCES:] = [f"{len(extra) - LISTED_DIFFERENCES} more tensors"]
    return extra + [f"model.layers.{n}, a layer for multi-token prediction: {ahead[n]} tensors" for n in sorted(ahead)]


def _same(source: Mapping[str, Any], embedding: str, vocab: int) -> bool:
    head, repeated = (source[name][:vocab] for name in (HEAD_WEIGHT, embedding))
    return head.dtype == repeated.dtype and torch.equal(head, repeated)


def _write(
    shape: ModelShape,
    parallel: Parallel,
    source: Mapping[str, Any],
    args: argparse.Namespace,
    options: argparse.Namespace,
) -> int:
    """Write a checkpoint that Megatron loads as a release: only weights, iteration 0, zeros in padding rows of the
    vocabulary. The tracker file is written last. Returns the number of files without it."""
    tensors, given = canonical_tensors(shape), FLAG_DTYPES.get(options.dtype)

    def stored(segments: Sequence[Segment], size: torch.Size) -> torch.Tensor:
        name = segments[0].name if segments else next(iter(tensors))
        dtype = torch.float32 if segments and tensors[name].wide else given or source[name][:1].dtype
        param = torch.zeros(size, dtype=dtype)
        for s in segments:
            at = (slice(None),) * s.axis + (slice(s.start, s.start + s.size),)
            s.view(param, s.start, s.size).copy_(source[s.name][at])
        return param

    folders = rank_folders(shape, parallel)
    for folder, rank in folders.items():
        layout = megatron_layout(shape, parallel, rank, options.impl, options.experts)
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
        for i in range(parallel.vpp):
            prefix = chunk_prefix(i, parallel.vpp)
            names = [name for name in layout if name.startswith(prefix)]
            chunk = {name.removeprefix(prefix): stored(layout[name], layout.shapes[name]) for name in names}
            state[f"model{i}" if parallel.vpp > 1 else "model"] = chunk
        path = options.out / "release" / folder / MODEL_FILE
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (options.out / TRACKER).write_text("release")
    return len(folders)
