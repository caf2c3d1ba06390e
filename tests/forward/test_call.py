"""What a model chunk is called with: packed rows begin anew, in their rotary embeddings too."""

import dataclasses

import pytest
import torch
from megatron.core import parallel_state

from mindspeed_rl_plugin.forward import context_parallel
from mindspeed_rl_plugin.forward.call import call_model
from mindspeed_rl_plugin.forward.collate import collate
from mindspeed_rl_plugin.forward.settings import ForwardSettings
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId


class Rotary(torch.nn.Module):
    """Angles `[S, 1, 1, D]` of positions from 0, as Megatron's."""

    def forward(self, length):
        return torch.arange(length)[:, None, None, None] * torch.tensor([1.0, 0.1, 0.01])


class Chunk(torch.nn.Module):
    """Asks its rotary embeddings for what Megatron's GPTModel asks them, and gives them back."""

    def __init__(self, factor: bool) -> None:
        super().__init__()
        self.rotary_pos_emb = Rotary()
        if factor:
            forward = self.rotary_pos_emb.forward
            self.rotary_pos_emb.forward = lambda length: (forward(length), 1.5)

    def forward(self, tokens, position_ids, attention_mask):
        return self.rotary_pos_emb(tokens.shape[1])


class Wrapper(torch.nn.Module):
    def __init__(self, module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        return self.module(*inputs)


def micro_batch(lengths, packed):
    tokens = Ragged.from_rows([torch.arange(n, dtype=torch.int32) for n in lengths])
    rows = Rows(tuple(SampleId(0, 0, i) for i in range(len(lengths))), {"tokens": tokens})
    return collate(rows, ForwardSettings(len(lengths), 16, 99, multiple=4, max_tokens=100, packed=packed))


@pytest.mark.parametrize("factor", [False, True])
def test_each_packed_row_has_the_rotary_embeddings_of_a_row_of_its_own(factor):
    model = Wrapper(Wrapper(Chunk(factor)))
    before = vars(model.module.module.rotary_pos_emb).copy()
    plain = Rotary()(9)
    hidden = call_model(model, micro_batch([3, 9, 2], packed=True))
    if factor:
        hidden, kept = hidden
        assert kept == 1.5
    assert hidden.shape[0] == 16, "padded to a multiple of 4"
    assert torch.equal(hidden[:14], torch.cat([plain[:3], plain, plain[:2]]))
    assert vars(model.module.module.rotary_pos_emb) == before
    rows = call_model(model, micro_batch([9, 3], packed=False))
    assert torch.equal((rows[0] if factor else rows)[:9], plain)


class Ulysses(torch.nn.Module):
    """MindSpeed's attention as it is handed whole rows by an exchange of heads: gives back mask and boundaries."""

    ulysses_comm_para = {}

    def forward(self, query, key, value, attention_mask, packed_seq_params=None):
        return attention_mask, packed_seq_params


class SplitChunk(Chunk):
    """Its rotary embeddings cut positions themselves, unless rows are packed."""

    def __init__(self) -> None:
        super().__init__(factor=False)
        forward, self.attention = self.rotary_pos_emb.forward, Ulysses()
        self.rotary_pos_emb.forward = lambda length, packed_seq: forward(length) if packed_seq else None

    def forward(self, tokens, position_ids, attention_mask):
        angles = self.rotary_pos_emb(2 * tokens.shape[1], packed_seq=False)
        return angles, *self.attention(tokens, tokens, tokens, attention_mask)


def test_mindspeeds_ulysses_is_handed_the_boundaries_of_whole_packed_rows(monkeypatch):
    """The second of two ranks, twice: layers that run again in the backward pass are called as before."""
    for name, value in (("world_size", 2), ("rank", 1), ("group", None)):
        monkeypatch.setattr(parallel_state, f"get_context_parallel_{name}", lambda value=value: value)
    monkeypatch.setattr(context_parallel, "_split", lambda: lambda batch: {"tokens": batch["tokens"].chunk(2, 1)[1]})
    whole = dataclasses.replace(micro_batch([3, 9, 2], packed=True), bounded=True, explicit_mask=False)
    part, model = context_parallel.of_this_rank(whole), SplitChunk()
    for _ in range(2):
        angles, mask, apart = call_model(model, part)
        assert torch.equal(angles, Rotary()(9)[whole.position_ids[0, 8:]])
        assert mask is None and apart.cu_seqlens_q.tolist() == [0, 3, 12, 14, 16] and apart.max_seqlen_q == 9
    assert len(model.attention._forward_pre_hooks) == 1
    mask = torch.ones(1, 1, 8, 8)
    assert model.attention(mask, mask, mask, mask) == (mask, None)
