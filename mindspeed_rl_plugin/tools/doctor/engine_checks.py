"""The checks of the engine alone: one process builds an engine for each small model, and compares what it answers with
transformers.

    torchrun --standalone --nproc-per-node 1 -m mindspeed_rl_plugin.tools.doctor.engine_checks REPORT DTYPE
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.rollout_engine import generate
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.host import activate_if_needed
from mindspeed_rl_plugin.layout.layout import EngineParallel, engine_layout
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling
from mindspeed_rl_plugin.tools.doctor.result import NOT_RUN, Report, Result, result
from mindspeed_rl_plugin.tools.doctor.small_models import (
    CONTEXT,
    MODELS,
    Judge,
    config_of,
    random_weights,
    shape_of_model,
    write_model,
)
from mindspeed_rl_plugin.weights.live import engine_storage

PART = "engine"
# Largest difference of a log-prob from transformers' [nats], by dtype.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
BUILT = "answers of an engine that loads the weights"
SAMPLED = "log-probs of sampled tokens"
FREED = "memory that sleep frees"
WOKEN = "tensors after waking"
WRITTEN = "weights that were written"
LATENT = "tensors derived from weights"
AGAIN = "answers after sleep, waking and writing"
NEW = "answers of new weights"
PREFIX = "cached prefixes after new weights"
BETWEEN = "weights that change between two steps"
# check -> checks whose failure explains its failure
CAUSES = {
    SAMPLED: (BUILT,),
    WRITTEN: (WOKEN,),
    AGAIN: (BUILT, WOKEN, WRITTEN, LATENT),
    NEW: (BUILT, WOKEN, WRITTEN, LATENT),
    PREFIX: (BUILT, WOKEN, WRITTEN, LATENT, NEW),
    BETWEEN: (BUILT, WOKEN, WRITTEN, LATENT, NEW),
}
_TOKENS, _LONG, _DEADLINE = 12, 160, 120.0
_PROMPTS = [tuple(range(5, 5 + n)) for n in (7, 33, _LONG)]
_OTHER = tuple(range(900, 900 + _LONG))


def check_engine(name: str, dtype: torch.dtype, scratch: Path) -> Iterator[Result | str]:
    """The results of one model; before a check its name, so that a check that hangs or crashes is known. scratch: an
    empty folder."""
    weights = [random_weights(name, seed, dtype) for seed in (0, 1)]
    for at, one in zip(folders := [scratch / "0", scratch / "1"], weights, strict=True):
        at.mkdir(parents=True)
        write_model(name, one, at)
    judges = [Judge(at) for at in folders]
    limit, text = LIMITS[dtype], f"at most {LIMITS[dtype]:g} nats from transformers'"

    def compared(check: str, done: Sequence[Completion], judge: Judge, fix: str, **sampling: float) -> Result:
        far = max(_difference(judge, c, **sampling) for c in done)
        return result(PART, check, far <= limit, f"{far:.2g} nats", text, fix, name)

    yield "build"
    began = time.monotonic()
    options = {"max_model_len": CONTEXT, "max_running": 8, "kv_cache_bytes": 64 << 20, "deadline": _DEADLINE}
    engine = VllmEngine(
        VllmOptions(config_of(name), dtype=str(dtype).removeprefix("torch."), weights=str(folders[0]), **options)
    )
    yield result(PART, "build", True, f"{time.monotonic() - began:.0f} s", "", "", name)
    yield _graphs(engine, name)
    yield BUILT
    engine.update_weights(0)
    first = _ask(engine, _PROMPTS)
    yield compared(BUILT, first, judges[0], "vLLM computes another model than transformers: install a pair of versions "
                   "that README names, and compare the attention and expert kernels that vLLM's log names")  # fmt: skip
    yield SAMPLED
    sampled = _ask(engine, _PROMPTS, temperature=0.7, top_p=0.9)
    yield compared(SAMPLED, sampled, judges[0], "the sampler does not report the log-probs of the distribution from "
                   "which it samples: install a vLLM (vllm-ascend) whose sampler has logprobs_mode", temperature=0.7,
                   top_p=0.9)  # fmt: skip
    yield WOKEN
    before = {n: (p.shape, p.stride()) for n, p in engine.parameters().items()}
    held = _bytes(engine)
    engine.sleep()
    yield _freed(engine, held, name)
    engine.wake(("weights",))
    now = {n: (p.shape, p.stride()) for n, p in engine.parameters().items()}
    yield _first(WOKEN, before, now, "waking replaces tensors of the model: install a vllm-ascend that README names", name)
    yield WRITTEN
    yield from _write(engine, name, weights[0])
    engine.update_weights(0)
    engine.wake(("kv_cache",))
    yield AGAIN
    again = _ask(engine, _PROMPTS)
    far = max(abs(a - b) for x, y in zip(first, again, strict=True) for a, b in zip(x.logps, y.logps, strict=False))
    same = far <= limit / 100 and [c.tokens for c in first] == [c.tokens for c in again]
    fix = "state of the engine is lost in its sleep: report this with --out, and train with --rl-schedule async until then"
    yield result(PART, AGAIN, same, f"{far:.2g} nats", "the tokens and log-probs of before", fix, name)
    yield BETWEEN
    engine.submit(_requests([_PROMPTS[0]], tokens=2 * _TOKENS))
    for _ in range(4):
        engine.poll(0)
    yield from (r for r in _write(engine, name, weights[1]) if r.verdict != "pass")
    engine.update_weights(1, in_flight=True)
    (going,) = engine.poll(_DEADLINE)
    yield LATENT
    yield _latent(engine, name)
    yield NEW
    fresh = _ask(engine, [_OTHER])
    yield compared(NEW, fresh, judges[1], "the engine computes with something that follows from the weights and that a "
                   "write does not change: report this with --out", )  # fmt: skip
    yield PREFIX
    prefixed = _ask(engine, _PROMPTS)
    yield compared(PREFIX, prefixed, judges[1], "the engine serves a prefix that older weights computed: install a vLLM "
                   "that honours cache_salt (0.9 and newer)")  # fmt: skip
    yield _between(going, judges, limit, name)
    engine.shutdown()


def _requests(prompts: Sequence[tuple[int, ...]], tokens: int = _TOKENS, **sampling: float) -> list[GenerateRequest]:
    shared = Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    return [GenerateRequest(SampleId(0, i, len(p)), p, shared, 2**60 + i) for i, p in enumerate(prompts)]


def _ask(engine: VllmEngine, prompts: Sequence[tuple[int, ...]], **sampling: float) -> list[Completion]:
    done = generate(engine, _requests(prompts, **sampling), deadline=_DEADLINE)
    return [Completion(**{**vars(c), "prompt": p}) for c, p in zip(done, prompts, strict=True)]


def _difference(judge: Judge, done: Completion, temperature: float = 1.0, top_p: float = 1.0) -> float:
    """Largest difference between the log-probs of a response and those of transformers' model."""
    logits = judge.logits([*done.prompt, *done.tokens[:-1]])[len(done.prompt) - 1 :] / temperature
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    outside = (probs.cumsum(-1) - probs >= top_p).gather(-1, order.argsort(-1))
    logps = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    theirs = logps.gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
    return float((theirs - torch.tensor(done.logps)).abs().max())


