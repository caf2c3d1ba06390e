"""The value head in a model's place of logits, and what it takes from a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_rl_plugin.critic.value_head import ValueHead, give_value_head

pytestmark = pytest.mark.quick

CONFIG = SimpleNamespace(hidden_size=4, params_dtype=torch.float32, sequence_parallel=False)


class Chunk(torch.nn.Module):
    def __init__(self, post_process=True, rows=10):
        super().__init__()
        self.config, self.post_process = CONFIG, post_process
        self.decoder = torch.nn.Linear(4, 4)
        if post_process:
            self.output_layer = torch.nn.Linear(4, rows, bias=False)


def test_only_the_last_stage_gets_a_head():
    assert not hasattr(give_value_head(Chunk(post_process=False)), "output_layer")
    chunk = give_value_head(Chunk())
    assert isinstance(chunk.output_layer, ValueHead)
    assert [tuple(p.shape) for n, p in chunk.named_parameters() if "output" in n] == [(1, 4)]
    odd = Chunk()
    del odd.output_layer
    with pytest.raises(ValueError, match="Chunk.*output_layer"):
        give_value_head(odd)


def test_a_fresh_head_says_zero_and_values_are_float32():
    head = ValueHead(CONFIG).bfloat16()
    hidden = torch.randn(3, 2, 4, dtype=torch.bfloat16)
    values, bias = head(hidden, weight=None, runtime_gather_output=None)
    assert values.shape == (3, 2, 1) and values.dtype == torch.float32 and bias is None and not values.any()
    torch.nn.init.ones_(head.weight)
    values, _ = head(hidden)
    torch.testing.assert_close(values[..., 0], hidden.float().sum(-1))
    head.reset_parameters()
    assert not head.weight.any()


@pytest.mark.parametrize("rows", [10, 5])
def test_a_language_model_is_loaded_all_but_its_output_layer(rows):
    source, chunk = Chunk(rows=rows), give_value_head(Chunk())
    chunk.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(chunk.decoder.weight, source.decoder.weight) and not chunk.output_layer.weight.any()
    tied = {k: v for k, v in source.state_dict().items() if "output_layer" not in k}
    chunk.load_state_dict(tied, strict=True)


def test_a_value_head_is_loaded_from_a_critic():
    source, chunk = give_value_head(Chunk()), give_value_head(Chunk())
    torch.nn.init.normal_(source.output_layer.weight)
    chunk.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(chunk.output_layer.weight, source.output_layer.weight)
