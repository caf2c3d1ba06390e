"""Runs a launch's entry script, and in each rollout one prompt more: through the engine and through the trainer.

    torchrun ... -m mindspeed_rl_plugin.tools.doctor.compare FOLDER [--any-flag] SCRIPT.py ARGS

The outputs after the embedding, after attention and MLP (or experts) of each layer, after the last norm, the logits
and the log-probs are compared. Each rank writes to FOLDER/parts-RANK.jsonl one line for each version of the weights.
The engine runs without captured graphs, which would hide its places. --any-flag: as in `rehearse.absent_modules`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.layout.parallel import noop_layers
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, Ragged, Rows, SampleId, Sampling
from mindspeed_rl_plugin.tools.doctor.small_models import fill_vectors
from mindspeed_rl_plugin.tools.rehearse import absent_modules

PROMPT, RESPONSE_TOKENS = tuple(range(5, 13)), 8
PARTS_FILES = "parts-"  # files of comparisons begin with it
KILLS = "DOCTOR_KILLS"  # environment variable "RANK:VERSION": this rank is killed in the transfer of this version
KILLED_FILE = "killed"  # says when a rank was killed
OWN_LAUNCH = "DOCTOR_OWN_LAUNCH"  # environment variable: the model is the user's; no checkpoint is written
# Largest difference that rounding makes, relative to the norm of a token's output, by dtype.
DTYPE_NOISE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
LOGITS, LOG_PROBS = "logits", "log-probs"
Places = dict[str, list[Tensor]]


def engine_places(model: nn.Module) -> dict[str, nn.Module]:
    """Place -> module of vLLM's model; that of the logits returns those of the tokens that are sampled."""
    inner = next(m for m in model.modules() if hasattr(m, "layers") and hasattr(m, "norm"))
    embedding = getattr(inner, "embed_tokens", None) or inner.word_embeddings
    inside = {"embedding": embedding, **_of_layers(enumerate(inner.layers)), "last norm": inner.norm}
    return {**inside, LOGITS: next(m.logits_processor for m in model.modules() if hasattr(m, "logits_processor"))}


def trainer_places(chunks: Sequence[nn.Module], noop: Sequence[int]) -> dict[str, nn.Module]:
    """Place -> module of this rank's chunks. noop: layers that do nothing; they are none of the engine's layers."""
    from mindspeed_rl_plugin.weights.storages import unwrap

    out: dict[str, nn.Module] = {}
    for chunk in map(unwrap, chunks):
        out |= {"embedding": chunk.embedding} if chunk.pre_process else {}
        out |= _of_layers(
            (at - sum(n < at for n in noop), layer) for layer in chunk.decoder.layers for at in [layer.layer_number - 1]
        )
        # MindSpeed-LLM has it in the chunk if there are layers for multi-token prediction.
        last = getattr(chunk, "final_layernorm", None) or getattr(chunk.decoder, "final_layernorm", None)
        out |= {} if last is None else {"last norm": last}
        out |= {LOGITS: chunk.output_layer} if chunk.post_process else {}
    return out


def _of_layers(layers: Any) -> dict[str, nn.Module]:
    """Attention and MLP of each layer: its children that are not norms and have parameters, in their order."""
    out = {}
    for number, layer in layers:
        named = ((name, module) for name, module in layer.named_children() if "norm" not in name)
        children = [module for _, module in named if next(module.parameters(), None) is not None]
        for what, module in zip(("attention", "MLP"), children, strict=False):
            out[f"{what} of layer {number}"] = module
    return out


