"""HostAdam computes what torch's Adam and AdamW compute, and keeps its step where Apex does."""

import pytest
import torch

from mindspeed_rl_plugin.host import optimizer as host_optimizer
from mindspeed_rl_plugin.host.optimizer import HostAdam


def problem():
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,), (2, 2))]
    gradients = [[torch.randn(p.shape, generator=generator) for p in params] for _ in range(5)]
    return params, gradients


def descend(optimizer, params, gradients):
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("piece", [host_optimizer.PIECE, 5, 1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_torch(decoupled, piece, monkeypatch):
    monkeypatch.setattr(host_optimizer, "PIECE", piece)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    decays = (0.1, 0.0)
    results = []
    for make in (
        lambda groups: HostAdam(groups, **settings, adam_w_mode=decoupled),
        lambda groups: (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups, **settings, foreach=False),
    ):
        params, gradients = problem()
        groups = [
            {"params": params[:2], "weight_decay": decays[0]},
            {"params": params[2:], "weight_decay": decays[1]},
        ]
        results.append(descend(make(groups), params, gradients))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_resumes_from_its_state_bitwise():
    params, gradients = problem()
    whole = descend(HostAdam(params, weight_decay=0.1), params, gradients)

    params, gradients = problem()
    first = HostAdam(params, weight_decay=0.1)
    descend(first, params, gradients[:2])
    second = HostAdam(params, weight_decay=0.1)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["step"] == 2
    for ours, expected in zip(descend(second, params, gradients[2:]), whole, strict=True):
        assert torch.equal(ours, expected)


def test_state_that_was_loaded_can_be_swapped(tmp_path, monkeypatch):
    """A file's memory cannot be resized."""
    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", torch.optim.Optimizer.load_state_dict)
    host_optimizer.own_loaded_state()
    param = torch.nn.Parameter(torch.ones(2))
    first, second = (torch.optim.AdamW([param]) for _ in range(2))
    descend(first, [param], [[torch.ones(2)]])
    torch.save(first.state_dict(), tmp_path / "state")
    loaded = torch.load(tmp_path / "state")
    assert not loaded["state"][0]["exp_avg"].untyped_storage().resizable()
    second.load_state_dict(loaded)
    for name, value in second.state[param].items():
        assert value.untyped_storage().resizable() and torch.equal(value, first.state[param][name])


def test_every_group_counts_its_steps():
    """Megatron asserts that the steps of all groups agree, also of those without parameters on this rank."""
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = HostAdam([{"params": [param]}, {"params": []}])
    descend(optimizer, [param], [[torch.ones(2)]] * 3)
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]


def test_what_a_host_cannot_do_is_refused():
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="capturable=True.*--optimizer-cuda-graph"):
        HostAdam([param], capturable=True)


def test_what_is_not_contiguous_is_updated_too():
    param = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    before = param.detach().clone()
    param.grad = torch.ones_like(param)
    HostAdam([param], lr=0.5, weight_decay=0.0).step()
    torch.testing.assert_close(param.detach(), before - 0.5)


def test_temporaries_do_not_grow_with_the_parameter():
    param = torch.nn.Parameter(torch.ones(8 * host_optimizer.PIECE))
    param.grad = torch.ones_like(param)
    optimizer = HostAdam([param])
    optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    most = max(e.self_cpu_memory_usage for e in profile.events())
    assert 0 < most <= 4 * host_optimizer.PIECE, f"{most} bytes at once"
