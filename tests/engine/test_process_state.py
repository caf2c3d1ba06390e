"""What an engine has to itself while it works: numbers, a stream, functions of torch."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_rl_plugin.engine import vllm_api

pytestmark = pytest.mark.quick


@pytest.fixture
def work(make_engine, fake_vllm, request_of, monkeypatch):
    """`work(inside)` builds an engine and has it sample a response; vLLM calls `inside("build")` and `inside("step")`
    meanwhile."""

    def run(inside):
        engine = make_engine()
        build, step = vllm_api.build, fake_vllm.step
        monkeypatch.setattr(vllm_api, "build", lambda *given: (inside("build"), build(*given))[1])
        monkeypatch.setattr(fake_vllm, "step", lambda: (inside("step"), step())[1])
        engine = type(engine)(engine.options, engine._device)
        engine.update_weights(0)
        fake_vllm.script = {"0-0-0": ([7], "stop")}
        engine.submit([request_of(0)])
        assert engine.poll(5)
        return engine

    return run


def test_mindspeeds_functions_are_not_the_engines(work, monkeypatch) -> None:
    """While it is built and while it steps torch's own are in force; before and after, MindSpeed's."""
    own = torch.compile, torch.Tensor.view
    patches = [SimpleNamespace(orig_module=torch, orig_func_name="compile", orig_func=own[0])]
    patches += [SimpleNamespace(orig_module=torch.Tensor, orig_func_name="view", orig_func=own[1])]
    patches += [SimpleNamespace(orig_module=None)]  # registered, not yet applied
    record = dict(zip(("torch.compile", "torch.Tensor.view", "torch.jit.script"), patches, strict=True))
    manager = SimpleNamespace(MindSpeedPatchesManager=SimpleNamespace(patches_info=record))
    dummy, seen = lambda function=None, **_: function, []
    monkeypatch.setitem(sys.modules, "mindspeed.patch_utils", manager)
    monkeypatch.setattr(torch, "compile", dummy)
    monkeypatch.setattr(torch.Tensor, "view", dummy)
    work(lambda where: seen.append((where, (torch.compile, torch.Tensor.view) == own)))
    assert seen == [("build", True), ("step", True)] and torch.compile is torch.Tensor.view is dummy


def test_generators_of_the_trainer_are_left_alone(work, fake_vllm) -> None:
    def draw(*_):
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    def seed():
        torch.manual_seed(1), random.seed(1), np.random.seed(1)

    seed()
    before = draw()
    seed()
    work(lambda where: (draw(), fake_vllm.api.draw()))
    assert draw() == before and fake_vllm.api.state == ("trainer", 7)


def test_the_trainer_keeps_its_stream(work, fake_vllm) -> None:
    """vLLM on CUDA takes a stream of its own when it is built; each side waits for the other's work in turn."""
    api, seen = fake_vllm.api, []
    own = type(api.stream)("engine", api.log)
    work(lambda where: api.set_stream(own) if where == "build" else seen.append(api.stream.name))
    assert seen == ["engine"] and api.stream.name == "trainer"
    assert api.log == [("trainer", "engine"), ("engine", "trainer"), ("trainer", "engine")]


def test_names_of_torch_are_the_trainers_again(work, monkeypatch) -> None:
    """As vllm-ascend 0.18 replaces them when it is built; then it finds its own again."""
    names, seen = [(torch, "Event"), (torch.cuda, "Event"), (torch, "sum")], []
    trainers = [getattr(module, name) for module, name in names]

    def inside(where):
        seen.append([getattr(module, name) for module, name in names])
        for module, name in names:
            monkeypatch.setattr(module, name, max)

    work(inside)
    assert seen == [trainers, [max] * 3] and [getattr(module, name) for module, name in names] == trainers


@pytest.mark.parametrize("options", [{"batched": True}, {"batched": False, "request_seeds": True}])
def test_requests_have_generators_where_one_kernel_serves_all_or_it_is_asked_for(
    make_engine, fake_vllm, request_of, options
) -> None:
    engine = make_engine(**options)
    engine.update_weights(0)
    engine.submit([request_of(0), request_of(1)])
    assert [call[3][2] for call in fake_vllm.calls if call[0] == "add"] == [True] * 2


def test_elsewhere_an_engine_has_one_generator_of_its_own(make_engine, fake_vllm, request_of, monkeypatch) -> None:
    """No request has one, so that no step loops over them. It goes on from poll to poll, whatever the trainer draws
    meanwhile, and starts anew with the first request of an engine that was idle."""
    engine, numbers, step = make_engine(batched=False), [], fake_vllm.step
    monkeypatch.setattr(fake_vllm, "step", lambda: (numbers.append(fake_vllm.api.draw()), step())[1])
    engine.update_weights(0)
    fake_vllm.script = {f"0-{g}-0": ([7] * (2 + g), "length") for g in range(2)}
    engine.submit([request_of(0), request_of(1)])
    assert engine.poll(5) and [call[3][2] for call in fake_vllm.calls if call[0] == "add"] == [False] * 2
    assert numbers == [(100, 1), (100, 2)] and fake_vllm.api.draw() == ("trainer", 8)
    assert engine.poll(5) and numbers[2:] == [(100, 3)]
    engine.submit([request_of(1)])
    assert engine.poll(5) and numbers[3:] == [(101, 1), (101, 2), (101, 3)]
    assert fake_vllm.api.draw() == ("trainer", 9)


@pytest.mark.parametrize(("count", "said"), [(72, "captured 72 graphs"), (0, "captured no graphs")])
def test_graphs_are_counted(make_engine, capsys, count, said) -> None:
    """An engine whose compiler does nothing decodes without them, and says nothing itself."""
    make_engine(graphs=count)
    assert said in capsys.readouterr().out


def test_an_engine_is_not_built_under_a_torch_compile_of_unknown_origin(make_engine, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function)
    with pytest.raises(ValueError, match=r"torch\.compile is .*test_process_state"):
        make_engine()
