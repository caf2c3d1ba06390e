"""Log-prob and entropy from hidden states: logits exist only for one slice of the vocabulary at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor


def chunked_token_logps(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    entropy_grad: bool = False,
    accumulate: bool = False,
) -> tuple[Tensor, Tensor]:
    """The result and the gradients of `token_logps(hidden @ weight.T, ...)`, without storing all logits.

    hidden: `[T, H]`, the same on the ranks of `tp_group`.
    weight: `[V / tp, H]`, this rank's rows of the padded vocabulary.
    labels: `[T]` int64.
    chunk_tokens: a buffer has the size of the logits of this many tokens; there are one to three buffers.
    accumulate: add the gradient of the weight to its `main_grad`, as Megatron's gradient accumulation fusion does,
    instead of returning it.
    Returns logp and entropy, `[T]`, float32 (float64 for float64 hidden states).

    For `hidden`, backward gives this rank's summand of the gradient. Layers before must sum it over the group, as
    Megatron's `copy_to_tensor_model_parallel_region` and `gather_from_sequence_parallel_region` do.

    Slices are of the vocabulary, not of the tokens: each row of the weight is read once in a pass, and its gradient is
    written once. The sums of a token are updated with a running maximum; two all-reduces at the end combine the ranks'
    sums. The entropy comes from the same sums: H = log Z - sum_j e^(x_j) x_j / Z. Backward computes the logits of each
    slice again.
    """
    group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
    both = _ChunkedLogps.apply(
        hidden, weight, labels, vocab_size, temperature, group, chunk_tokens, entropy_grad, accumulate
    )
    return both[:, 0], both[:, 1] if entropy_grad else both[:, 1].detach()


def kernels_for(hidden: Tensor) -> ModuleType | None:
    """The Triton kernels if they can run (on CUDA, not in float64). None: torch's own operators are used."""
    if hidden.device.type != "cuda" or hidden.dtype == torch.float64:
        return None
    return _kernels()


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from mindspeed_rl_plugin.forward import kernels
    except ImportError:  # no triton with this torch
        return None
    return kernels


