"""Weights that are not the model's are refused while they are loaded, also where Megatron would load what fits."""

import pytest
import torch

from mindspeed_rl_plugin.launch.weights_fit import must_fit


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
        (layers(1), "2 weights of the model are not in it (1.bias, 1.weight)"),
        (layers(4), "4 of its weights have no place here (2.bias, 2.weight, 3.bias, ...)"),
        (layers(2, 3), "4 have other shapes (0.bias (3,) there and (2,) here, 0.weight (3, 3) there and"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(saved, expected):
    model = layers(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError) as error, must_fit([model], "the checkpoint of here"):
        load_as_megatron_does(model, saved.state_dict())
    assert str(error.value).startswith("the checkpoint of here does not fit the model") and expected in str(error.value)
    assert "export`, then `import`" in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert "load_state_dict" not in vars(model)


def test_what_fits_is_loaded_whatever_extra_states_there_are():
    model, saved = layers(2), layers(2)
    state = saved.state_dict() | {"0._extra_state": torch.zeros(1)}
    with must_fit([model], "x"):
        load_as_megatron_does(model, state)
    assert torch.equal(model[1].weight, saved[1].weight)


def test_megatron_leaving_the_process_is_an_error():
    with pytest.raises(ValueError, match="Megatron could not load the checkpoint, and says why"):
        with must_fit([], "the checkpoint"):
            raise SystemExit
