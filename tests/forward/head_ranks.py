"""Run by test_head.py under torchrun: the head over a vocabulary split between two ranks, against autograd."""

import datetime

import torch
import torch.distributed as dist

from mindspeed_rl_plugin.forward.head import token_logps

VOCAB, PADDED = 11, 16


class Shard(torch.autograd.Function):
    """This rank's columns of replicated logits; backward gives every rank the gradient of all columns."""

    @staticmethod
    def forward(ctx, full):
        width = full.shape[-1] // dist.get_world_size()
        return full[..., dist.get_rank() * width :][..., :width].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts, -1)


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, PADDED, dtype=torch.float64, generator=g, requires_grad=True)
    labels = torch.randint(0, VOCAB, (2, 3), generator=g)
    # Both ranks perturb the same entry in the same order, so the collectives meet.
    settings = {"vocab_size": VOCAB, "temperature": 0.7, "entropy_grad": True}

    def split(full):
        return token_logps(Shard.apply(full), labels, tp_group=dist.group.WORLD, **settings)

    def whole(full):
        return token_logps(full, labels, **settings)

    assert torch.autograd.gradcheck(split, (logits,))
    for got, want in zip(split(logits), whole(logits), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        everywhere = [torch.empty_like(got) for _ in range(2)]
        dist.all_gather(everywhere, got.detach())
        assert torch.equal(everywhere[0], everywhere[1])
    dist.destroy_process_group()


main()
