"""Given experts: what Megatron's own routers make of them, and routes that are refused."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from mindspeed_rl_plugin.forward import ForwardSettings, collate, router_replay
from mindspeed_rl_plugin.forward.collate import _parts
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId

EXPERTS, TOPK, TOKENS, LAYERS = 16, 4, 400, 3
OPTIONS = {
    "softmax": {},
    "softmax before": dict(use_pre_softmax=True),
    "groups": dict(use_pre_softmax=True, num_groups=4, group_topk=2, scaling_factor=2.5),
    "sigmoid": dict(score_function="sigmoid"),
    "bias": dict(score_function="sigmoid", expert_bias=torch.arange(16.0) / 16, num_groups=4, group_topk=2),
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(router_replay, "tallies", {})
    monkeypatch.setattr(router_replay, "checked", set())
    router_replay.weights_version[0] = 0


def drawn(count, seed=0):
    """`[count, TOPK]` different experts."""
    return torch.rand(count, EXPERTS, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :TOPK]


def router_of(layer=0):
    return SimpleNamespace(config=SimpleNamespace(num_moe_experts=EXPERTS), topk=TOPK, layer_number=layer + 1)


def replayed(routing, ids, given=None, logits=None, layer=0, router=None):
    """ids: `[LAYERS, TOKENS, TOPK]`."""
    part = torch.ones(TOKENS, dtype=torch.uint8) if given is None else given.to(torch.uint8)
    its = router_replay.Routes(ids.to(torch.uint8), part, 1)
    return router_replay.route(router or router_of(layer), layer, routing, logits, routes=its, at=None)


@pytest.mark.parametrize("name", OPTIONS)
def test_scores_and_gradients_are_those_of_a_router_that_chose_so(name):
    """Against Megatron's own function with `precomputed_indices`; tokens without routes choose by themselves."""
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1), requires_grad=True)
    options, core = OPTIONS[name], moe_utils.topk_routing_with_score_function
    given, ids = torch.arange(TOKENS) % 5 > 0, drawn(TOKENS)
    scores, chosen = replayed(lambda x: core(x, TOPK, **options), ids.expand(LAYERS, -1, -1), given, logits)
    own = core(logits, TOPK, **options)
    _, mine = own[1].float().topk(TOPK)
    wanted = core(logits, TOPK, precomputed_indices=torch.where(given[:, None], ids, mine), **options)
    assert torch.equal(chosen, wanted[1]) and torch.equal(chosen[~given], own[1][~given])
    torch.testing.assert_close(scores, wanted[0], rtol=1e-6, atol=0)
    assert torch.equal(scores[~given], own[0][~given]), "own choices are the same, bit for bit"
    along = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2))
    (found,), (right,) = (torch.autograd.grad((s * along).sum(), logits) for s in (scores, wanted[0]))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-7)


def test_a_router_whose_choice_is_not_replaced_is_refused():
    logits, ids = torch.randn(TOKENS, EXPERTS), drawn(TOKENS).expand(LAYERS, -1, -1)

    def sorts(x):
        ids = x.argsort(1, descending=True)[:, :TOPK]
        return x.softmax(1), torch.zeros(x.shape).scatter(1, ids, 1).bool()

    def keeps(x):
        sorts_too = torch.topk(x, TOPK)
        assert len(sorts_too) == 2
        return sorts(x)

    for routing, message in (
        (sorts, "of layer 1 chooses without torch.topk"),
        (keeps, "of layer 1 takes other experts"),
    ):
        with pytest.raises(ValueError, match=message):
            replayed(routing, ids, logits=logits)


def rollout(change=lambda ids: ids, agree=0.98, layers=LAYERS, part=None, numbers=None):
    """Routes of an engine that chooses as the trainer in most slots, after a change; the metrics."""
    core = moe_utils.topk_routing_with_score_function
    logits = [torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(9 + i)) for i in range(layers)]
    noise = [torch.rand(TOKENS, 1, generator=torch.Generator().manual_seed(99 + i)) > agree for i in range(layers)]
    own = torch.stack([torch.where(n, drawn(TOKENS, 5), x.topk(TOPK)[1]) for n, x in zip(noise, logits, strict=True)])
    ids = change(own)
    for layer in range(layers):
        replayed(lambda x: core(x, TOPK), ids, part, logits=logits[layer], layer=layer)
    return router_replay.differences(numbers or tuple(range(2, 2 + layers)))


def test_a_rollout_s_routes_are_counted_by_layer():
    metrics = rollout()
    assert 0.01 < metrics["router/differ"] < 0.03
    assert metrics.keys() == {"router/differ", "router/differ/2", "router/differ/3", "router/differ/4"}
    assert not any(counts[0].any() for counts in router_replay.tallies.values())
    assert rollout(lambda ids: ids.roll(1, 1))["router/differ"] > 0.5, "only the first rollout is checked"


