"""Sizes of an engine on the ranks that it has."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.generators import engine as joined
from mindspeed_rl_plugin.generators import server_worker
from mindspeed_rl_plugin.generators.engine import sized
from mindspeed_rl_plugin.reshard.layout import EngineParallel

OPTIONS = VllmOptions({}, 24)


@pytest.mark.parametrize(
    ("job", "ranks", "engine"),
    [((1, 1), 1, (1, 1)), ((1, 1), 2, (2, 1)), ((2, 2), 4, (4, 4)), ((4, 4), 1, (1, 1)), ((2, 4), 4, (2, 4))],
)
def test_an_engine_of_other_sizes_than_the_jobs(job, ranks, engine):
    options = sized(replace(OPTIONS, tensor_parallel=job[0], expert_parallel=job[1]), ranks)
    assert (options.tensor_parallel, options.expert_parallel) == engine


def test_engines_that_share_experts_are_as_many_as_the_job_says():
    with pytest.raises(ValueError, match=r"over 4 ranks \(--rl-generate-ep\), here are 2: .* --nproc-per-node 4"):
        sized(replace(OPTIONS, tensor_parallel=1, expert_parallel=4), 2)


def fakes(module, monkeypatch, job) -> list:
    """Puts fakes in the place of what `module` joins a job with; the arguments of its pullers."""
    made, end = [], {"close": int}
    dock = SimpleNamespace(exchange=SimpleNamespace(sources=list, once_a_machine=None), **end)
    monkeypatch.setattr(module, "Dock", SimpleNamespace(join=lambda *_, **__: dock))
    monkeypatch.setattr(module, "Puller", lambda *given, **more: made.append((*given, more)) or SimpleNamespace(**end))
    monkeypatch.setattr(module, "job_of", lambda *_, **__: job)
    monkeypatch.setattr(module, "weights_of", lambda dock: "weights")
    return made


def test_an_engine_pulls_for_its_own_sizes(monkeypatch):
    job = SimpleNamespace(engine=replace(OPTIONS, tensor_parallel=2, expert_parallel=4), episodes=None, deadline=9.0)
    job.check_tokenizer = lambda path: None
    made = fakes(joined, monkeypatch, job)
    live = SimpleNamespace(parameters=dict, shutdown=int)
    for name, fake in (("VllmEngine", live), ("Service", SimpleNamespace(run=int))):
        monkeypatch.setattr(joined, name, lambda *_, fake=fake: fake)
    monkeypatch.setattr(joined, "Team", lambda: SimpleNamespace(size=4, rank=3, here=[2, 3], leads=False))
    joined.serve("a:1", b"", share=(0, 1))
    ((*given, more),) = made
    assert given == ["weights", EngineParallel(tp=2, ep=4), {}, []]
    assert (more["rank"], more["ranks"], more["deadline"]) == (3, [2, 3], 9.0)


@pytest.mark.parametrize("spread", [False, True])
def test_a_server_pulls_for_its_own_sizes(monkeypatch, spread):
    made = fakes(server_worker, monkeypatch, SimpleNamespace(deadline=9.0, check_tokenizer=lambda path: None))
    group = SimpleNamespace(rank_in_group=1)
    api = SimpleNamespace(OfWorker=lambda worker: None, parameters=lambda view: {}, tp_group=lambda: group)
    monkeypatch.setattr(server_worker, "vllm_api", api)
    sizes = SimpleNamespace(tensor_parallel_size=2, enable_expert_parallel=spread)
    configs = {"model_config": SimpleNamespace(tokenizer=""), "vllm_config": SimpleNamespace(parallel_config=sizes)}
    server_worker._Guest(SimpleNamespace(**configs), "", "a:1", b"", [0, 1])
    ((*given, more),) = made
    assert given == ["weights", EngineParallel(tp=2, ep=2 if spread else 1), {}, []] and more["rank"] == 1
