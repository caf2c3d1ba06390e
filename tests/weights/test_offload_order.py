"""The order of copies and other work: what may be touched when, and that a forgotten wait shows."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hostile import SlowCopier, poisoned_release, poisoned_revive
from test_offload import copies_of, same, state_of, trainer

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import RLConfig, add_flags
from mindspeed_rl_plugin.device import Device
from mindspeed_rl_plugin.loop import monitoring
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.weights import offload

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(offload, "_revive", poisoned_revive)
    monkeypatch.setattr(offload, "_release", poisoned_release)


def step(model, optimizer, _):
    """An optimizer step that uses main parameters, moments and gradients; the parameters after it."""
    inner = optimizer.optimizer
    for p in inner.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    inner.step()
    for main, view in zip(inner.param_groups[0]["params"], model.buffers[0].param_data.split(4096), strict=False):
        view.copy_(main)
    return copies_of(model, optimizer)


def cycle(state, *, wait=True):
    """Out and back as the loop does it; wait: whether anyone waits for the optimizer. Returns what a checkpoint in
    between saves."""
    state.start_offload(["grads", "optimizer"])  # when the last update has ended
    state.start_offload(["grads", "optimizer"])  # when the rollout begins
    saved = copies_of(state.chunks[0], state.optimizer)
    state.finish_offload()
    state.start_offload(["params"])
    state.finish_offload()
    state.onload(["params"])
    state.start_onload(["optimizer"])
    if wait:
        state.onload()
    return saved


class Deferred:
    """Copies that are not made before someone waits for them, the latest that a device could make them."""

    def __init__(self, copies: Callable[[], None]) -> None:
        self._copies = copies

    def wait(self) -> None:
        copies, self._copies = self._copies, lambda: None
        copies()

    synchronize = wait


class DeferringDevice(Device):
    """The CPU with such copies."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def copier(self):
        return self

    def start(self, copies: Callable[[], None]) -> Deferred:
        return Deferred(copies)


class SlowDevice(Device):
    def __init__(self):
        super().__init__("cpu")

    def copier(self):
        return SlowCopier()


DEVICES = pytest.mark.parametrize("device", [DeferringDevice(), SlowDevice()], ids=["deferred", "slow"])


@DEVICES
def test_training_is_bitwise_that_without_swaps(device):
    plain, swapped = trainer(Device("cpu")), trainer(device)
    for _ in range(3):
        before = copies_of(*swapped[:2])
        assert same(before, cycle(swapped[2])) and not swapped[2].off_device
        assert same(step(*plain), step(*swapped))


@DEVICES
def test_what_began_to_leave_may_stay_and_change(device):
    """An update that comes although its optimizer state was on its way out; later swaps carry the new values."""
    plain, swapped = trainer(Device("cpu")), trainer(device, verify=True)
    swapped[2].start_offload(["grads", "optimizer"])
    assert swapped[2].onload() == 0
    for _ in range(2):
        assert same(step(*plain), step(*swapped))
        assert swapped[2].finish_offload() == 0
        cycle(swapped[2])


def test_a_missing_wait_for_the_optimizer_shows():
    model, optimizer, state = trainer(DeferringDevice())
    cycle(state, wait=False)
    assert state.off_device == {"optimizer", "grads"}
    assert any(t.isnan().any() for t in step(model, optimizer, state))


def test_what_leaves_may_be_read_until_it_is_freed_and_what_arrives_may_leave_at_once():
    model, optimizer, state = trainer(SlowDevice())
    before = copies_of(model, optimizer)
    state.start_offload(["params"])
    assert same(before, state_of(model, optimizer)) and not state.off_device
    state.finish_offload()
    assert model.module[0].weight.untyped_storage().nbytes() == 0 and state.off_device == {"params"}
    state.start_onload()
    state.offload()
    state.onload()
    assert same(before, state_of(model, optimizer))


def test_at_the_end_nothing_is_copied(monkeypatch):
    model, optimizer, state = trainer(DeferringDevice())
    cycle(state)
    state.start_offload(["optimizer"])
    monkeypatch.setattr(state.device, "host_empty", None)
    monkeypatch.setattr(state.device, "start", None)
    state.discard()
    assert all(t.untyped_storage().nbytes() == 0 for t in state_of(model, optimizer) if t.numel() > 1)
    assert model.module[0].weight.main_grad.untyped_storage().nbytes() == 0


def test_a_host_without_room_is_refused_before_anything_leaves(monkeypatch):
    model, optimizer, state = trainer(Device("cpu"))
    before = copies_of(model, optimizer)
    monkeypatch.setattr(state.device, "host_available", lambda: 100_000)
    # Parameters (4 x 8302 bytes) and optimizer state (3 x 4 x 8192), each rounded up to a power of two.
    with pytest.raises(MemoryError, match=f"--rl-swap needs {(64 << 10) + (128 << 10)} more .* and 100000 are free"):
        state.offload()
    assert not state.off_device and same(before, state_of(model, optimizer))
    monkeypatch.setattr(state.device, "host_available", lambda: 1 << 30)
    cycle(state)  # with what was taken before the refusal
    monkeypatch.setattr(state.device, "host_available", lambda: 0)
    cycle(state)  # the second time nothing more is needed


def test_a_stage_waits_for_its_own_work_only(monkeypatch):
    """Else copies would end with the stage that they pass beside. What run.json says of the run stands there too."""
    kept, device = {}, Device("cpu")
    monkeypatch.setattr(monitoring, "Monitor", lambda *given, **named: kept.update(named))
    monkeypatch.setattr(monitoring, "get_device", lambda: device)
    writers = dict.fromkeys(("get_tensorboard_writer", "get_wandb_writer"), lambda: None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(**writers))
    args = add_flags(ArgumentParser()).parse_args(["--rl-algorithm", "grpo"])
    args.save, args.train_iters, config = "/nowhere", 1, RLConfig.from_args(args)
    inputs = SimpleNamespace(args=args, config=config, algorithm=resolve(config.algorithm), flags={"--rl-a": "b"})
    inputs.data, inputs.held_out = SimpleNamespace(at=lambda place: SimpleNamespace(tokens=(1,))), None
    inputs.tokenizer, inputs.sizes = SimpleNamespace(decode=str), Arithmetic(1, 8, 8, 1, 1, 1, 1, 1)
    monitoring.make_monitor(inputs, SimpleNamespace(rank=0, world=1), Start("fresh", None, 0, None, None))
    assert kept["synchronize"] == device.synchronize_stream
    assert kept["info"]["parts"].startswith("grpo: advantage group-norm") and kept["info"]["flags"] == inputs.flags
