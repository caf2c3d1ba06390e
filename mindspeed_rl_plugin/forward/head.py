"""Log-prob of the label and entropy of the distribution, over a vocabulary that is split among TP ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def token_logps(
    logits: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """`log softmax(logits / temperature)` at the labels, and the distribution's entropy, in nats.

    logits: `[..., V / tp]`, this rank's slice of the padded vocabulary; labels: `[...]` int64 global token ids;
    vocab_size: number of real tokens; columns after them get probability 0; tp_group: ranks that share the vocabulary,
    None for one rank. Returns logp and entropy `[...]`, float32 (float64 for float64 logits), equal on every rank. The
    entropy only has a gradient with `entropy_grad`. Every rank must call backward with the same incoming gradient, and
    gets the gradient of its own slice. Source: Megatron's vocab-parallel cross entropy
    (core/tensor_parallel/cross_entropy.py), whose softmax includes the padding of the vocabulary.
    """
    if tp_group is not None and dist.get_world_size(tp_group) == 1:
        tp_group = None
    return _TokenLogps.apply(logits, labels, vocab_size, temperature, tp_group, entropy_grad)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, vocab_size, temperature, group, entropy_grad):
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        width = logits.shape[-1]
        first = dist.get_rank(group) * width if group is not None else 0
        scaled = logits.to(wide) / temperature
        scaled[..., max(min(vocab_size - first, width), 0) :] = -torch.inf

        peak = scaled.amax(-1, keepdim=True)
        _reduce(peak, dist.ReduceOp.MAX, group)
        shifted = scaled.sub_(peak)
        probs = shifted.exp()
        total = probs.sum(-1, keepdim=True)
        _reduce(total, dist.ReduceOp.SUM, group)
        log_total = total.log()
        probs /= total

        local = labels - first
        here = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)[..., None]
        picked = torch.where(here, shifted.gather(-1, local)[..., 0], 0.0)
        # -inf x 0 on the padded columns would be NaN.
        spread = (probs * shifted.masked_fill_(probs == 0, 0.0)).sum(-1)
        both = torch.stack([picked, spread])
        _reduce(both, dist.ReduceOp.SUM, group)
        logp = both[0] - log_total[..., 0]
        entropy = log_total[..., 0] - both[1]

        ctx.save_for_backward(probs, local, here, entropy)
        ctx.temperature, ctx.dtype, ctx.entropy_grad = temperature, logits.dtype, entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logp, grad_entropy):
        probs, local, here, entropy = ctx.saved_tensors
        # d logp / d x_j = [j is the label] - p_j
        grad = probs * -grad_logp[..., None]
        grad.scatter_add_(-1, local, (grad_logp * here)[..., None])
        if ctx.entropy_grad:
            # d H / d x_j = -p_j (log p_j + H)
            surprise = torch.where(probs > 0, probs.log(), 0.0) + entropy[..., None]
            grad -= probs * surprise * grad_entropy[..., None]
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None, None


def _reduce(tensor: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