def _between(done: Completion, judges: Sequence[Judge], limit: float, name: str) -> Result:
    """A response whose weights changed in its middle. With latent attention transformers caches other tensors than the
    engine, so only the parts are compared."""
    from transformers import DynamicCache

    parts, fix = [version for _, version in done.segments], "report this with --out, and use --rl-schedule sync until then"
    at = done.segments[-1][0]
    if parts != [0, 1] or not 0 < at < len(done.tokens):
        return result(PART, BETWEEN, False, f"parts {done.segments}", "a part of the old and one of the new weights", fix, name)
    if "kv_lora_rank" in MODELS[name]:
        return result(PART, BETWEEN, True, f"new from token {at} on", "a part of the old and one of the new weights", fix, name)
    cache, tokens = DynamicCache(), [*_PROMPTS[0], *done.tokens]
    old = judges[0].logits(tokens[: len(_PROMPTS[0]) + at - 1], cache)[len(_PROMPTS[0]) - 1 :]
    new = [judges[1].logits([t], cache) for t in tokens[len(_PROMPTS[0]) + at - 1 : -1]]
    logps = torch.cat([old, *new]).log_softmax(-1).gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
    far = float((logps - torch.tensor(done.logps)).abs().max())
    return result(PART, BETWEEN, far <= limit, f"{far:.2g} nats", f"at most {limit:g} nats from transformers'", fix, name)


