"""What an engine has to itself while it works: numbers, a stream, functions of torch; and steps alike on all ranks."""

import collections
import contextlib
import random
import sys
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.engine import vllm_api


def test_mindspeeds_functions_are_not_the_engines(make_engine, fake_vllm, request_of, monkeypatch) -> None:
    """While it is built and while it steps torch's own are in force; before and after, MindSpeed's."""
    own = torch.compile, torch.Tensor.view
    dummy, seen = lambda function=None, **_: function, []
    engine = make_engine()
    patches = [SimpleNamespace(orig_module=torch, orig_func_name="compile", orig_func=own[0])]
    patches += [SimpleNamespace(orig_module=torch.Tensor, orig_func_name="view", orig_func=own[1])]
    record = dict(zip(("torch.compile", "torch.Tensor.view"), patches, strict=True))
    record["torch.jit.script"] = SimpleNamespace(orig_module=None)  # registered, not yet applied
    manager = SimpleNamespace(MindSpeedPatchesManager=SimpleNamespace(patches_info=record))
    monkeypatch.setitem(sys.modules, "mindspeed.patch_utils", manager)
    monkeypatch.setattr(torch, "compile", dummy)
    monkeypatch.setattr(torch.Tensor, "view", dummy)
    look = lambda: seen.append((torch.compile, torch.Tensor.view) == own)  # noqa: E731
    build, step = vllm_api.build, fake_vllm.step
    monkeypatch.setattr(vllm_api, "build", lambda a: (look(), build(a))[1])
    monkeypatch.setattr(fake_vllm, "step", lambda: (look(), step())[1])
    engine = type(engine)(engine.options, engine._device)
    assert torch.compile is dummy
    engine.update_weights(0)
    fake_vllm.script = {"0-0-0": ([7], "stop")}
    engine.submit([request_of(0)])
    engine.poll(5)
    assert seen == [True, True] and torch.compile is torch.Tensor.view is dummy


def drawn(engine, fake_vllm, request_of, monkeypatch, *polls):
    """What a scripted vLLM draws in each step, and whether its requests have generators."""
    numbers, step = [], fake_vllm.step
    monkeypatch.setattr(fake_vllm, "step", lambda: (numbers.append(fake_vllm.api.draw()), step())[1])
    for groups in polls:
        fake_vllm.script |= {f"0-{g}-0": ([7] * (2 + g), "length") for g in groups}
        engine.submit([request_of(g) for g in groups])
        assert engine.poll(5)
    seeded = [call[3][2] for call in fake_vllm.calls if call[0] == "add"]
    return numbers, seeded


@pytest.mark.parametrize("options", [{"batched": True}, {"batched": False, "request_seeds": True}])
def test_requests_have_generators_where_one_kernel_serves_all_or_it_is_asked_for(
    make_engine, fake_vllm, request_of, monkeypatch, options
) -> None:
    engine = make_engine(**options)
    engine.update_weights(0)
    numbers, seeded = drawn(engine, fake_vllm, request_of, monkeypatch, [0, 1])
    assert seeded == [True] * 2 and numbers[0][0] == "trainer"


def test_elsewhere_an_engine_has_one_generator_of_its_own(make_engine, fake_vllm, request_of, monkeypatch) -> None:
    """No request has one, so that no step loops over them. It goes on from poll to poll, whatever the trainer draws
    meanwhile, and starts anew with the first request of an engine that was idle."""
    engine = make_engine(batched=False)
    engine.update_weights(0)
    numbers, seeded = drawn(engine, fake_vllm, request_of, monkeypatch, [0, 1])
    assert seeded == [False] * 2 and numbers == [(100, 1), (100, 2)]
    assert fake_vllm.api.draw() == ("trainer", 8)
    assert engine.poll(5) and numbers[2:] == [(100, 3)]
    engine.submit([request_of(1)])
    assert engine.poll(5) and numbers[3:] == [(101, 1), (101, 2), (101, 3)]
    assert fake_vllm.api.draw() == ("trainer", 9)


def test_the_trainer_keeps_its_stream(make_engine, fake_vllm, request_of, monkeypatch) -> None:
    """vLLM on CUDA takes a stream of its own when it is built; each side waits for the other's work in turn."""
    engine = make_engine()
    api, build = fake_vllm.api, vllm_api.build
    own = type(api.stream)("engine", api.log)
    monkeypatch.setattr(vllm_api, "build", lambda a: (api.set_stream(own), build(a))[1])
    engine = type(engine)(engine.options, engine._device)
    assert api.stream.name == "trainer" and api.log == [("trainer", "engine")]
    engine.update_weights(0)
    fake_vllm.script = {"0-0-0": ([7], "stop")}
    step, seen = fake_vllm.step, []
    monkeypatch.setattr(fake_vllm, "step", lambda: (seen.append(api.stream.name), step())[1])
    engine.submit([request_of(0)])
    engine.poll(5)
    assert seen == ["engine"] and api.stream.name == "trainer"
    assert api.log[1:] == [("engine", "trainer"), ("trainer", "engine")]


