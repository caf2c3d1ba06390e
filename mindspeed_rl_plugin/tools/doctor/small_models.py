"""The models of `doctor`, each a set of Megatron's flags: three of its own, and that of the launch script made small;
their random weights, and their log-probs by transformers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mindspeed_rl_plugin.checks.unsupported_models import unbuilt_family
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.engine.engine_sizes import cpu_problems
from mindspeed_rl_plugin.engine.hf_config import derive_config, for_engine, write_config
from mindspeed_rl_plugin.layout.layout import ModelShape, canonical_tensors
from mindspeed_rl_plugin.tools.plan.script_args import namespace
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.rehearse.shrink import VOCABULARY, shrink

CONTEXT = 256  # tokens
YOURS = "your model"  # the model of the launch script, with two layers
_ALL_SMALL = """
    --ffn-hidden-size 256 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --position-embedding-type rope --make-vocab-size-divisible-by 1
"""
_FEWER_KEYS = "--group-query-attention --num-query-groups 2 --kv-channels 32"
_SMALL_EXPERTS = """
    --untie-embeddings-and-output-weights --num-experts 4 --moe-layer-freq [0]+[1] --moe-ffn-hidden-size 64
    --moe-shared-expert-intermediate-size 64 --moe-router-topk 2 --moe-router-load-balancing-type none
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall
    --sequence-parallel
"""
# name -> flags: a tied head and norms of queries and keys (Qwen3); experts with a router bias, partly rotated heads
# (GLM-4.5 Air); latent attention with YaRN (DeepSeek-V3). `shrink` adds the other sizes.
SMALL_MODELS = {
    "dense": f"{_ALL_SMALL} {_FEWER_KEYS} --qk-layernorm",
    "experts": f"{_ALL_SMALL} {_SMALL_EXPERTS} {_FEWER_KEYS} --add-qkv-bias --rotary-percent 0.5 "
    "--moe-router-topk-scaling-factor 1.5",
    "latent attention": f"{_ALL_SMALL} {_SMALL_EXPERTS} --multi-latent-attention --qk-layernorm --q-lora-rank 24 "
    "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128 "
    "--rotary-scaling-factor 4 --mscale 1 --mscale-all-dim 1 --moe-router-topk-scaling-factor 2.5",
}
# The same models in MindSpeed-LLM, which has layers and flags of its own.
_THEIR_SPEC = "--spec mindspeed_llm.tasks.models.spec.{}_spec layer_spec"
_FIRST_IS_DENSE = "--first-k-dense-replace 1 --moe-layer-freq 1 --n-shared-experts 1 --norm-topk-prob"
IN_MINDSPEED_LLM = {
    "dense": _THEIR_SPEC.format("qwen3"),
    "experts": _FIRST_IS_DENSE,
    "latent attention": f"{_THEIR_SPEC.format('deepseek')} {_FIRST_IS_DENSE} --beta-fast 32 --beta-slow 1 "
    "--rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-mscale 1 --rope-scaling-mscale-all-dim 1 "
    "--rope-scaling-original-max-position-embeddings 4096",
}
# Flags of the launch script's model, which the other models do not have.
_MODEL_FLAGS_GIVEN = """
    --add-qkv-bias --group-query-attention --num-query-groups --kv-channels --qk-* --v-head-dim --*-lora-rank --mla-*
    --multi-latent-attention --*-rope-head-dim --rope-* --rotary-* --use-rope-scaling --partial-rotary-factor --mscale*
    --beta-* --*-freq-factor --original-max-position-embeddings --untie-embeddings-and-output-weights --num-experts
    --moe-* --first-k-dense-replace --n-shared-experts --shared-expert-gate* --norm-topk-prob --mtp-* --spec
    --noop-layers --padded-vocab-size --vocab-size --gemm-gradient-accumulation-fusion
