"""The checks of the engine alone: one process builds an engine for each small model, and compares what it answers with
transformers.

    torchrun --standalone --nproc-per-node 1 -m mindspeed_rl_plugin.tools.doctor.engine_checks REPORT DTYPE [MODEL ...]
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.rollout_engine import generate
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.host import activate_if_needed
from mindspeed_rl_plugin.layout.layout import EngineParallel, engine_layout
from mindspeed_rl_plugin.processes import scratch
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling
from mindspeed_rl_plugin.tools.doctor import small_models
from mindspeed_rl_plugin.tools.doctor.result import FAIL, Check, Result, ResultFile
from mindspeed_rl_plugin.weights.live import engine_storage

# Largest mean difference of log-probs [nats] by rounding, which may also give a token other experts.
LOGP_LIMITS = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.03}
_engine_check, TELL_US = partial(Check, "engine"), "report this with the file of --out"
_NATS, _INSTALL = "at most {nats:g} nats (mean)", "install versions that README names"
BUILD = _engine_check("build", "", f"the message says what vLLM lacks; {_INSTALL}")
GRAPHS = _engine_check(
    "captured graphs", "at least 1", "look for warnings about graphs in vLLM's log; decoding is slow now"
)
LOADED = _engine_check(
    "answers of an engine that loads the weights",
    f"transformers', {_NATS}",
    f"vLLM computes another model than transformers: {_INSTALL}",
)
SAMPLED = _engine_check(
    "log-probs of sampled tokens",
    f"of temperature and top-p, {_NATS}",
    "the sampler reports log-probs of another distribution than that from which it samples: install a vLLM "
    "(vllm-ascend) whose sampler has logprobs_mode",
    (LOADED,),
)
SLEEP_FREES = _engine_check(
    "memory that sleep frees",
    "at least {mib:.0f} MiB",
    "the sleep mode does not free memory: turn expandable segments off",
)
WOKEN = _engine_check(
    "tensors after waking",
    "shapes and strides of before",
    f"waking replaces the model's tensors: {_INSTALL}",
)
WRITTEN = _engine_check("weights that were written", "each piece reads as it was written", TELL_US, (WOKEN,))
DERIVED_TENSORS = _engine_check(
    "tensors derived from weights", "none is stale", f"decoding is stale: {_INSTALL}", (WRITTEN,)
)
_BEFORE_ANSWERS = (LOADED, WOKEN, WRITTEN, DERIVED_TENSORS)
NEW_WEIGHTS = _engine_check(
    "answers of new weights",
    f"transformers', {_NATS}",
    "the engine still computes with something of the older weights: " + TELL_US,
    _BEFORE_ANSWERS,
)
PREFIX = _engine_check(
    "cached prefixes after new weights",
    f"transformers', {_NATS}",
    f"prefixes that older weights computed are used: {_INSTALL}",
    (*_BEFORE_ANSWERS, NEW_WEIGHTS),
)
AFTER_SLEEP = _engine_check(
    "answers after sleep and waking",
    "tokens and log-probs of before",
    "state of the engine is lost in its sleep: train with --rl-schedule async, whose engines do not sleep",
    (*_BEFORE_ANSWERS, PREFIX),
)
IN_FLIGHT = _engine_check(
    "weights that change between two steps",
    "two parts, each transformers', {nats:g} nats (mean)",
    "use --rl-schedule sync",
    (*_BEFORE_ANSWERS, NEW_WEIGHTS),
)
ENGINE_CHECKS = (
    BUILD,
    GRAPHS,
    LOADED,
    SAMPLED,
    SLEEP_FREES,
    WOKEN,
    WRITTEN,
    DERIVED_TENSORS,
    AFTER_SLEEP,
    NEW_WEIGHTS,
    PREFIX,
    IN_FLIGHT,
)

_ASKED_TOKENS, _LONG, _DEADLINE, _CACHE = 12, 160, 120.0, 64 << 20
_ASKED = [tuple(range(5, 5 + n)) for n in (7, 33, _LONG)]
_UNSEEN = tuple(range(900, 900 + _LONG))


class EngineBench:
    """An engine of a small model, with two sets of weights and transformers' models of both. folder: an empty one."""

    def __init__(self, model: str, dtype: str, folder: Path) -> None:
        self.model, self.nats = model, LOGP_LIMITS[dtype]
        self.weights, self.judges = [], []
        for seed in (0, 1):
            (at := folder / f"{model}-{seed}").mkdir()
            self.weights.append(small_models.random_weights(model, seed, getattr(torch, dtype)))
            small_models.write_model(model, self.weights[seed], at)
            self.judges.append(small_models.Judge(at))
        options = VllmOptions(
            small_models.config_of(model),
            max_model_len=small_models.CONTEXT,
            dtype=dtype,
            max_running=8,
            kv_cache_bytes=_CACHE,
            weights=str(folder / f"{model}-0"),
            deadline=_DEADLINE,
        )
        self.engine = VllmEngine(options)

    def checks(self) -> Iterator[Result | str]:
        """The results; before a check its name, so that a check that hangs or crashes is known."""
        engine = self.engine
        if get_device().is_cpu:
            yield GRAPHS.not_run("a CPU has none", self.model)
        else:
            yield GRAPHS.result((count := vllm_api.captured_graphs()) > 0, str(count), self.model)
        yield LOADED.name
        engine.update_weights(0)
        first = self.ask(_ASKED)
        yield self.compared(LOADED, first, 0)
        yield SAMPLED.name
        sampling = {"temperature": 0.7, "top_p": 0.9}
        yield self.compared(SAMPLED, self.ask(_ASKED, **sampling), 0, **sampling)
        yield WOKEN.name
        before, held = self.forms(), self.bytes()
        engine.sleep()
        freed, least = held - self.bytes(), 0.9 * _CACHE
        yield SLEEP_FREES.result(freed >= least, f"{freed / 2**20:.0f} MiB", self.model, mib=least / 2**20)
        engine.wake(("weights",))
        now = self.forms()
        other = [n for n in before if before[n] != now.get(n)]
        figure = f"{other[0]} has another shape or stride" if other else f"{len(before)} tensors"
        yield WOKEN.result(not other, figure, self.model)
        yield WRITTEN.name
        yield (written := self.write(self.weights[0]))
        engine.update_weights(0)
        yield DERIVED_TENSORS.name
        yield self.latent()
        engine.wake(("kv_cache",))
        yield AFTER_SLEEP.name
        again = self.ask(_ASKED)
        pairs = [pair for one, two in zip(first, again, strict=True) for pair in zip(one.logps, two.logps, strict=True)]
        far = sum(abs(a - b) for a, b in pairs) / len(pairs)
        same = far <= self.nats / 100 and [c.tokens for c in first] == [c.tokens for c in again]
        yield AFTER_SLEEP.result(same, f"{far:.2g} nats", self.model)
        yield IN_FLIGHT.name
        engine.submit(_requests(_ASKED[:1], tokens=2 * _ASKED_TOKENS))
        for _ in range(4):
            engine.poll(0)
        if (again_written := self.write(self.weights[1])).verdict == FAIL != written.verdict:
            yield again_written
        engine.update_weights(1, in_flight=True)
        (going,) = engine.poll(_DEADLINE)
        yield NEW_WEIGHTS.name
        yield self.compared(NEW_WEIGHTS, self.ask([_UNSEEN]), 1)
        yield PREFIX.name
        yield self.compared(PREFIX, self.ask(_ASKED), 1)
        yield self.between(going)
        engine.shutdown()

    def ask(self, prompts: Sequence[tuple[int, ...]], **sampling: float) -> list[Completion]:
        """Responses of _ASKED_TOKENS tokens each."""
        return generate(self.engine, _requests(prompts, **sampling), deadline=_DEADLINE)

    def compared(self, check: Check, done: Sequence[Completion], judge: int, **sampling: float) -> Result:
        """Largest mean difference of a response's log-probs from those of transformers' model number `judge`."""
        far = 0.0
        for one in done:
            prompt = _UNSEEN if check is NEW_WEIGHTS else _ASKED[one.id.group]
            logits = self.judges[judge].logits([*prompt, *one.tokens[:-1]])[len(prompt) - 1 :]
            far = max(far, _difference(logits, one, **sampling))
        return check.result(far <= self.nats, f"{far:.2g} nats", self.model, nats=self.nats)

    def between(self, done: Completion) -> Result:
        """A response whose weights changed in its middle. With latent attention transformers caches other tensors than
        the engine, so only the parts are compared."""
        from transformers import DynamicCache

        at, asked = done.segments[-1][0], len(_ASKED[0])
        if [version for _, version in done.segments] != [0, 1] or not 0 < at < len(done.tokens):
            return IN_FLIGHT.result(False, f"parts {done.segments}", self.model, nats=self.nats)
        if self.engine.options.config.get("kv_lora_rank"):
            return IN_FLIGHT.result(True, f"new from token {at} on", self.model, nats=self.nats)
        cache, tokens = DynamicCache(), [*_ASKED[0], *done.tokens]
        (old, new), change = self.judges, asked + at - 1
        steps = [old.logits(tokens[:change], cache)[asked - 1 :], *(new.logits([t], cache) for t in tokens[change:-1])]
        far = _difference(torch.cat(steps), done)
        return IN_FLIGHT.result(far <= self.nats, f"{far:.2g} nats", self.model, nats=self.nats)

    def write(self, weights: Mapping[str, Tensor]) -> Result:
        """Write all weights as the reshard does, through views of the live tensors, and read them back."""
        live, shape = self.engine.parameters(), small_models.shape_of_model(self.model)
        try:
            layout = engine_layout(shape, engine_storage(shape, EngineParallel(1, 1), 0, live), 0)
        except ValueError as error:
            return WRITTEN.result(False, str(error), self.model)
        pieces = [(name, s, s.view(live[name].data, s.start, s.size)) for name, some in layout.items() for s in some]
        values = [weights[s.name].narrow(s.axis, s.start, s.size).to(part) for _, s, part in pieces]
        for (_, _, part), value in zip(pieces, values, strict=True):
            part.copy_(value)
        live = self.engine.parameters()  # again, so that a write into a copy is seen
        read = [s.view(live[name].data, s.start, s.size) for name, s, _ in pieces]
        wrong = [f"{n} ({s.name})" for (n, s, _), v, r in zip(pieces, values, read, strict=True) if not r.equal(v)]
        return WRITTEN.result(not wrong, wrong[0] if wrong else f"{len(pieces)} pieces", self.model)

    def latent(self) -> Result:
        pairs = vllm_api.latent_parts(self.engine._worker)
        wrong = sum(not one.equal(by_weights) for one, by_weights in pairs)
        figure = f"{wrong} of {len(pairs)} are stale"
        return (
            DERIVED_TENSORS.result(not wrong, figure, self.model)
            if pairs
            else DERIVED_TENSORS.not_run("it has none", self.model)
        )

    def forms(self) -> dict[str, tuple[object, ...]]:
        """Name -> shape and strides of the live weights."""
        return {name: (tuple(p.shape), p.stride()) for name, p in self.engine.parameters().items()}

    def bytes(self) -> int:
        """Bytes in use: of weights and KV cache on a CPU, of the device elsewhere."""
        if not get_device().is_cpu:
            return get_device().memory.allocated()
        live = (*self.engine.parameters().values(), *self.engine._worker.model_runner.kv_caches)
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in live}.values())