WRONG = {
    "zeros": (torch.zeros_like, r"layer 2 .* name an expert twice for 400 tokens"),
    "physical ids": (lambda ids: (5 * ids + 3) % EXPERTS, "layer 2 .* agree with the trainer.s own choice in 0.2"),
    "by a token": (lambda ids: ids.roll(1, 1), r"those of the token before in 0.2"),
    "by a layer": (lambda ids: ids.roll(1, 0), r"layer 2 .* agree"),
    "of other rows": (lambda ids: ids[:, torch.randperm(TOKENS)], r"layer 2 .* agree"),
    "a layer of zeros": (lambda ids: torch.cat([ids[:2], 0 * ids[2:]]), r"layer 4 .* name an expert twice"),
}


def after_an_interruption(ids):
    """In the second half of the tokens, those of the token before."""
    return torch.cat([ids[:, : TOKENS // 2], ids.roll(1, 1)[:, TOKENS // 2 :]], 1)


def unread(ids):
    """Where tokens were left unread, those of the token before."""
    return torch.where(((torch.arange(TOKENS) % 10) == 5)[:, None], ids.roll(1, 1), ids)


def test_parts_after_an_interruption_are_checked_by_themselves():
    part = torch.where(torch.arange(TOKENS) < TOKENS // 2, 1, 3)
    with pytest.raises(ValueError, match="layer 2 after an interruption agree"):
        rollout(after_an_interruption, part=part)
    assert rollout(after_an_interruption, part=part + part // 3)["router/differ"] > 0.05, "of older weights"


def test_few_tokens_are_checked_as_soon_as_there_are_more():
    part = torch.where((torch.arange(TOKENS) % 10) == 5, 2, 1)
    part[:300] = part[:300].clamp(max=1)
    assert rollout(unread, part=part)["router/differ"] > 0.05 and router_replay.checked == {router_replay.PARTS[0]}
    rollout(unread, part=part)
    with pytest.raises(ValueError, match="layer 2 of the first token after an interruption agree"):
        rollout(unread, part=part)


def test_parts_of_rows():
    """Token 4 ended the first part of row 0: it was sampled, but not read, so its routes are of the second part."""
    rows = Rows(
        (SampleId(0, 0, 0), SampleId(0, 0, 1)), {"tokens": Ragged.from_rows([torch.arange(8), torch.arange(3)])}
    )
    rows = rows.with_columns(
        segments=Ragged.from_rows([torch.tensor([[2, 0], [5, 1], [7, 2]]), torch.tensor([[1, 1]])])
    )
    for version, first, second in ((0, [1, 1, 1, 1, 2, 3], 1), (1, [4, 4, 4, 4, 2, 3], 1), (2, [4] * 6, 4)):
        router_replay.weights_version[0] = version
        assert [row.tolist() for row in _parts(rows, rows["tokens"]).rows()] == [[*first, 2, 0], [second, second, 0]]


@pytest.mark.parametrize("wrong", WRONG)
def test_routes_of_something_else_are_refused(wrong):
    change, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        rollout(change)


def test_a_single_layer_with_experts_is_not_compared_with_itself():
    assert rollout(agree=0.86, layers=1)["router/differ/2"] > 0.1


def test_a_layer_that_got_no_routes_is_refused():
    with pytest.raises(ValueError, match="1 of 3 layers with experts got no routes, as 4"):
        rollout(layers=2, numbers=(2, 3, 4))


def test_skewed_experts_prove_nothing():
    """Where nearly all tokens choose the same experts, those of other tokens agree too: that is no reason to refuse."""
    counts = [1000, 0, 960, 955, 1000, 955]
    router_replay._check("where", *counts)
    with pytest.raises(ValueError, match="at least 0.850"):
        router_replay._check("where", 1000, 0, 840, 700, 100, 100)


@pytest.mark.parametrize(
    ("layers", "most", "length", "message"),
    [
        (2, 15, 5, "2 layers and experts up to 15, the model has 3 layers with experts 0 to 15"),
        (3, 16, 5, "3 layers and experts up to 16"),
        (3, 15, 6, "'routes' has rows of .6. entries for .5. tokens"),
    ],
)
def test_routes_of_another_model_or_row_are_refused(layers, most, length, message):
    rows = Rows((SampleId(0, 0, 0),), {"tokens": Ragged.from_rows([torch.arange(5)])})
    rows = rows.with_columns(routes=Ragged.from_rows([torch.full((length, layers, 2), most, dtype=torch.uint8)]))
    with pytest.raises(ValueError, match=message):
        collate(rows, ForwardSettings(1, 8, 9, routed=(2, 3, 4), experts=16))