"""
# Axis -> its parallel sizes. Megatron's replicas of experts only stay equal if the first one is above 1.
_SIZES_OF = {"tp": ("tensor-model",), "pp": ("pipeline-model",), "ep": ("expert-model", "expert-tensor")}


def axes_of(given: Flags) -> tuple[str, ...]:
    """The axes by which a launch divides its model, ("dp",) if there is none."""
    return tuple(a for a, (size, *_) in _SIZES_OF.items() if given.number(f"--{size}-parallel-size", 1) > 1) or ("dp",)


def small_flags(given: Flags, model: str, axis: str, ranks: int) -> Flags:
    """The flags of a launch with a small model, divided over `ranks` ranks by one axis, "dp" for none. On a host your
    model has the sizes of a rehearsal, on an accelerator all sizes of one layer but the number of experts."""
    flags, sizes = Flags(dict(given.values)), _SIZES_OF.get(axis, ())
    for size in ("context", *chain(*_SIZES_OF.values())):
        if model != YOURS or size not in sizes:
            flags.apply("", f"--{size}-parallel-size")
    if model != YOURS:
        flags.apply("", f"{_MODEL_FLAGS_GIVEN} --rl-generate-*")
        divided = f" --{sizes[0]}-parallel-size {ranks}" if sizes else ""
        engines = f" --rl-generate-tp {ranks} --rl-generate-ep {ranks}" if axis == "ep" else ""
        flags = Flags(flags.values | Flags.parse((SMALL_MODELS[model] + divided + engines).split()).values)
    shrink(flags, ranks, widths=model != YOURS or get_device().is_cpu)
    flags.set("--init-method-std", flags.number("--hidden-size", 0) ** -0.5, why="")  # so that each tensor matters
    return flags


def config_of(flags: Flags) -> dict[str, Any]:
    """config.json of the model of these flags. Raises ValueError if the engine has no such model."""
    args = namespace(flags)
    if problem := unbuilt_family(args):
        raise ValueError(problem)
    args.max_position_embeddings = CONTEXT
    config = derive_config(args, vocab_size=VOCABULARY)
    if get_device().is_cpu and (problem := next(cpu_problems(ModelShape.from_hf_config(config)), None)):
        raise ValueError(problem)
    return config


def models_of(arguments: Sequence[str]) -> tuple[dict[str, dict[str, Any]], str]:
    """Name -> config.json of the models that are checked, and why your model is not one of them. arguments: of the
    launch; (): there is none."""
    given = Flags.parse(arguments)
    out = {name: config_of(small_flags(given, name, "dp", 1)) for name in SMALL_MODELS}
    if not arguments:
        return out, ""
    try:
        return out | {YOURS: config_of(small_flags(given, YOURS, "dp", 1))}, ""
    except ValueError as error:
        return out, str(error)


def random_weights(config: Mapping[str, Any], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Hugging Face's name -> random tensor. The values are large enough that each tensor matters for the log-probs, and
    all tensors differ between two seeds."""
    generator, out = torch.Generator().manual_seed(seed), {}
    for tensor, canonical in canonical_tensors(ModelShape.from_hf_config(config)).items():
        noise = torch.randn(canonical.shape, generator=generator)
        scale = canonical.shape[-1] ** -0.5 * (2 if "embed" in tensor or "lm_head" in tensor else 1)
        values = noise * scale if noise.dim() == 2 else _of_vector(tensor, noise)
        out[tensor] = values.to(torch.float32 if canonical.wide else dtype)
    return out


def _of_vector(name: str, noise: Tensor) -> Tensor:
    return 1 + 0.2 * noise if "norm" in name else 0.3 * noise


def fill_vectors(chunk: nn.Module) -> nn.Module:
    """Random values for norms and biases of a chunk of Megatron's model, which it begins as ones and zeros; equal on
    all ranks that have the same tensor. Returns the chunk."""
    biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("bias"))
    for name, tensor in (*chunk.named_parameters(), *biases):
        if tensor.dim() == 1:
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            tensor.data.copy_(_of_vector(name, noise))
    return chunk


def write_model(config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write config.json and model.safetensors into an existing folder."""
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    write_config({**config, "torch_dtype": dtype}, folder)
    save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})


def unknown(config: Mapping[str, Any]) -> str:
    """Why this model cannot be checked by the installed vLLM and transformers; "" if it can."""
    import transformers

    made = for_engine(config)
    (built,) = made["architectures"]
    if made["model_type"] not in transformers.CONFIG_MAPPING:
        return f"transformers {transformers.__version__} has no {made['model_type']}"
    return "" if built in vllm_api.architectures() else f"this vLLM has no {built}"


class Judge:
    """transformers' model of the files in a folder, in float32 on the host: neither the engine nor the trainer."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()

        config = for_engine(json.loads((folder / "config.json").read_text()))
        kind = config["model_type"]
        given = {**config, "torch_dtype": "float32"}  # the keyword of `from_pretrained` differs between versions
        read = AutoConfig.for_model(kind, **{k: v for k, v in given.items() if k != "model_type"})
        self.model = AutoModelForCausalLM.from_pretrained(folder, config=read).float().eval()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], cache: Any = None) -> Tensor:
        """`[L, V]` float32. cache: of the tokens before, which is extended; None: there are none."""
        more = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        return self.model(torch.tensor(tokens)[None], **more).logits[0].float()
