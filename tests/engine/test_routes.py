"""The routes that an engine records: of real engines against transformers', and what cannot be recorded."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mindspeed_rl_plugin.engine import routes, vllm_api
from mindspeed_rl_plugin.engine.routes import RouteRecorder, RouteSizes, continued
from mindspeed_rl_plugin.host import engine_env

SLOW = [("glm4_moe", 1, 1), ("deepseek_v3", 1, 1), ("qwen3_moe_large", 1, 1), ("qwen3_moe", 2, 1), ("qwen3_moe", 1, 2)]
SLOW += [("glm4_moe", 2, 2)]


@pytest.mark.parametrize(
    ("family", "tp", "ep"),
    [("qwen3_moe", 1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_an_engine_records_the_experts_of_each_token(torchrun, tmp_path, family, tp, ep) -> None:
    ranks = max(tp, ep)
    done = torchrun(Path(__file__).with_name("route_ranks.py"), tmp_path, family, tp, ep, ranks=ranks)
    assert done.stdout.count("passed") == ranks


@pytest.mark.quick
def test_old_entries_stay_and_the_boundary_tokens_is_new() -> None:
    old, new = torch.zeros(3, 2, 2), torch.ones(5, 2, 2)
    assert continued(None, new) is new
    assert continued(old, new)[:, 0, 0].tolist() == [0, 0, 0, 1, 1]
    for other in (new[:2], torch.ones(5, 3, 2)):
        with pytest.raises(ValueError, match=r"\[3, 2, 2\] cannot be continued"):
            continued(old, other)


SIZES = RouteSizes((1, 2), 4, 2)
QWEN = dict(num_hidden_layers=3, hidden_size=8, num_attention_heads=2, vocab_size=9, intermediate_size=8, head_dim=4)
QWEN |= dict(moe_intermediate_size=8)


class Router:
    def __init__(self, callback=True) -> None:
        if callback:
            self.set_capture_fn = lambda record: setattr(self, "record", record)

    def select_experts(self) -> None: ...


def worker_of(*layers, specs=()):
    """A worker whose model has these routers; None: a dense layer."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(1, 1) for _ in layers)
    for layer, router in zip(model.layers, layers, strict=True):
        layer.router = router
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    config = SimpleNamespace(kv_cache_groups=groups, num_blocks=3)
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model, kv_cache_config=config))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((None, None, None), r"experts in layers \[1, 2\], but vLLM 0\.\d+.* has routers .* in \[\]; .*vLLM 0.16"),
        ((Router(), Router(), None), r"\[1, 2\], but .* in \[0, 1\]; .*remove --rl-router-replay"),
        ((None, Router(), Router(callback=False)), r"\[1, 2\], but .* in \[1\]; "),
    ],
)
def test_models_whose_routes_cannot_be_recorded(layers, text) -> None:
    with pytest.raises(ValueError, match=text):
        RouteRecorder(SIZES, 8).bind(worker_of(*layers))


@pytest.mark.quick
def test_versions_of_vllm_ascend_that_tell_no_routes(monkeypatch) -> None:
    for version, refused in (("0.18.0", True), ("0.26.0rc1", True), ("0.32.0rc1", False)):
        monkeypatch.setattr(engine_env.metadata, "version", lambda name, v=version: "0.32.0" if name == "vllm" else v)
        with pytest.raises(ValueError, match=f"vllm-ascend {version} does.*13882") if refused else nullcontext():
            engine_env.demand_routes("npu")


@pytest.mark.quick
def test_sizes_are_read_from_the_models_config() -> None:
    config = QWEN | {"model_type": "qwen3_moe", "num_experts": 300, "num_experts_per_tok": 4, "mlp_only_layers": [1]}
    assert RouteSizes.of(config) == RouteSizes((0, 2), 300, 4) and RouteSizes.of(config).dtype == torch.int16
    with pytest.raises(ValueError, match="family qwen3 has no experts"):
        RouteSizes.of(QWEN | {"model_type": "qwen3"})


@pytest.mark.quick
def test_a_layer_that_chooses_without_its_callback_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(vllm_api, "own_rows", lambda ids: ids)
    layers = None, Router(), Router()
    recorder, worker = RouteRecorder(SIZES, 8), worker_of(*layers)
    recorder.bind(worker)
    layers[2].record(torch.ones(3, 2))
    with pytest.raises(ValueError, match="1 of 2 layers with experts chose without"):
        recorder.attach(worker)


def test_a_cache_without_full_attention_is_refused() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    sizes = dict(num_kv_heads=1, head_size=8, dtype=torch.float32)
    window = SlidingWindowSpec(block_size=16, sliding_window=32, **sizes)
    full = FullAttentionSpec(block_size=32, **sizes)
    assert vllm_api.kv_slots(worker_of(specs=(window, full))) == (1, 32, 96)
    with pytest.raises(ValueError, match="no layer with full attention, but SlidingWindowSpec"):
        vllm_api.kv_slots(worker_of(specs=(window,)))


@pytest.mark.parametrize(
    ("rows", "place", "own"),
    [
        (range(5), 1, [2, 3, 4]),  # of all engines
        (range(2), 0, [0, 1]),  # of this engine
        (range(8), 1, [4, 5, 6]),  # of all engines, in equal shares of two ranks each
        (range(2), 1, [0, 1, 10]),  # this rank's share of its engine's three
    ],
)
def test_the_rows_of_an_engine_that_shares_experts(monkeypatch, rows, place, own) -> None:
    import vllm.distributed.parallel_state as state
    import vllm.forward_context as context

    parts = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([2, 3]), local_sizes=[2, 2, 2, 2])
    monkeypatch.setattr(context, "get_forward_context", lambda: SimpleNamespace(dp_metadata=parts))
    monkeypatch.setattr(state, "get_dp_group", lambda: SimpleNamespace(rank_in_group=place))
    gathered = SimpleNamespace(world_size=2, all_gather=lambda ids, dim: torch.cat([ids, ids + 10]))
    monkeypatch.setattr(vllm_api, "tp_group", lambda: gathered)
    assert vllm_api.own_rows(torch.tensor(rows)[:, None]).flatten().tolist() == own