class Core:
    """Steps of vLLM's engine core, before and after it stopped to look whether the device is done."""

    def before(self):
        if len(self.batch_queue) < self.batch_queue_size and not self.batch_queue[-1][0].done():
            return None, True
        return self.batch_queue.pop()

    def after(self):
        return None if len(self.batch_queue) < self.batch_queue_size else self.batch_queue.pop()


@pytest.mark.parametrize("step, looks", [(Core.before, True), (Core.after, False), (None, False)])
def test_asynchronous_steps_that_look_at_the_clock(step, looks) -> None:
    core = type("EngineCore", (), {"step_with_batch_queue": step} if step else {})
    assert vllm_api.steps_look_at_the_clock(core) == looks
    given = {"model": "m", "async_scheduling": True}
    assert vllm_api.usable(given, {"async_scheduling"}, core) == given | {"async_scheduling": not looks}
    assert vllm_api.usable(given, (), core) == {"model": "m"}


def test_the_steps_of_this_vllm_do_not_depend_on_the_clock() -> None:
    """The real step of an engine core whose device is done at random: two ranks take the same steps."""
    from vllm.v1.engine.core import EngineCore

    def steps(seed):
        chance, left, queue = random.Random(seed), iter(range(6)), collections.deque()
        scheduled = SimpleNamespace(total_num_scheduled_tokens=1, pending_structured_output_tokens=False)
        work = SimpleNamespace(done=lambda: chance.random() < 0.5, result=lambda: "tokens")
        core = SimpleNamespace(
            batch_queue=queue,
            batch_queue_size=2,
            scheduler=SimpleNamespace(
                has_requests=lambda: next(left, None) is not None,
                schedule=lambda *_: scheduled,
                get_grammar_bitmask=lambda _: None,
                update_from_output=lambda *_: {},
            ),
            model_executor=SimpleNamespace(execute_model=lambda *_, **__: work, sample_tokens=lambda *_, **__: work),
            is_mm_encoder_only=False,
            is_pooling_model=False,
            log_error_detail=lambda _: contextlib.nullcontext(),
            capture_iteration_details=lambda _: contextlib.nullcontext(),
            **dict.fromkeys(
                ("_should_throttle_prefills", "_process_aborts_queue", "_attach_iteration_details"), lambda *_: None
            ),
            _attach_weight_version=lambda _: None,
        )
        return [EngineCore.step_with_batch_queue(core) for _ in range(7)]

    assert not vllm_api.steps_look_at_the_clock(EngineCore) and steps(1) == steps(2)


@pytest.mark.parametrize("count, said", [(72, "captured 72 graphs"), (0, "captured no graphs")])
def test_graphs_are_counted(make_engine, capsys, count, said) -> None:
    """An engine whose compiler does nothing decodes without them, and says nothing itself."""
    make_engine(graphs=count)
    assert said in capsys.readouterr().out


def test_names_of_torch_are_the_trainers_again(make_engine, fake_vllm, monkeypatch) -> None:
    """As vllm-ascend 0.18 replaces them when it is built, and here too when it wakes; then it finds its own again."""
    names, seen, engine = [(torch, "Event"), (torch.cuda, "Event"), (torch, "sum")], [], make_engine()
    now = lambda: [getattr(module, name) for module, name in names]  # noqa: E731
    trainers, build = now(), vllm_api.build

    def replace(value):
        seen.append(now())
        for module, name in names:
            monkeypatch.setattr(module, name, value)

    monkeypatch.setattr(vllm_api, "build", lambda given: (replace(max), build(given))[1])
    monkeypatch.setattr(fake_vllm, "wake_up", lambda tags: replace(len))
    engine = type(engine)(engine.options, engine._device)
    assert now() == trainers
    engine.sleep()
    engine.wake()
    assert now() == trainers and seen == [trainers, [max] * 3]


def test_an_engine_is_not_built_under_a_torch_compile_of_unknown_origin(make_engine, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function)
    with pytest.raises(ValueError, match=r"torch\.compile is .*test_process_state\..* decode without graphs; take a M"):
        make_engine()
