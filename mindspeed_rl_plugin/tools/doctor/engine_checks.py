"""The checks of the engine alone: an engine of each small model, whose answers are compared with transformers'."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.engine.options import VllmOptions, needs_tokenizer
from mindspeed_rl_plugin.engine.rollout_engine import generate
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.host import activate_if_needed
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, engine_layout
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling
from mindspeed_rl_plugin.tools.doctor import small_models
from mindspeed_rl_plugin.tools.doctor.program import CheckCall, work
from mindspeed_rl_plugin.tools.doctor.result import Check
from mindspeed_rl_plugin.tools.rehearse.substitutes import make_tokenizer
from mindspeed_rl_plugin.weights.live import engine_storage
from mindspeed_rl_plugin.weights.storages import distinct

# Largest median difference of log-probs [nats] by rounding, which may also give a token other experts.
LOGP_LIMITS = {"float32": 1e-4, "bfloat16": 0.1}
TELL_US, _INSTALL = "report this with the file of --out", "install versions that README names"
_check, _nats = partial(Check, "engine"), "transformers', at most {nats:g} nats (median)"
_cause = partial(_check, explains="engine trainer")
BUILD = _cause("build", "", f"the message says what vLLM lacks; {_INSTALL}")
GRAPHS = _check("captured graphs", "at least 1", "look for warnings about graphs in the log that --keep keeps")
LOADED = _cause("answers of loaded weights", _nats, f"vLLM computes another model than transformers: {_INSTALL}")
SAMPLED = _check(
    "log-probs of sampled tokens",
    "those of temperature and top-p, at most {nats:g} nats (median)",
    "the sampler's log-probs are of another distribution: install a vLLM (vllm-ascend) that has logprobs_mode",
)
SLEEP_FREES = _check("memory that sleep frees", "at least 90 % of the KV cache", "turn expandable segments off")
WOKEN = _cause(
    "tensors after waking", "shapes and strides of before", f"waking replaces the model's tensors: {_INSTALL}"
)
WRITTEN = _cause("weights that were written", "each piece reads as it was written", TELL_US)
DERIVED_TENSORS = _cause("tensors derived from weights", "none is stale", f"decoding is stale: {_INSTALL}")
NEW_WEIGHTS = _cause(
    "answers of new weights", _nats, f"the engine still computes with something of the older ones: {TELL_US}"
)
PREFIX = _cause(
    "prefixes cached by older weights", _nats, f"the engine answers with what older weights cached: {_INSTALL}"
)
AFTER_SLEEP = _check(
    "answers after sleep and waking",
    _nats,
    "state of the engine is lost in its sleep: --rl-schedule async with devices for engines alone needs no sleep",
)
IN_FLIGHT = _check("weights that change between two steps", f"two parts, each {_nats}", "use --rl-schedule sync")
AS_BUILT = _check(
    "answers as it was built",
    "the same tokens, with those weights written again",
    f"something of other weights is left in the engine: {TELL_US}",
)
ENGINE_CHECKS = (BUILD, GRAPHS, LOADED, SAMPLED, SLEEP_FREES, WOKEN, WRITTEN, DERIVED_TENSORS)
ENGINE_CHECKS += (NEW_WEIGHTS, PREFIX, AFTER_SLEEP, IN_FLIGHT, AS_BUILT)

_ASKED_TOKENS, _LONG, _DEADLINE, _CACHE = 12, 160, 120.0, 64 << 20
_ASKED = [tuple(range(5, 5 + n)) for n in (7, 33, _LONG)]
_UNSEEN = tuple(range(900, 900 + _LONG))
Found = tuple[bool | None, str]  # the first arguments of `Check.result`


def steps(_: float, dtype: str, file: str, *models: str) -> Iterator[CheckCall]:
    """The checks of all models, in this process. file: JSON, name -> config.json."""
    activate_if_needed()
    dist.init_process_group("gloo")
    for model in models:
        config = json.loads(Path(file).read_text())[model]
        yield from EngineBench(model, config, dtype, Path(tempfile.mkdtemp())).steps()


class EngineBench:
    """An engine of a small model, with two sets of weights and transformers' models of both. folder: an empty one."""

    def __init__(self, model: str, config: Mapping[str, Any], dtype: str, folder: Path) -> None:
        self.model, self.config, self.dtype, self.folder = model, config, dtype, folder
        self.nats = LOGP_LIMITS[dtype]
        self.weights, self.judges, self.engine = [], [], None

    def steps(self) -> Iterator[CheckCall]:
        """The checks, in the order in which they must run."""
        calls = {
            BUILD: self.build,
            GRAPHS: self.graphs,
            LOADED: self.loaded,
            SAMPLED: self.sampled,
            SLEEP_FREES: self.sleep,
            WOKEN: self.wake,
            WRITTEN: partial(self.write, 0),
            DERIVED_TENSORS: self.latent,
            AFTER_SLEEP: self.slept,
            NEW_WEIGHTS: self.change,
            PREFIX: partial(self.compared, 1, _ASKED),
            IN_FLIGHT: self.between,
            AS_BUILT: self.restored,
        }
        if why := small_models.unknown(self.config):
            yield from (CheckCall(check, lambda: (None, why), self.model) for check in calls)
            return
        yield from (CheckCall(check, call, self.model, {"nats": self.nats}) for check, call in calls.items())
        if self.engine:
            self.engine.shutdown()

    def build(self) -> Found:
        began = time.monotonic()
        for seed in (0, 1):
            (at := self.folder / f"{seed}").mkdir()
            self.weights.append(small_models.random_weights(self.config, seed, getattr(torch, self.dtype)))
            small_models.write_model(self.config, self.weights[seed], at)
            self.judges.append(small_models.Judge(at))
        options = VllmOptions(
            self.config,
            max_model_len=small_models.CONTEXT,
            dtype=self.dtype,
            max_running=8,
            kv_cache_bytes=_CACHE,
            tokenizer=str(make_tokenizer(self.folder / "tokenizer")) if needs_tokenizer(()) else None,
            weights=str(self.folder / "0"),
            deadline=_DEADLINE,
        )
        self.engine = VllmEngine(options)
        return True, f"{time.monotonic() - began:.0f} s"

    def graphs(self) -> Found:
        if get_device().is_cpu:
            return None, "a CPU has none"
        count = vllm_api.captured_graphs()
        return count > 0, str(count)

    def loaded(self) -> Found:
        self.engine.update_weights(0)
        found = self.compared(0, _ASKED)
        self.built = self.answers
        return found

    def sampled(self) -> Found:
        if not self.engine.processed:
            return None, "this vLLM has no log-probs after temperature and top-p (0.11 has them)"
        return self.compared(0, _ASKED, temperature=0.7, top_p=0.9)

    def sleep(self) -> Found:
        self.forms_before, held, cache = self.forms(), self.bytes(), _bytes_of(self.caches())
        self.engine.sleep()
        freed = held - self.bytes()
        return freed >= 0.9 * cache, f"{freed / 2**20:.0f} MiB, the cache has {cache / 2**20:.0f}"

    def wake(self) -> Found:
        self.engine.wake(("weights",))
        before, now = self.forms_before, self.forms()
        other = [n for n in before if before[n] != now.get(n)]
        return not other, f"{other[0]} has another shape or stride" if other else f"{len(before)} tensors"

    def slept(self) -> Found:
        self.engine.wake(("kv_cache",))
        return self.compared(0, _ASKED)

    def change(self) -> Found:
        """Write the second weights while a response is in the making, which ends with them (`between`)."""
        self.engine.submit(_requests(_ASKED[:1], tokens=2 * _ASKED_TOKENS))
        for _ in range(4):
            self.engine.poll(0)
        good, figure = self.write(1)
        self.engine.update_weights(1, in_flight=True)
        (self.changed,) = self.engine.poll(_DEADLINE)
        return self.compared(1, [_UNSEEN]) if good else (False, f"not written: {figure}")

    def restored(self) -> Found:
        """Write the weights with which the engine was built: it must answer as it did then."""
        good, figure = self.write(0)
        self.engine.update_weights(0)
        self.compared(0, _ASKED)
        equal = sum(a == b for a, b in zip(self.built, self.answers, strict=True))
        return good and equal == len(_ASKED), f"{equal} of {len(_ASKED)} responses" if good else figure

    def ask(self, prompts: Sequence[tuple[int, ...]], **sampling: float) -> list[Completion]:
        """Responses of _ASKED_TOKENS tokens each."""
        return generate(self.engine, _requests(prompts, **sampling), deadline=_DEADLINE)

    def compared(self, judge: int, prompts: Sequence[tuple[int, ...]], **sampling: float) -> Found:
        """Ask. Largest median difference of a response's log-probs from those of transformers' model number `judge`."""
        far, done = 0.0, self.ask(prompts, **sampling)
        self.answers = [one.tokens for one in done]
        for prompt, one in zip(prompts, done, strict=True):
            logits = self.judges[judge].logits([*prompt, *one.tokens[:-1]])[len(prompt) - 1 :]
            far = max(far, _difference(logits, one, **sampling))
        return far <= self.nats, f"{far:.2g} nats"

    def between(self) -> Found:
        """The response whose weights changed in its middle. With latent attention transformers caches other tensors
        than the engine, so only the parts are compared."""
        from transformers import DynamicCache

        done = self.changed
        at, asked = done.segments[-1][0], len(_ASKED[0])
        if [version for _, version in done.segments] != [0, 1] or not 0 < at < len(done.tokens):
            return False, f"parts {done.segments}"
        if self.engine.options.config.get("kv_lora_rank"):
            return None, f"new from token {at} on; log-probs of latent attention are not compared"
        cache, tokens = DynamicCache(), [*_ASKED[0], *done.tokens]
        (old, new), change = self.judges, asked + at - 1
        steps = [old.logits(tokens[:change], cache)[asked - 1 :], *(new.logits([t], cache) for t in tokens[change:-1])]
        far = _difference(torch.cat(steps), done)
        return far <= self.nats, f"{far:.2g} nats"

    def write(self, which: int) -> Found:
        """Write all weights as the reshard does, through views of the live tensors, and read them back."""
        live, shape, weights = self.engine.parameters(), ModelShape.from_hf_config(self.config), self.weights[which]
        layout = engine_layout(shape, engine_storage(shape, EngineParallel(1, 1), 0, live), 0)
        pieces = [(name, s, s.view(live[name].data, s.start, s.size)) for name, some in layout.items() for s in some]
        values = [weights[s.name].narrow(s.axis, s.start, s.size).to(part) for _, s, part in pieces]
        for (_, _, part), value in zip(pieces, values, strict=True):
            part.copy_(value)
        live = self.engine.parameters()  # again, so that a write into a copy is seen
        read = [s.view(live[name].data, s.start, s.size) for name, s, _ in pieces]
        wrong = [f"{n} ({s.name})" for (n, s, _), v, r in zip(pieces, values, read, strict=True) if not r.equal(v)]
        return not wrong, wrong[0] if wrong else f"{len(pieces)} pieces"

    def latent(self) -> Found:
        self.engine.update_weights(0)
        pairs = vllm_api.latent_parts(self.engine._worker)
        wrong = sum(not one.equal(by_weights) for one, by_weights in pairs)
        return (not wrong, f"{wrong} of {len(pairs)} are stale") if pairs else (None, "it has none")

    def forms(self) -> dict[str, tuple[object, ...]]:
        """Name -> shape and strides of the live weights."""
        return {name: (tuple(p.shape), p.stride()) for name, p in self.engine.parameters().items()}

    def bytes(self) -> int:
        """Bytes in use: of weights and KV cache on a CPU, of the device elsewhere."""
        if get_device().is_cpu:
            return _bytes_of([*self.engine.parameters().values(), *self.caches()])
        free, total = get_device().memory_info()
        return total - free

    def caches(self) -> list[Tensor]:
        """vllm-ascend has pairs of tensors."""
        return tree_leaves(self.engine._worker.model_runner.kv_caches)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(storage.nbytes() for storage in distinct(tensors).values())


def _requests(
    prompts: Sequence[tuple[int, ...]], tokens: int = _ASKED_TOKENS, **sampling: float
) -> list[GenerateRequest]:
    shared = Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    return [GenerateRequest(SampleId(0, i, 0), p, shared, 2**60 + i) for i, p in enumerate(prompts)]


def _difference(logits: Tensor, done: Completion, temperature: float = 1.0, top_p: float = 1.0) -> float:
    """Median difference between the log-probs of a response and those of the logits `[R, V]`, as they are sampled:
    rounding gives a few tokens other experts."""
    probs, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    outside = (probs.cumsum(-1) - probs >= top_p).gather(-1, order.argsort(-1))
    logps = (logits / temperature).masked_fill(outside, -torch.inf).log_softmax(-1)
    theirs = logps.gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
    far = (theirs - torch.tensor(done.logps)).abs()
    inside = far[theirs.isfinite()]  # rounding may move a token across the limit of top-p
    return float(inside.median()) if len(inside) > 0.75 * len(far) else math.inf


if __name__ == "__main__":
    work(steps)