class Steps:
    """A recorder under steps of a model whose row of a token is [position, 100 + number of the step], in blocks of 4.
    held: request -> its blocks."""

    def __init__(self, monkeypatch) -> None:
        self.recorder, self.held, self.number = RouteRecorder(RouteSizes((0,), 256, 2), 16), {}, 0
        monkeypatch.setattr(vllm_api, "own_rows", lambda ids: ids)
        monkeypatch.setattr(vllm_api, "kv_slots", lambda worker: (0, 4, 40))
        monkeypatch.setattr(vllm_api, "step_slots", lambda worker, group, tokens: self.slots)
        self.router = Router()
        worker = worker_of(self.router)
        self.recorder.bind(worker)
        self.router.record(torch.ones(1, 2))
        worker.model_runner.execute_model = self.execute
        self.recorder.attach(worker)
        self.step_of = worker.model_runner.execute_model

    def execute(self, scheduled):
        self.router.record(torch.tensor([[place, 100 + self.number] for place in self.places]))

    def step(self, new=(), more=(), resumed=(), lost=(), finished=(), copies=None) -> None:
        """new, more: (request, blocks, tokens computed before, tokens of the step)."""
        self.number, self.slots, self.places = self.number + 1, [], []
        for name, blocks, before, count in (*new, *more):
            fresh = name in resumed or name in [n[0] for n in new]
            held = self.held[name] = [*blocks] if fresh else [*self.held[name], *blocks]
            self.places += range(before, before + count)
            self.slots += [held[place // 4] * 4 + place % 4 for place in range(before, before + count)]
        self.slots = torch.tensor(self.slots)
        again = SimpleNamespace(
            req_ids=[m[0] for m in more],
            new_block_ids=[([*m[1]],) if m[1] else None for m in more],
            num_computed_tokens=[m[2] for m in more],
            resumed_req_ids={*resumed},
        )
        self.step_of(
            SimpleNamespace(
                finished_req_ids=finished,
                num_scheduled_tokens={name: count for name, _, _, count in (*new, *more)},
                total_num_scheduled_tokens=len(self.places),
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=n, block_ids=([*b],), num_computed_tokens=c) for n, b, c, _ in new
                ],
                scheduled_cached_reqs=again,
                preempted_req_ids=lost,
                kv_cache_block_copies=copies,
            )
        )

    def passes(self, name: str, tokens: int) -> list[int]:
        """The step of each entry."""
        rows = self.recorder.routes(name, tokens)[1:, 0].tolist()
        assert [place for place, _ in rows] == [*range(tokens - 1)]
        return [step - 100 for _, step in rows]


@pytest.mark.quick
@pytest.mark.parametrize("says", [True, False], ids=["who is preempted", "nothing of it"])
def test_a_preempted_request_keeps_its_rows_although_it_is_computed_again(monkeypatch, says) -> None:
    steps = Steps(monkeypatch)
    lost = lambda *names: names if says else None  # noqa: E731 - older versions of vLLM do not tell
    steps.step(new=[("a", (1, 2), 0, 6)], lost=lost())
    steps.step(more=[("a", (), 6, 1)], new=[("b", (1, 3), 4, 2)], lost=lost())
    assert steps.passes("a", 8) == [1] * 6 + [2] and steps.passes("b", 7) == [1] * 4 + [2] * 2
    steps.step(more=[("b", (), 6, 1)], new=[("c", (2,), 0, 4)], lost=lost("a"))  # c takes a block of a
    assert steps.passes("a", 8) == [1] * 6 + [2] and steps.passes("c", 5) == [3] * 4
    steps.step(more=[("a", (4, 5), 0, 3)], resumed=["a"], lost=lost("c", "b"))  # a part of it
    steps.step(new=[("d", (4,), 0, 4)], lost=lost("a"))  # and again
    assert steps.passes("a", 8) == [1] * 6 + [2]
    steps.step(more=[("a", (6, 7, 8), 0, 9)], resumed=["a"], lost=lost("d"))
    assert steps.passes("a", 10) == [1] * 6 + [2] + [6] * 2


@pytest.mark.quick
def test_rows_go_with_a_copy_of_their_block_and_end_with_their_request(monkeypatch) -> None:
    steps = Steps(monkeypatch)
    steps.step(new=[("a", (1,), 0, 3)])
    steps.step(new=[("b", (2,), 2, 2)], more=[("a", (), 3, 1)], copies=[(1, 2)])
    assert steps.passes("b", 5) == [1, 1, 2, 2]
    steps.step(new=[("c", (3,), 0, 1)], finished={"a", "b"})
    assert steps.recorder._held.keys() == {"c"}
    steps.recorder.sleep()
    steps.step(new=[("d", (1,), 0, 4)], finished={"c"})
    assert steps.passes("d", 5) == [4] * 4


@pytest.mark.quick
def test_a_row_that_no_step_recorded_is_an_error() -> None:
    rows = torch.tensor([[[0, 1]], [[3, 2]], [[0, 0]]])
    assert routes.column_of(rows[:2], "a").tolist() == [[[0, 0]], [[0, 1]], [[3, 2]]]
    with pytest.raises(RuntimeError, match="routes of a: a token has chosen one expert twice"):
        routes.column_of(rows, "a")