def _requests(
    prompts: Sequence[tuple[int, ...]], tokens: int = _ASKED_TOKENS, **sampling: float
) -> list[GenerateRequest]:
    shared = Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    return [GenerateRequest(SampleId(0, i, 0), p, shared, 2**60 + i) for i, p in enumerate(prompts)]


def _difference(logits: Tensor, done: Completion, temperature: float = 1.0, top_p: float = 1.0) -> float:
    """Mean difference between the log-probs of a response and those of the logits `[R, V]`, as they are sampled."""
    probs, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    outside = (probs.cumsum(-1) - probs >= top_p).gather(-1, order.argsort(-1))
    logps = (logits / temperature).masked_fill(outside, -torch.inf).log_softmax(-1)
    theirs = logps.gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
    far = (theirs - torch.tensor(done.logps)).abs()
    inside = far[theirs.isfinite()]  # rounding may move a token across the limit of top-p
    return float(inside.mean()) if len(inside) > 0.75 * len(far) else math.inf


def main(argv: Sequence[str]) -> None:
    activate_if_needed()
    dist.init_process_group("gloo")
    report, dtype, *models = argv
    with scratch("mindspeed-rl-doctor-engine") as folder:
        for model in models or small_models.SMALL_MODELS:
            ResultFile(report).add([BUILD.name])
            began = time.monotonic()
            bench = EngineBench(model, dtype, Path(folder))
            ResultFile(report).add([BUILD.result(True, f"{time.monotonic() - began:.0f} s", model)])
            ResultFile(report).add(bench.checks())


if __name__ == "__main__":
    main(sys.argv[1:])