def _write(engine: VllmEngine, name: str, weights: Mapping[str, Tensor]) -> Iterator[Result]:
    """Write all weights as the reshard does, through views of the live tensors, and read them back."""
    live = engine.parameters()
    shape = shape_of_model(name)
    try:
        layout = engine_layout(shape, engine_storage(shape, EngineParallel(1, 1), 0, live), 0)
    except ValueError as error:
        yield result(PART, WRITTEN, False, str(error), "the tensors that README's versions have", "install one of them", name)
        return
    wrong = ""
    for read in (False, True):
        for parameter, segments in layout.items():
            for s in segments:
                part = s.view(live[parameter].data, s.start, s.size)
                values = weights[s.name].narrow(s.axis, s.start, s.size).to(part)
                if not read:
                    part.copy_(values)
                elif not torch.equal(part, values):
                    wrong = wrong or f"{parameter} ({s.name})"
    figure = wrong or f"{sum(map(len, layout.values()))} pieces"
    yield result(PART, WRITTEN, not wrong, figure, "each piece reads as it was written", "report this with --out", name)


def _latent(engine: VllmEngine, name: str) -> Result:
    pairs = vllm_api.latent_parts(engine._worker)
    if not pairs:
        return Result(PART, LATENT, NOT_RUN, "the model has none", where=name)
    wrong = sum(not torch.equal(one, by_weights) for one, by_weights in pairs)
    fix = "decoding uses tensors of older weights: install a vllm-ascend that README names"
    return result(PART, LATENT, not wrong, f"{wrong} of {len(pairs)} are stale", "none", fix, name)


def _graphs(engine: VllmEngine, name: str) -> Result:
    if engine._device.is_cpu:
        return Result(PART, "captured graphs", NOT_RUN, "a CPU has none", where=name)
    count = vllm_api.captured_graphs()
    fix = "decoding is several times slower without them: look for warnings of vLLM about graphs in the log"
    return result(PART, "captured graphs", count > 0, str(count), "at least 1", fix, name)


def _bytes(engine: VllmEngine) -> int:
    """Bytes in use: of weights and KV cache on a CPU, of the device elsewhere."""
    if not engine._device.is_cpu:
        return engine._device.memory.allocated()
    live = (*engine.parameters().values(), *engine._worker.model_runner.kv_caches)
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in live}.values())


def _freed(engine: VllmEngine, before: int, name: str) -> Result:
    freed, least = before - _bytes(engine), 0.9 * (64 << 20)
    fix = "the engine's sleep does not free memory: check that expandable segments are off, and README's versions"
    return result(PART, FREED, freed >= least, f"{freed / 2**20:.0f} MiB", f"at least {least / 2**20:.0f} MiB", fix, name)


def _first(check: str, before: Mapping[str, object], now: Mapping[str, object], fix: str, name: str) -> Result:
    other = [n for n in before if before[n] != now.get(n)]
    figure = f"{other[0]} has another shape or stride" if other else f"{len(before)} tensors"
    return result(PART, check, not other, figure, "shapes and strides of before", fix, name)


def main(argv: Sequence[str]) -> None:
    activate_if_needed()
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as scratch:
        for name in argv[2:] or MODELS:
            Report(argv[0]).add(check_engine(name, getattr(torch, argv[1]), Path(scratch) / name))


if __name__ == "__main__":
    main(sys.argv[1:])