class _ChunkedLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, vocab_size, temperature, group, chunk_tokens, entropy_grad, accumulate):
        slices = _Slices(hidden, weight, labels, vocab_size, temperature, group, chunk_tokens)
        peak, total, spread, picked = _sums(slices)
        owned = slices.owned
        if group is not None and len(hidden):
            highest = peak.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            total, spread = _moved(total, spread, peak - highest)
            peak = highest
            sums = torch.stack([total, spread, torch.where(owned, picked - peak, 0.0)])
            dist.all_reduce(sums, group=group)
            total, spread, picked = sums
        else:
            picked = picked - peak
        log_total = total.log()
        entropy = log_total - spread / total

        ctx.save_for_backward(hidden, weight, labels, peak, total, entropy)
        ctx.settings = (vocab_size, temperature, group, chunk_tokens)
        ctx.entropy_grad = entropy_grad
        # Not by `save_for_backward`: `main_grad` may change between forward and backward.
        ctx.main_grad = weight.main_grad if accumulate else None
        return torch.stack([picked - log_total, entropy], 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, labels, peak, total, entropy = ctx.saved_tensors
        slices = _Slices(hidden, weight, labels, *ctx.settings)
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=slices.wide) if for_hidden else None
        grad_weight = torch.zeros_like(weight) if for_weight and ctx.main_grad is None else None

        grad = grad / slices.temperature
        at_label = grad[:, :1]
        # d logp / d x_j = [j is the label] - p_j;   d H / d x_j = -p_j (log p_j + H)
        factor, slope = -at_label, None
        if ctx.entropy_grad:
            slope = -grad[:, 1:]
            factor = factor + slope * (entropy - total.log())[:, None]
            slope = slope / total[:, None]
        factor = factor / total[:, None]
        for part, rows in _gradients(slices, peak, factor, slope, at_label):
            if grad_hidden is not None:
                _add_product(grad_hidden, part, weight[rows])
            if grad_weight is not None:
                torch.mm(part.t(), hidden, out=grad_weight[rows])
            elif for_weight:
                _add_product(ctx.main_grad[rows], part.t(), hidden)
        if for_weight and grad_weight is None:
            grad_weight = _accumulated(weight)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _sums(slices: _Slices) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per token, over this rank's rows of the vocabulary: the largest scaled logit m, sum e^(x-m) and sum e^(x-m) (x-m)
    of the scaled logits x, and the scaled logit at the label, 0 if another rank has the label."""
    # Not -inf: differences of maxima are multiplied by sums that may be 0.
    peak = slices.column(torch.finfo(slices.wide).min / 2)
    total, spread, picked = slices.column(0.0), slices.column(0.0), slices.column(0.0)
    kernels = kernels_for(slices.hidden)
    if kernels is not None:
        sums = torch.stack([peak, total, spread, picked])
        for logits, _, label in slices.products():
            kernels.add_slice(logits, label, slices.temperature, sums)
        return tuple(sums)
    for scaled, _, label, here in slices:
        picked += torch.where(here, scaled.gather(1, label)[:, 0], 0.0)
        highest = torch.maximum(peak, scaled.amax(1))
        total, spread = _moved(total, spread, peak - highest)
        peak = highest
        shifted = scaled.sub_(peak[:, None])
        powers = torch.exp(shifted, out=slices.scratch(shifted))
        total += powers.sum(1)
        spread += powers.mul_(shifted).sum(1)
    return peak, total, spread, picked


def _gradients(
    slices: _Slices, peak: Tensor, factor: Tensor, slope: Tensor | None, at_label: Tensor
) -> Iterator[tuple[Tensor, slice]]:
    """Per slice the gradient of its logits `[T, n]` in the dtype of the hidden states, and its rows. This gradient is
    `e^(x-peak) (factor + slope (x-peak))`, plus `at_label` at the label. factor, slope, at_label: `[T, 1]`."""
    kernels = kernels_for(slices.hidden)
    if kernels is not None:
        slope = torch.zeros_like(factor) if slope is None else slope
        columns = [c[:, 0] for c in (factor, slope, at_label)]
        for logits, rows, label in slices.products():
            yield kernels.gradient_of_slice(logits, label, slices.temperature, peak, *columns), rows
        return
    for scaled, rows, label, here in slices:
        shifted = scaled.sub_(peak[:, None])
        if slope is None:
            part = shifted.exp_().mul_(factor)
        else:
            slanted = torch.mul(shifted, slope, out=slices.scratch(shifted)).add_(factor)
            part = shifted.exp_().mul_(slanted)
        part.scatter_add_(1, label, at_label * here[:, None])
        yield part.to(slices.hidden.dtype), rows


class _Slices:
    """Iterates over slices of this rank's rows of the vocabulary, without padding. Each has the scaled logits `[T, n]`
    (a buffer that the next slice overwrites), the rows, the label's column `[T, 1]`, clamped to the slice, and whether
    the label is in the slice `[T]`. `products` gives unscaled logits, and columns that are not clamped."""

    def __init__(self, hidden, weight, labels, vocab_size, temperature, group, chunk_tokens):
        self.hidden, self.weight, self.temperature = hidden, weight, temperature
        self.wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        width, tokens = weight.shape[0], len(hidden)
        first = dist.get_rank(group) * width if group is not None else 0
        # The padded rows of the vocabulary come last and are not used.
        self.real = max(min(vocab_size - first, width), 0) if tokens else 0
        self.labels = labels - first
        self.owned = (self.labels >= 0) & (self.labels < self.real)
        step = max(min(chunk_tokens * width // max(tokens, 1), self.real), 1)
        self.step = step - step % 64 if step > 64 else step
        self._scratch: Tensor | None = None

    def column(self, value: float) -> Tensor:
        """One number per token."""
        return self.hidden.new_full((len(self.hidden),), value, dtype=self.wide)

    def scratch(self, like: Tensor) -> Tensor:
        """A second buffer, of the shape of `like`, allocated once: new pages cost more than the arithmetic."""
        if self._scratch is None:
            self._scratch = torch.empty(len(self.hidden) * self.step, dtype=self.wide, device=self.hidden.device)
        return self._scratch[: like.numel()].view_as(like)

    def products(self) -> Iterator[tuple[Tensor, slice, Tensor]]:
        tokens, like = len(self.hidden), self.hidden
        product = torch.empty(tokens * self.step if self.real else 0, dtype=like.dtype, device=like.device)
        for start in range(0, self.real, self.step):
            rows = slice(start, min(start + self.step, self.real))
            n = rows.stop - start
            logits = torch.mm(self.hidden, self.weight[rows].t(), out=product[: tokens * n].view(tokens, n))
            yield logits, rows, self.labels - start

    def __iter__(self) -> Iterator[tuple[Tensor, slice, Tensor, Tensor]]:
        scaled = None
        for logits, rows, label in self.products():
            n = logits.shape[1]
            out = logits
            if logits.dtype != self.wide:
                if scaled is None:
                    scaled = torch.empty(logits.numel(), dtype=self.wide, device=logits.device)
                out = scaled[: logits.numel()].view_as(logits).copy_(logits)
            if self.temperature != 1.0:
                out.div_(self.temperature)
            here = (label >= 0) & (label < n)
            yield out, rows, label.clamp(0, n - 1)[:, None], here


def _moved(total: Tensor, spread: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of e^x and e^x x after `by`, which is at most 0, is added to every x."""
    factor = by.exp()
    return total * factor, factor * (spread + by * total)


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """`out += a @ b`, whatever the precision of `out`."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)


def _accumulated(weight: Tensor) -> Tensor | None:
    """The gradient to return for a weight whose gradient was added to `main_grad`. By Megatron's convention
    (core/tensor_parallel/layers.py) DDP's hook expects a gradient, but only adds it with `zero_out_wgrad`."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
