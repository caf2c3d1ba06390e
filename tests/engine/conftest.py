"""Fakes of an engine and of vLLM, and a way to run a script in several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.engine import vllm_api, vllm_engine, vllm_memory
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling


class FakeEngine:
    """Samples token `seed % 40` of responses whose length is the last prompt token; later requests finish first.

    Each poll samples one token of every response. It never ends requests whose prompt begins with token 13.
    """

    def __init__(self, replica: int = 0, replicas: int = 1, leader: bool = True) -> None:
        self.replica, self.replicas, self.leader, self.version = replica, replicas, leader, 3
        self.digest, self.shares_experts = "f" * 16, False
        self.queue: dict[SampleId, tuple[GenerateRequest, list[int]]] = {}
        self.log: list[str] = []
        self.progress = 0.0

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.log.append(f"submit {len(requests)}")
        for request in requests:
            self.queue[request.id] = (request, [*request.begun.tokens] if request.begun else [])

    def poll(self, timeout: float) -> list[Completion]:
        done: list[SampleId] = []
        while timeout > 0 and not done and any(request.prompt_tokens[0] != 13 for request, _ in self.queue.values()):
            done = self._step()
        return [self._take(i, "length" if len(self.queue[i][1]) > 2 else "stop") for i in reversed(done)]

    def step_along(self, steps: int) -> list[Completion]:
        return [self._take(i, "length") for _ in range(steps) for i in self._step()]

    def _step(self) -> list[SampleId]:
        """Those that are whole with one token more; a prompt that begins with 13 never is."""
        for request, tokens in self.queue.values():
            tokens.append(request.seed % 40)
        asked = ((i, request.prompt_tokens, tokens) for i, (request, tokens) in self.queue.items())
        return [i for i, prompt, tokens in asked if len(tokens) == prompt[-1] and prompt[0] != 13]

    def abort(self) -> list[Completion]:
        self.log.append(f"abort {len(self.queue)}")
        return [self._take(i, "abort") for i in [*self.queue]]

    def keep_step(self) -> None:
        assert not self.queue, "responses are queued"
        self.log.append("keep step")

    def _take(self, sample: SampleId, finish: str) -> Completion:
        tokens = self.queue.pop(sample)[1]
        return Completion(sample, tuple(tokens), (-0.5,) * len(tokens), finish, ((0, self.version),))


class FakeStream:
    """A stream by name; log: which stream waited for which."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append((self.name, other.name))


class FakeApi:
    """torch.cuda, as far as an engine changes it. state: (whose numbers, how many were drawn); log: waits."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.state: tuple[Any, int] = ("trainer", 7)
        self.stream = FakeStream("trainer", self.log)

    def get_rng_state(self) -> tuple[Any, int]:
        return self.state

    def set_rng_state(self, state: tuple[Any, int]) -> None:
        self.state = state

    def manual_seed(self, seed: int) -> None:
        self.state = (seed, 0)

    def current_stream(self) -> FakeStream:
        return self.stream

    def set_stream(self, stream: FakeStream) -> None:
        self.stream = stream

    def draw(self) -> tuple[Any, int]:
        """The next number."""
        self.state = (self.state[0], self.state[1] + 1)
        return self.state


class FakeVllm:
    """vLLM's LLMEngine as far as VllmEngine uses it: `script` says what each request samples, one token per step.

    script: request id -> (tokens, finish reason); None as a token is a step without output.
    """

    def __init__(self) -> None:
        self.script: dict[str, tuple[list[int | None], str]] = {}
        self.waiting: dict[str, int] = {}
        self.calls: list[Any] = []
        self.logprob = -0.25
        self.stuck_prefixes = 0
        self.refreshed: list[Any] = []
        self.api = FakeApi()
        self.engine_core = SimpleNamespace(
            execute_dummy_batch=lambda: self.calls.append("dummy"), engine_core=SimpleNamespace(batch_queue=[])
        )
        self.salts: dict[str, str] = {}

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        self.calls.append(("add", name, prompt["prompt_token_ids"], params))
        self.salts[name] = prompt["cache_salt"]
        self.waiting[name] = 0

    def step(self) -> list[Any]:
        self.calls.append("step")
        outputs = []
        for name, at in list(self.waiting.items()):
            tokens, finish = self.script[name]
            token = tokens[at]
            self.waiting[name] = at + 1
            finished = at + 1 == len(tokens)
            if finished:
                del self.waiting[name]
            sampled = [] if token is None else [token]
            history = [{t: SimpleNamespace(logprob=self.logprob)} for t in tokens[: at + 1] if t is not None]
            output = SimpleNamespace(
                token_ids=sampled, logprobs=history[-len(sampled) :], finish_reason=finish if finished else None
            )
            outputs.append(SimpleNamespace(request_id=name, outputs=[output], finished=finished))
        return outputs

    def abort_request(self, names: list[str]) -> None:
        self.calls.append(("abort", list(names)))
        for name in names:
            self.waiting.pop(name, None)

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        self.stuck_prefixes -= 1
        return self.stuck_prefixes < 0

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))


@pytest.fixture
def fake_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def fake_vllm() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def make_engine(fake_vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmEngine]:
    """Builds a VllmEngine over `fake_vllm`, as rank `rank` of `world`, on an accelerator that only has a name."""

    def build(
        rank: int = 0, world: int = 1, processed: bool = True, batched: bool = True, graphs: int = 1, **options: Any
    ) -> VllmEngine:
        monkeypatch.setattr(vllm_engine.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(vllm_engine.dist, "get_world_size", lambda: world)
        monkeypatch.setattr(vllm_engine, "_prepare", lambda *args: None)
        monkeypatch.setattr(vllm_api, "build", lambda arguments, loaded=None: fake_vllm)
        monkeypatch.setattr(vllm_api, "worker", lambda engine: engine)
        monkeypatch.setattr(vllm_api, "demand_plain_experts", lambda worker: None)
        monkeypatch.setattr(vllm_api, "captured_graphs", lambda: graphs)
        monkeypatch.setattr(vllm_api, "has_batched_seeds", lambda worker: batched)
        monkeypatch.setattr(vllm_api, "demand_processed_logprobs", lambda worker: processed)
        monkeypatch.setattr(vllm_api, "sampling_params", lambda *given: given)
        monkeypatch.setattr(vllm_api, "refresh_derived", lambda worker: fake_vllm.refreshed.append(worker))
        monkeypatch.setattr(vllm_api, "model", lambda worker: torch.nn.Module())
        monkeypatch.setattr(vllm_api, "weights_pool", lambda kind: [range(1, 2)])
        monkeypatch.setattr(vllm_memory, "_tensors_in", lambda pool: [])  # a walk over all objects
        monkeypatch.setattr(vllm_api, "teardown", lambda engine: fake_vllm.calls.append("teardown"))
        device = Device("cuda")
        monkeypatch.setattr(Device, "api", property(lambda self: fake_vllm.api))
        given = {"config": {}, "max_model_len": 32, "memory_utilization": 0.6, **options}
        return VllmEngine(VllmOptions(**given), device)

    return build


@pytest.fixture
def request_of() -> Callable[..., GenerateRequest]:
    """GenerateRequest of a group number and a prompt."""

    def make(group: int, prompt: Sequence[int] = (5, 6), **sampling: Any) -> GenerateRequest:
        return GenerateRequest(
            SampleId(0, group, 0), tuple(prompt), Sampling(**{"max_tokens": 8, **sampling}), 100 + group
        )

    return make
