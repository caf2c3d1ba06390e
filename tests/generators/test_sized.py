"""Sizes of an engine on the ranks that it has."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.generators import pulling, server_worker, serving
from mindspeed_rl_plugin.generators.serving import sized
from mindspeed_rl_plugin.layout.layout import EngineParallel

OPTIONS = VllmOptions({}, 24)


@pytest.mark.parametrize(
    ("job", "ranks", "engine"),
    [((1, 1), 1, (1, 1)), ((1, 1), 2, (2, 1)), ((2, 2), 4, (4, 4)), ((4, 4), 1, (1, 1)), ((2, 4), 4, (2, 4))],
)
def test_an_engine_of_other_sizes_than_the_jobs(job, ranks, engine):
    options = sized(replace(OPTIONS, tensor_parallel=job[0], expert_parallel=job[1]), ranks)
    assert (options.tensor_parallel, options.expert_parallel) == engine


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"expert_parallel": 4}, r"over 4 ranks \(--rl-generate-ep\), this engine has 2; .* --nproc-per-node 4"),
        ({"kv_cache_bytes": 10**6 << 30}, r"--rl-kv-cache-gb 1e\+06 x 1 ranks .* lower it .*--kv-cache-gb"),
    ],
)
def test_what_does_not_fit_is_refused(options, why):
    with pytest.raises(ValueError, match=why):
        sized(replace(OPTIONS, **options), 2)


@pytest.fixture
def pullers(monkeypatch):
    """What the pullers are given of an engine that joins a job, or of a server, of whose sizes the job says others."""
    made, gone = [], SimpleNamespace(close=int, run=int, parameters=dict, shutdown=int)
    gone.calls = SimpleNamespace(me=None, directory=SimpleNamespace(ranks=[]))
    job = SimpleNamespace(engine=replace(OPTIONS, tensor_parallel=2, expert_parallel=4), deadline=9.0)
    job.tokenizer, job.environments, job.run = None, None, ""
    job.check_tokenizer = lambda path: None
    for module in (serving, server_worker):
        monkeypatch.setattr(module, "GuestDock", SimpleNamespace(join=lambda *_, **__: gone))
        monkeypatch.setattr(module, "job_of", lambda *_, **__: job)
    monkeypatch.setattr(pulling, "Puller", lambda *given, **more: made.append((given[1], more["rank"])) or gone)
    monkeypatch.setattr(pulling, "weights_of", lambda dock: None)
    monkeypatch.setattr(serving, "VllmEngine", lambda options: gone)
    monkeypatch.setattr(serving, "EngineLoop", lambda *_: gone)
    monkeypatch.setattr(serving, "Team", lambda deadline: SimpleNamespace(size=4, rank=3, here=[2, 3]))
    return made


def test_an_engine_pulls_for_its_own_sizes(pullers):
    serving.serve("a:1", b"", share=(0, 1))
    assert pullers == [(EngineParallel(tp=2, ep=4), 3)]


@pytest.mark.parametrize(("spread", "ep"), [(False, 1), (True, 2)])
def test_a_server_pulls_for_its_own_sizes(pullers, monkeypatch, spread, ep):
    group = SimpleNamespace(rank_in_group=1)
    api = SimpleNamespace(parameters=lambda worker: {}, tp_group=lambda: group)
    monkeypatch.setattr(server_worker, "vllm_api", api)
    sizes = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2, enable_expert_parallel=spread))
    worker = SimpleNamespace(model_config=SimpleNamespace(tokenizer=""), vllm_config=sizes)
    server_worker._Guest(worker, "", "a:1", b"", [0, 1])
    assert pullers == [(EngineParallel(tp=2, ep=ep), 1)]
