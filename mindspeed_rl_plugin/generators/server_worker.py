"""The extension of the workers of vLLM's own server: `vllm serve --worker-extension-cls` names `ServerWorker`.

A worker imports this module before it loads its model. `/collective_rpc` calls methods of `ServerWorker` between two
steps. They return {"value": ..., "refused": ""}, and never raise, since vLLM would then end the worker.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import mindspeed_rl_plugin
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.dock import Gone
from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.engine.vllm_engine import keep_weights_live
from mindspeed_rl_plugin.generators.description import job_of
from mindspeed_rl_plugin.generators.pulling import Weights, puller_of
from mindspeed_rl_plugin.generators.vllm_server import PROCESSED, Served
from mindspeed_rl_plugin.layout.layout import EngineParallel
from mindspeed_rl_plugin.processes import machine
from mindspeed_rl_plugin.service.guest_dock import GuestDock

HELD_SECONDS = 30.0  # how long a server stays reserved for a silent client whose job lives

keep_weights_live()


class _Guest:
    """A worker that has joined a job. client: name of the process that the worker serves; address: of the job; ranks:
    of the server's workers on this machine."""

    def __init__(self, worker: Any, client: str, address: str, secret: bytes, ranks: list[int]) -> None:
        self.client, self.address, self.heard = client, address, time.monotonic()
        self.dock = GuestDock.join(address, secret)
        try:
            job = job_of(self.dock)
            job.check_tokenizer(worker.model_config.tokenizer)
            parallel = worker.vllm_config.parallel_config
            size = parallel.tensor_parallel_size
            parallel = EngineParallel(size, size if parallel.enable_expert_parallel else 1)
            rank, parameters = vllm_api.tp_group().rank_in_group, vllm_api.parameters(worker)
            self.puller = puller_of(self.dock, job, parallel, parameters, rank, ranks)
        except BaseException:
            self.dock.close()
            raise
        self.weights = Weights(self.puller, lambda version: None)

    @property
    def held(self) -> str:
        """Why this worker is not free: its client has sent a sign of life lately, and the client's job lives. Empty if
        the worker is free."""
        silent = time.monotonic() - self.heard
        if silent > HELD_SECONDS or not self.working:
            return ""
        return (
            f"it generates for the job at {self.address}, whose engine process sent a sign of life {silent:.1f} s ago; "
            "a server is one engine of one job: end that process (if it was killed, wait until it was silent for "
            f"{HELD_SECONDS:g} s), or give another server"
        )

    @property
    def working(self) -> bool:
        """Whether the job lives."""
        try:
            self.dock.news(-1, 0.0)
        except ConnectionError:
            return False
        return not self.dock.ended

    def pull(self, version: int) -> None:
        self.weights.take_cost()
        self.weights.pull(version)

    def state(self) -> dict[str, Any]:
        """State of the last pull, see `rl_pulled`. Raises its error, except for `Gone`."""
        if self.weights.busy:
            return {"busy": True, "newest": -1, "nbytes": 0}
        error = self.weights.finish()
        if error is not None and not isinstance(error, Gone):
            raise error
        return {"busy": False, "newest": error.newest if error else -1, "nbytes": self.weights.cost[1]}

    def leave(self) -> None:
        """Free the staging and leave the job."""
        self.puller.close()
        self.weights.finish()
        self.dock.close()


def _answers(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def answer(*args: Any, **named: Any) -> dict[str, Any]:
        try:
            return {"value": method(*args, **named), "refused": ""}
        except Exception as error:  # noqa: BLE001 - sent to the client, which raises it
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return {"value": None, "refused": f"{name}{error}"}

    return answer


class ServerWorker:
    """A mixin of vLLM's worker. vLLM refuses names that its worker already has."""

    @_answers
    def rl_about(self) -> dict[str, Any]:
        """How the server was started, as fields of `Served`."""
        model, parallel = self.model_config, self.vllm_config.parallel_config
        config = json.loads(json.dumps(model.hf_config.to_dict(), default=str))
        return asdict(
            Served(
                machine=machine(),
                plugin=mindspeed_rl_plugin.__version__,
                config=config,
                dtype=str(model.dtype).removeprefix("torch."),
                logprobs_mode=getattr(model.logprobs_mode, "value", model.logprobs_mode),
                max_model_len=model.max_model_len,
                max_running=self.vllm_config.scheduler_config.max_num_seqs,
                tokenizer=not model.skip_tokenizer_init,
                seeds=get_device().is_cpu or vllm_api.has_batched_seeds(self),
                pipeline=parallel.pipeline_parallel_size,
                replicas=parallel.data_parallel_size,
                routes=vllm_api.returns_routes(self),
                held=guest.held if (guest := getattr(self, "_rl_guest", None)) else "",
            )
        )

    @_answers
    def rl_join(self, client: str, address: str, secret: str, machines: list[str]) -> None:
        """Join a job, each worker with a separate connection. client: a new name each time; machines: of the workers,
        in their order."""
        guest: _Guest | None = getattr(self, "_rl_guest", None)
        if guest is not None and (held := guest.held):
            raise ValueError(held)
        self._rl_leave()
        vllm_api.demand_plain_experts(self)
        vllm_api.demand_base_format(self, get_device())
        if not vllm_api.demand_processed_logprobs(self):
            raise ValueError(f"the server's sampler has no {PROCESSED}")
        here = [rank for rank, name in enumerate(machines) if name == machine()]
        self._rl_guest = _Guest(self, client, address, bytes.fromhex(secret), here)

    @_answers
    def rl_stay(self, client: str) -> None:
        """A sign of life of the client."""
        self._rl_of(client)

    @_answers
    def rl_pull(self, client: str, version: int) -> None:
        self._rl_of(client).pull(version)

    @_answers
    def rl_pulled(self, client: str) -> dict[str, Any]:
        """State of the pull. busy: whether it still runs; newest: the newest version if it has overwritten the wanted
        one, else -1; nbytes: bytes that were read."""
        return self._rl_of(client).state()

    @_answers
    def rl_apply(self, client: str) -> dict[str, Any]:
        """Write the pulled weights into the model."""
        guest = self._rl_of(client)
        applied = guest.puller.apply(vllm_api.parameters(self))
        vllm_api.refresh_derived(self)
        return {"version": applied.version, "digest": applied.digest}

    @_answers
    def rl_leave(self, client: str) -> None:
        self._rl_of(client)
        self._rl_leave()

    def _rl_of(self, client: str) -> _Guest:
        """The worker that has joined for this client. The call counts as a sign of life of the client."""
        guest: _Guest | None = getattr(self, "_rl_guest", None)
        if guest is None or guest.client != client:
            what = f"the client was silent for over {HELD_SECONDS:g} s, or has left, or the server was started again"
            raise ValueError(f"it does not serve this client any more: {what}")
        guest.heard = time.monotonic()
        return guest

    def _rl_leave(self) -> None:
        guest, self._rl_guest = getattr(self, "_rl_guest", None), None
        if guest is not None:
            guest.leave()
