"""Weights that are not the model's are refused while they are loaded, also where Megatron would load what fits."""

import contextlib

import pytest
import torch

from mindspeed_rl_plugin.launch.weights_fit import must_fit

pytestmark = pytest.mark.quick


def load_as_megatron_does(module, state):
    """`load_model_state_dict` of core 0.16 on."""
    try:
        module.load_state_dict(state, strict=True)
    except Exception:  # noqa: BLE001 - as there
        module.load_state_dict(state, strict=False)


def layers(count, width=2):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count)))


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (layers(1), ("1.bias (2,) is missing", "1.weight (2, 2) is missing")),
        (layers(4), ("2.bias (2,) is unknown", "3.weight (2, 2) is unknown")),
        (layers(2, 3), ("0.bias has shape (3,), not (2,)", "1.weight has shape (3, 3), not (2, 2)")),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(saved, expected):
    model = layers(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError) as error, must_fit([model], "the checkpoint of here"):
        load_as_megatron_does(model, saved.state_dict())
    message = str(error.value)
    assert message.startswith("the checkpoint of here does not fit the model") and "export`, then `import`" in message
    assert all(line in message for line in expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert "load_state_dict" not in vars(model)


class Wrapper(torch.nn.Module):
    """As Megatron's wrappers are; core 0.12 loads into the model inside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def load_state_dict(self, state, strict=True):
        self.module.load_state_dict(state, strict=strict)


@pytest.mark.parametrize("inside", [False, True])
def test_weights_are_compared_in_the_model_and_in_what_wraps_it(inside):
    chunk = Wrapper(layers(2))
    chunk.state_dict = chunk.module.state_dict
    with pytest.raises(ValueError, match="1.bias .* is missing"), must_fit([chunk], "x"):
        load_as_megatron_does(chunk.module if inside else chunk, layers(1).state_dict())
    assert "load_state_dict" not in {*vars(chunk), *vars(chunk.module)}


def test_what_fits_is_loaded_whatever_extra_states_there_are_and_what_is_free_need_not_fit():
    model, saved = layers(2), layers(2)
    state = saved.state_dict() | {"0._extra_state": torch.zeros(1), "1.bias": torch.zeros(7)}
    with must_fit([model], "x", free="1.bias"), contextlib.suppress(RuntimeError):
        model.load_state_dict(state, strict=False)
    assert torch.equal(model[1].weight, saved[1].weight)
    with must_fit([model], "x"), pytest.raises(ValueError, match="1.bias"):
        model.load_state_dict(state, strict=False)


def test_an_embedding_that_layers_for_multi_token_prediction_share_may_be_there_twice():
    """Under dualpipev MindSpeed-LLM gives their chunk the embedding of its stage when they run first."""
    chunk, saved = layers(2), layers(2).state_dict()
    again = {"embedding.word_embeddings.weight": torch.zeros(2)}
    chunk.mtp, chunk.pre_process = None, False
    with must_fit([chunk], "x"), pytest.raises(ValueError, match="embedding.* is unknown"):
        chunk.load_state_dict(saved | again, strict=False)
    chunk.mtp = torch.nn.Identity()
    with must_fit([chunk], "x"):
        chunk.load_state_dict(saved | again, strict=False)
    assert torch.equal(chunk[1].weight, saved["1.weight"])


def test_megatron_leaving_the_process_is_an_error():
    with pytest.raises(ValueError, match="could not load the checkpoint"):
        with must_fit([], "the checkpoint"):
            raise SystemExit