@contextlib.contextmanager
def recorded(places: Mapping[str, nn.Module], rows: Callable[[str, Tensor], Tensor]) -> Iterator[Places]:
    """Within the context the outputs of the modules are collected. rows: place, output -> `[tokens, hidden]`."""
    seen: Places = {place: [] for place in places}

    def hook(place: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if (first := output[0] if isinstance(output, tuple) else output) is not None:  # logits, on other ranks
            seen[place].append(rows(place, first).detach().to("cpu", torch.float32, copy=True))  # may be overwritten

    handles = [module.register_forward_hook(functools.partial(hook, place)) for place, module in places.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def ask_engine(engine: Any) -> tuple[Completion, Places]:
    """A greedy response, and the outputs of each place `[P + R - 1, H]`; of the logits `[R, V]`."""
    from mindspeed_rl_plugin.engine import vllm_api
    from mindspeed_rl_plugin.engine.rollout_engine import generate

    engine = vars(engine).get("_engine") if hasattr(vars(engine).get("_engine"), "submit") else engine  # of one turn
    request = GenerateRequest(
        SampleId(-7, 0, 0), PROMPT, Sampling(RESPONSE_TOKENS, temperature=0.0, ignore_eos=True), 1
    )
    with recorded(engine_places(vllm_api.model(engine._worker)), lambda _, output: output) as seen:
        (done,) = generate(engine, [request], deadline=engine.options.deadline)
    whole = {}
    for place, (first, *more) in ((place, steps) for place, steps in seen.items() if steps):
        prompt = first[: 1 if place == LOGITS else len(PROMPT)]  # vLLM may pad a step, and run dummy steps afterwards
        whole[place] = [torch.cat([prompt, *(step[:1] for step in more[: RESPONSE_TOKENS - 1])])]
    return done, whole


def ask_trainer(
    chunks: Sequence[nn.Module], tokens: Sequence[int], routes: Ragged | None = None
) -> tuple[list[float], Places]:
    """Log-probs of the response and the outputs of each place, on this rank; of the logits `[R, V/tp]`. Collective.

    routes: experts of the response's tokens, if the job replays them. In a job that shares prompts the response is a
    branch of a tree, beside another response.
    """
    from megatron.training import get_args

    from mindspeed_rl_plugin.forward import collate, router_replay
    from mindspeed_rl_plugin.forward.pipeline import compute_logps
    from mindspeed_rl_plugin.loop.run import current

    settings, row = dataclasses.replace(current().inputs.forward, temperature=1.0), torch.tensor(tokens)
    before = dict(router_replay.tallies)
    count = 1 if settings.packed or settings.max_tokens else settings.micro_batch_size
    every = [row] * count + [torch.tensor([*PROMPT, *[PROMPT[0]] * RESPONSE_TOKENS])] * settings.shared
    mask = torch.tensor([0] * len(PROMPT) + [1] * RESPONSE_TOKENS, dtype=torch.uint8)
    columns = {"tokens": Ragged.from_rows(every), "loss_mask": Ragged.from_rows([mask] * len(every))}
    columns |= {} if routes is None else {"routes": routes.take([0] * len(every))}
    rows = Rows(tuple(SampleId(-7, 0, i) for i in range(len(every))), columns)
    tree = collate(rows, settings).tree
    first = torch.arange(len(tokens) - 1) if tree is None else tree.at[: len(tokens) - 1]

    def first_row(place: str, output: Tensor) -> Tensor:
        output, at = (output, first[len(PROMPT) - 1 :]) if place == LOGITS else (_complete(output), first)
        return output[at.to(output.device), 0]  # of `[S, mb, H]`

    with recorded(trainer_places(chunks, noop_layers(get_args())), first_row) as seen:
        compute_logps(chunks, [rows] * settings.rounds_of, dataclasses.replace(settings, chunk_tokens=0))
    logps = compute_logps(chunks, [rows] * settings.rounds_of, settings)
    router_replay.tallies = before  # the other response's are not its own
    return ([] if logps is None else logps[0].rows()[0][len(PROMPT) :].tolist()), seen


def _complete(output: Tensor) -> Tensor:
    """The output of all positions; with sequence parallelism each tensor parallel rank has a part of them."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.training import get_args

    return gather_from_sequence_parallel_region(output) if get_args().sequence_parallel else output


def parts(
    engine: Places, trainer: Places, logps: tuple[Sequence[float], ...], noise: float, equal: int, tp: int = 0
) -> dict[str, Any]:
    """Place -> difference that a quarter of the tokens exceeds (rounding gives single tokens other experts), and the
    first place where it is larger than the noise, with its first token. equal: number of response tokens, from the
    first on, that trainer and engine have in common; what follows them is not compared. tp: number of this rank among
    those that divide the trainer's logits; those of the engine are complete, or only another rank has them."""
    count, logps = len(PROMPT) + equal, (logps[0][:equal], logps[1][:equal])
    far, first = {}, None
    for place, (ours, *_) in ((place, outputs) for place, outputs in trainer.items() if place in engine):
        before, theirs = 0, engine[place][0]
        if place == LOGITS:
            before, theirs = len(PROMPT) - 1, theirs[:, tp * ours.shape[1] :]
            width = min(ours.shape[1], theirs.shape[1])  # the rest is padding
            ours, theirs = ours[:, :width], theirs[:, :width]
        ours, theirs = ours[: count - before], theirs[: count - before]
        each = ((ours - theirs).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-6)).nan_to_num(torch.inf)
        far[place] = _upper_quartile(each)
        if first is None and far[place] > noise:
            first = {"place": place, "token": before + int((each > noise).nonzero()[0, 0])}
    if logps[1]:
        far[LOG_PROBS] = _upper_quartile((torch.tensor(logps[0]) - torch.tensor(logps[1])).abs())
        if first is None and not far[LOG_PROBS] <= noise:
            first = {"place": LOG_PROBS, "token": len(PROMPT)}
    return {"far": far, "first": first}


def _upper_quartile(values: Tensor) -> float:
    return float(values.sort().values[3 * len(values) // 4])  # NaN comes last


def depth(place: str) -> float:
    """A number by which places are ordered as the model computes them."""
    what, _, layer = place.partition(" of layer ")
    others = {"embedding": -1.0, "last norm": 1e6, LOGITS: 2e6, LOG_PROBS: 3e6}
    return int(layer) + (what == "MLP") / 2 if layer else others[place]


def attach(folder: Path, colocation: ModuleType) -> None:
    """From now on each rollout of this process is compared."""
    from megatron.core import parallel_state

    from mindspeed_rl_plugin.engine import vllm_engine
    from mindspeed_rl_plugin.weights import p2p

    arguments, original = vllm_engine.engine_arguments, colocation.Colocation.awake

    def kill(when: str) -> None:
        (folder / KILLED_FILE).write_text(when)
        os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def awake(self: Any, version: int) -> Iterator[Any]:
        killed = os.environ.get(KILLS) == f"{dist.get_rank()}:{version}"
        if killed:
            p2p.P2PChannel.post = lambda *a, post=p2p.P2PChannel.post: (post(*a), kill("with messages on their way"))
        with original(self, version) as moved:
            if killed:
                kill("after a transfer without messages")
            done, engine = ask_engine(self.engine)
            yield moved
        self.onload()
        box = [done.tokens, done.columns.get("routes")]
        dist.broadcast_object_list(box, src=0)
        logps, trainer = ask_trainer(self.model, [*PROMPT, *box[0]], box[1])
        pairs = enumerate(zip(box[0], done.tokens, strict=True))
        equal = next((i for i, (a, b) in pairs if a != b), len(done.tokens))
        noise = DTYPE_NOISE[self.resharder.dtype]
        trainer, tp = {p: o for p, o in trainer.items() if o}, parallel_state.get_tensor_model_parallel_rank()
        line = parts(engine, trainer, (done.logps, logps), noise, equal, tp)
        with open(folder / f"{PARTS_FILES}{dist.get_rank()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"version": version, "noise": noise, **line}) + "\n")

    colocation.Colocation.awake = awake
    vllm_engine.engine_arguments = lambda *a: arguments(*a) | {"enforce_eager": True}


def change_launch(launch: ModuleType) -> None:
    """Save nothing in the user's own launch; in a small job begin with random values in all tensors."""
    from mindspeed_rl_plugin.launch.megatron_setup import on_each_chunk

    original = launch.setup_model_and_optimizer

    def filled(args: Any, setup: Callable[..., Any], positional: tuple, named: Mapping[str, Any]) -> Any:
        call = on_each_chunk(setup, positional, named, fill_vectors)
        return original(args, setup, call.args, call.kwargs)

    if OWN_LAUNCH in os.environ:
        launch.save_checkpoint = lambda *args, **kwargs: None
    else:
        launch.setup_model_and_optimizer = filled


def main(argv: Sequence[str]) -> None:
    from mindspeed_rl_plugin.host.on_import import after_import

    after_import("mindspeed_rl_plugin.loop.colocation", functools.partial(attach, Path(argv[0])))
    after_import("mindspeed_rl_plugin.launch.launch", change_launch)
    if get_device().is_cpu:  # which lacks modules of MindSpeed
        return absent_modules.main(argv[1:])
    sys.argv = ["mindspeed_rl_plugin", *argv[1:]]
    runpy.run_module("mindspeed_rl_plugin", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
