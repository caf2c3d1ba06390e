"""Run by test_chunked.py under torchrun: log-probs over a vocabulary split between two ranks of Megatron.

The head over all logits, then in chunks, tied and untied, with and without sequence parallel: gradients against
numerical ones; then Megatron's own output layer as it is, followed by the head over all logits, against the same layer
scoring in chunks.
"""

import datetime

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402

from mindspeed_rl_plugin.forward import ForwardSettings, MicroBatch, token_logps  # noqa: E402
from mindspeed_rl_plugin.forward.chunked import chunked_token_logps  # noqa: E402
from mindspeed_rl_plugin.forward.output_layer import score  # noqa: E402

PADDED, HIDDEN, TOKENS = 16, 3, 4


class Part(torch.autograd.Function):
    """This rank's rows of a replicated tensor; backward gives every rank the gradient of all rows."""

    @staticmethod
    def forward(ctx, full):
        return full.chunk(2)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


def same_everywhere(value):
    both = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(both, value.detach().contiguous())
    assert torch.equal(*both)


def check_gradients(vocab, sequence_parallel=None):
    """Against numerical ones, and the values against those of one rank. sequence_parallel: None for the head over all
    logits."""
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=g, requires_grad=True)
    weight = torch.randn(PADDED, HIDDEN, dtype=torch.float64, generator=g, requires_grad=True)
    labels = torch.randint(0, vocab, (TOKENS,), generator=g)
    settings = {"vocab_size": vocab, "temperature": 0.7, "entropy_grad": True}

    def split(h, w):
        if sequence_parallel:
            h = tensor_parallel.gather_from_sequence_parallel_region(Part.apply(h))
        else:
            h = tensor_parallel.copy_to_tensor_model_parallel_region(h)
        group = parallel_state.get_tensor_model_parallel_group()
        if sequence_parallel is None:
            return token_logps(h @ Part.apply(w).t(), labels, tp_group=group, **settings)
        return chunked_token_logps(h, Part.apply(w), labels, chunk_tokens=2, tp_group=group, **settings)

    # Both ranks perturb the same entry in the same order, so the collectives match.
    assert torch.autograd.gradcheck(split, (hidden, weight))
    assert torch.autograd.gradcheck(lambda w: split(torch.tanh(w[labels.flip(0)]), w), (weight,))
    want = token_logps(hidden @ weight.t(), labels, **settings)
    for got, value in zip(split(hidden, weight), want, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-12)
        same_everywhere(got)


def check_layer(sequence_parallel, tied, mask):
    """Megatron's layer, its logits and the head over them, against `score` on the same input."""
    rows, length, vocab, width = 2, 6, 250, 256
    config = ModelParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    init = {"init_method": torch.nn.init.normal_, "bias": False, "gather_output": False}
    layer = tensor_parallel.ColumnParallelLinear(
        HIDDEN, width, config=config, skip_weight_param_allocation=tied, **init
    )
    g = torch.Generator().manual_seed(2 + dist.get_rank())
    weight = torch.nn.Parameter(torch.randn(width // 2, HIDDEN, generator=g)) if tied else layer.weight
    g = torch.Generator().manual_seed(3)
    whole = torch.randn(length, rows, HIDDEN, generator=g)
    hidden = (whole.chunk(2)[dist.get_rank()] if sequence_parallel else whole).clone().requires_grad_()
    batch = MicroBatch(
        index=0,
        tokens=torch.zeros(rows, length, dtype=torch.int64),
        labels=torch.randint(0, vocab, (rows, length), generator=g),
        position_ids=torch.zeros(rows, length, dtype=torch.int64),
        explicit_mask=False,
        mask=mask,
        lengths=torch.full((rows,), length),
        columns={},
        rows=torch.arange(rows),
    )
    settings = ForwardSettings(micro_batch_size=rows, seq_length=8, vocab_size=vocab, temperature=0.8, chunk_tokens=3)
    got = score(hidden, weight, layer, batch, settings, entropy_grad=True).transpose(0, 1)
    logits = layer(hidden, weight=weight if tied else None)[0].transpose(0, 1)
    group = parallel_state.get_tensor_model_parallel_group()
    want = token_logps(logits, batch.labels, vocab_size=vocab, temperature=0.8, tp_group=group, entropy_grad=True)
    want = torch.where(mask[..., None], torch.stack(want, -1), 0.0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    same_everywhere(got)
    factors = torch.randn(got.shape, generator=g)
    grads = [torch.autograd.grad((factors * both).sum(), (hidden, weight)) for both in (got, want)]
    for mine, theirs in zip(*grads, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert bool(mask.any()) == bool(grads[0][1].abs().sum() > 0)


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    check_gradients(vocab=11)
    check_gradients(vocab=11, sequence_parallel=False)
    check_gradients(vocab=11, sequence_parallel=True)
    check_gradients(vocab=7, sequence_parallel=True)  # the second rank has padding only
    some = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 1, 1]]).bool()
    for sequence_parallel in (False, True):
        check_layer(sequence_parallel, tied=False, mask=some)
        check_layer(sequence_parallel, tied=True, mask=torch.ones_like(some))
        check_layer(sequence_parallel, tied=False, mask=torch.zeros_like(some))
    dist.destroy_process_group()


main()
