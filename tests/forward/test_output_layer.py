"""How an unmodified model comes to give log-probs: its output layer is another one for one call, and itself again.

The arithmetic is tested in test_chunked.py, real Megatron models in tests/update; here a model written by hand shows
what is called when.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.forward import output_layer
from mindspeed_rl_plugin.forward import settings as settings_module
from mindspeed_rl_plugin.forward.collate import MicroBatch
from mindspeed_rl_plugin.forward.settings import ForwardSettings

pytestmark = pytest.mark.quick
ROWS, LENGTH = 2, 3
SETTINGS = ForwardSettings(micro_batch_size=ROWS, seq_length=LENGTH, vocab_size=5, chunk_tokens=1)


class Layer(torch.nn.Linear):
    """As much of a column parallel linear as is looked at."""

    sequence_parallel = gradient_accumulation_fusion = False

    def __init__(self):
        super().__init__(4, 5, bias=False)

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return torch.nn.functional.linear(input_, self.weight if weight is None else weight), None


class Model(torch.nn.Module):
    """A last stage."""

    def __init__(self, tail=lambda x: x, tied=None):
        super().__init__()
        self.output_layer, self.tail, self.tied = Layer(), tail, tied

    def forward(self, tokens, position_ids, attention_mask):
        hidden = tokens.t()[..., None] * torch.ones(4)
        logits, _ = self.output_layer(hidden, weight=self.tied)
        return self.tail(logits).transpose(0, 1).contiguous()


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


@pytest.fixture
def batch():
    tokens = torch.arange(1.0, 1 + ROWS * LENGTH).view(ROWS, LENGTH)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    return MicroBatch(
        0, tokens, tokens.long(), tokens.long(), False, mask, torch.tensor([LENGTH] * ROWS), {}, torch.arange(ROWS)
    )


@pytest.fixture(autouse=True)
def scored(monkeypatch):
    """What the layer was asked to score; the answer holds the hidden states, so that the way back can be seen."""
    asked = []

    def score(hidden, weight, layer, batch, settings, *, entropy_grad):
        asked.append((weight, entropy_grad))
        return torch.stack([hidden[..., 0], -hidden[..., 0]], -1)

    monkeypatch.setattr(output_layer, "score", score)
    return asked


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: Wrapper(Wrapper(m))])
@pytest.mark.parametrize("tied", [None, torch.nn.Parameter(torch.ones(5, 4))])
def test_the_model_returns_what_its_layer_scored(batch, scored, wrap, tied):
    model = Model(tied=tied)
    hooked = []
    model.output_layer.register_forward_pre_hook(lambda *given: hooked.append("awaited"))
    got = output_layer.forward_scored(wrap(model), batch, SETTINGS, entropy_grad=True)
    assert torch.equal(got, torch.stack([batch.tokens, -batch.tokens], -1))
    assert scored == [(model.output_layer.weight if tied is None else tied, True)] and hooked == ["awaited"]
    assert "forward" not in vars(model.output_layer)
    assert model(batch.tokens, None, None).shape == (ROWS, LENGTH, 5)


def test_the_layer_is_itself_again_with_a_forward_of_its_own_and_after_an_error(batch, monkeypatch):
    own, plain = Model(), Model()
    own.output_layer.forward = replaced = lambda *inputs, **more: (torch.zeros(LENGTH, ROWS, 5), None)
    output_layer.forward_scored(own, batch, SETTINGS)
    assert own.output_layer.forward is replaced
    monkeypatch.setattr(output_layer, "score", lambda *given, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output_layer.forward_scored(plain, batch, SETTINGS)
    assert "forward" not in vars(plain.output_layer)


def test_a_stage_without_an_output_layer_runs_as_it_is(batch, scored):
    stage = Wrapper(torch.nn.Module())
    stage.module.forward = lambda tokens, position_ids, mask: tokens + 1
    assert torch.equal(output_layer.forward_scored(stage, batch, SETTINGS), batch.tokens + 1) and not scored


def test_a_model_that_works_on_its_logits_is_refused_but_not_one_that_diverged(batch):
    """Megatron has its own report of a loss that is no number; the log-probs must come to it."""
    tokens = batch.tokens.clone()
    tokens[0, 1] = torch.nan
    nan = dataclasses.replace(batch, tokens=tokens)
    got = output_layer.forward_scored(Model(), nan, SETTINGS)
    assert torch.equal(got.isnan().all(-1), tokens.isnan()) and got.isnan().sum() == 2
    tails = (torch.tanh, lambda x: x[:-1], lambda x: 2 * x)
    wrong = [(batch, tail) for tail in tails]
    wrong += [(nan, tail) for tail in (tails[2], torch.nan_to_num, torch.Tensor.double)]
    for given, tail in wrong:
        with pytest.raises(ValueError, match="Model.*chunk-tokens 0"):
            output_layer.forward_scored(Model(tail=tail), given, SETTINGS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", torch.nn.Parameter(torch.zeros(5))),
        ("embedding_activation_buffer", []),
        ("explicit_expert_comm", True),
        ("gtp_remat_size", 2),
        (None, None),
    ],
)
def test_a_layer_that_does_more_or_is_of_another_kind_is_refused(batch, name, value):
    model = Model()
    if name is None:
        model.output_layer = torch.nn.Linear(4, 5, bias=False)
    else:
        setattr(model.output_layer, name, value)
    with pytest.raises(ValueError, match="output layer"):
        output_layer.forward_scored(model, batch, SETTINGS)


@pytest.mark.parametrize(
    ("kind", "more", "given", "chunk"),
    [
        ("npu", {}, None, 441),  # the logits of 8192 tokens would take 2.3 GiB
        ("npu", {"seq_length": 440}, None, 0),  # 880 tokens: not more than two chunks
        ("cpu", {"seq_length": 440}, None, 13),
        ("cpu", {}, None, 110),  # 1024 columns of all 8192 tokens
        ("cpu", {"padded_vocab_size": 256}, None, 0),
        ("cpu", {}, 0, 0),
        ("npu", {"padded_vocab_size": 256}, 7, 7),
    ],
)
def test_chosen_by_the_size_of_the_logits_unless_given(monkeypatch, kind, more, given, chunk):
    sizes = {"micro_batch_size": 2, "seq_length": 4096, "padded_vocab_size": 151_936, "tensor_model_parallel_size": 2}
    others = {"context_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False}
    args = SimpleNamespace(**{**sizes, **others, "create_attention_mask_in_dataloader": True, **more})
    monkeypatch.setattr(settings_module, "get_device", lambda: SimpleNamespace(kind=kind))
    settings = ForwardSettings.from_args(args, vocab_size=250, temperature=1.0, chunk_tokens=given)
    assert settings.chunk_tokens == chunk
