"""The experts that an engine chose for each token (routes), recorded by callbacks in vLLM's routers.

**Column** `routes`: `[L, M, K]` for L tokens, M layers with experts in order of their number, and K experts a token;
uint8 up to 256 experts, else int16. Entry t + 1 has the logical ids that token t chose as input, so it belongs to the
event that produced token t + 1; entry 0 is zeros, and the last token chose none. A token keeps the routes with which it
was sampled (`continued`), whatever is computed again later.

vLLM's own `enable_return_routed_experts` (0.32) works neither on a CPU nor with tensor parallelism under an external
launcher. vLLM is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.host.engine_env import vllm_version
from mindspeed_rl_plugin.layout.layout import ModelShape
from mindspeed_rl_plugin.rows import Completion, route_dtype

ROUTES = "routes"


def continued(old: Tensor | None, new: Tensor) -> Tensor:
    """Routes of a response that was computed again as a prompt: entries of `old` stay, later ones come from `new`.

    old: `[L_old, M, K]`, None: nothing was sampled before; new: `[L, M, K]`. The first new entry belongs to the last
    old token, which was sampled but never routed. Raises ValueError if `new` is shorter, or has other layers.
    """
    if old is None:
        return new
    if len(old) > len(new) or old.shape[1:] != new.shape[1:]:
        raise ValueError(
            f"routes of {[*old.shape]} cannot be continued by routes of {[*new.shape]} [tokens, layers, k]"
        )
    return torch.cat([old, new[len(old) :].to(old.dtype)])


def routes_of(completion: Completion | None) -> Tensor | None:
    """The routes of a response, `[P + R, M, K]`; None if it has none."""
    column = None if completion is None else completion.columns.get(ROUTES)
    return None if column is None else column.row(0)


@dataclass(frozen=True)
class RouteSizes:
    """What the routes of a model are made of."""

    layers: tuple[int, ...]  # numbers of the layers with experts, from 0
    experts: int  # of a layer
    k: int  # experts a token

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RouteSizes:
        """config: config.json of the model. Raises ValueError for a model without experts."""
        shape = ModelShape.from_hf_config(config)
        layers = tuple(sorted({*range(shape.layers)} - {*shape.dense_layers})) if shape.moe_layers else ()
        if not layers:
            raise ValueError(f"a model of family {shape.family} has no experts; remove --rl-router-replay rollout")
        return cls(layers, shape.experts, config["num_experts_per_tok"])

    @property
    def dtype(self) -> torch.dtype:
        return route_dtype(self.experts)


def column_of(rows: Tensor, who: str) -> Tensor:
    """The column `[T + 1, M, K]` of rows `[T, M, K]` whose entry t is of token t as input. Raises RuntimeError if a
    token has one expert twice, as in rows that were never written."""
    if rows.shape[2] > 1 and (rows[..., 0] == rows[..., 1]).any():
        raise RuntimeError(f"routes of {who}: a token has chosen one expert twice, so its choice was not recorded")
    return torch.cat([rows.new_zeros(1, *rows.shape[1:]), rows])


@dataclass
class _HeldRoutes:
    """A request that vLLM knows."""

    kept: Tensor  # rows [t, M, K] on the host, from before vLLM computed its tokens again
    blocks: list[int] = field(default_factory=list)  # of the KV cache, in the order of its tokens
    computed: int = 0  # tokens in these blocks


class RouteRecorder:
    """Records the routes of an engine in this process.

    Callbacks write a step's ids into a buffer at a fixed address, since on accelerators they run inside captured
    graphs. After the step its rows move to the slots of the KV cache that the step wrote, so a prefix from the cache
    has the routes with which it was computed. Bytes: slots x M x K.

    sizes: of the model; capacity: most tokens of a step.
    """

    def __init__(self, sizes: RouteSizes, capacity: int) -> None:
        self._sizes, self._capacity = sizes, capacity
        self._heard: set[int] = set()  # layers whose callback was called
        self._held: dict[str, _HeldRoutes] = {}
        self._rows: Tensor | None = None  # [slots + 1, M, K]; index -1, of rows without a slot, is the last

    def bind(self, worker: Any) -> None:
        """Set the callbacks; before graphs are captured. Raises ValueError for a model that cannot be recorded."""
        found, sizes = vllm_api.routers(worker), self._sizes
        if sorted(found) != list(sizes.layers):
            raise ValueError(
                f"routes cannot be recorded: the model has experts in layers {[*sizes.layers]}, but vLLM "
                f"{'.'.join(map(str, vllm_version()))} has routers with a callback (set_capture_fn) in "
                f"{sorted(found)}; install vLLM 0.16 or newer, or remove --rl-router-replay rollout"
            )
        shape, device = (len(found), self._capacity, sizes.k), vllm_api.model_device(worker)
        self._staging = torch.zeros(shape, dtype=sizes.dtype, device=device)
        for layer, number in enumerate(sizes.layers):
            found[number].set_capture_fn(self._callback(layer))

    def attach(self, worker: Any) -> None:
        """Follow the steps of a complete engine that has run a first, empty step. Raises ValueError if a router chose
        without its callback."""
        layers, _, k = self._staging.shape
        if silent := layers - len(self._heard):
            raise ValueError(
                f"routes cannot be recorded: {silent} of {layers} layers with experts chose without vLLM's callback "
                "(set_capture_fn). A kernel that chooses by itself does so, and vllm-ascend before its pull request "
                "13882; install another version, or remove --rl-router-replay rollout"
            )
        self._worker, (self._group, self._block, slots) = worker, vllm_api.kv_slots(worker)
        self._shape, self._none = (slots + 1, layers, k), self._staging.new_zeros(0, layers, k, device="cpu")
        size = slots * layers * k * self._staging.itemsize / 2**20
        say(
            f"routes of experts take {size:.3g} MiB beside the KV cache of each rank: {slots} tokens, {layers} layers, "
            f"{k} experts"
        )
        runner = worker.model_runner
        execute = runner.execute_model

        def recording(scheduled: Any, *args: Any, **named: Any) -> Any:
            self._follow(scheduled)
            result = execute(scheduled, *args, **named)
            if scheduled.total_num_scheduled_tokens:
                self._move(scheduled.total_num_scheduled_tokens)
            return result

        runner.execute_model = recording

    def routes(self, request: str, tokens: int) -> Tensor:
        """`[tokens, M, K]` on the host: the routes of a request's first tokens, prompt and response. request: vLLM's
        own id. They must be read before the step after its last."""
        return column_of(self._recorded(self._held[request], tokens - 1), request)

    def sleep(self) -> None:
        """Free what is indexed by slots, together with the KV cache."""
        self._rows = None

    # inside

    def _callback(self, layer: int) -> Any:
        def record(ids: Tensor) -> None:
            rows = vllm_api.own_rows(ids)
            assert rows.shape[1] == self._staging.shape[2], (rows.shape, self._staging.shape)
            self._staging[layer, : len(rows)] = rows
            self._heard.add(layer)

        return record

    def _follow(self, scheduled: Any) -> None:
        """Note what the next step will compute, and save rows that it may overwrite."""
        for request in scheduled.finished_req_ids:
            self._held.pop(request, None)
        tokens, again = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
        lost = getattr(scheduled, "preempted_req_ids", None)
        for request in self._held.keys() - tokens.keys() if lost is None else lost:
            if (held := self._held.get(request)) is not None:
                held.kept = self._recorded(held, max(held.computed, len(held.kept)))
        for source, target in getattr(scheduled, "kv_cache_block_copies", None) or ():
            blocks = self._rows[:-1].unflatten(0, (-1, self._block))
            blocks[target] = blocks[source]
        for new in scheduled.scheduled_new_reqs:  # or a request that was preempted
            held = self._held.setdefault(new.req_id, _HeldRoutes(self._none))
            held.blocks = [*new.block_ids[self._group]]
            held.computed = new.num_computed_tokens + tokens[new.req_id]
        for request, more, before in zip(again.req_ids, again.new_block_ids, again.num_computed_tokens, strict=True):
            held = self._held[request]
            if request in again.resumed_req_ids:
                held.blocks = []
            held.blocks += more[self._group] if more else ()
            held.computed = before + tokens[request]

    def _move(self, tokens: int) -> None:
        """Move the rows of the step that has just been computed to their slots."""
        if self._rows is None:
            self._rows = torch.zeros(self._shape, dtype=self._staging.dtype, device=self._staging.device)
        slots = vllm_api.step_slots(self._worker, self._group, tokens)
        self._rows[slots.long()] = self._staging[:, :tokens].transpose(0, 1)

    def _recorded(self, held: _HeldRoutes, count: int) -> Tensor:
        """The first `count` rows of a request, on the host."""
        if count <= len(held.kept):
            return held.kept[:count]
        blocks = torch.tensor(held.blocks, dtype=torch.int64)
        slots = (blocks[:, None] * self._block + torch.arange(self._block)).flatten()[:count]
        assert len(slots) == count and self._rows is not None, (len(slots), count)
        return continued(held.kept, self._rows[slots.to(self._rows.device)].cpu())
