"""Adam for Megatron without TransformerEngine and Apex.

Megatron falls back to torch's AdamW, which counts steps in the state of every parameter. The distributed optimizer
saves a counter of the parameter *group*, and cannot resume without it (KeyError 'step'). `HostAdam` has this counter.
`own_loaded_state` makes every optimizer of torch copy loaded state whose memory cannot be resized.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

PIECE = 1 << 18


class HostAdam(torch.optim.Optimizer):
    """Adam and AdamW with one integer `step` per parameter group, as in Apex's FusedAdam.

    The update is torch's functional `adamw` or `adam`, on PIECE numbers at a time, so that its temporaries (two or
    three tensors of a piece's size) stay in the processor's cache. adam_w_mode: decoupled weight decay (AdamW).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        capturable: bool = False,
    ) -> None:
        if amsgrad or capturable or not bias_correction:
            raise ValueError(
                f"HostAdam: amsgrad={amsgrad}, capturable={capturable}, bias_correction={bias_correction}: on a host "
                "only False, False, True are supported; leave out flags such as --optimizer-cuda-graph (capturable)"
            )
        super().__init__(params, dict(lr=lr, bias_correction=True, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            # Also in groups without parameters on this rank: Megatron asserts that all groups have the same step.
            group["step"] = int(group.get("step", 0)) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            state = self.state[param]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        update = adamw if self.adam_w_mode else adam
        averages, squares = ([self.state[p][k] for p in params] for k in ("exp_avg", "exp_avg_sq"))
        pieces = list(_pieces(zip(params, (p.grad for p in params), averages, squares, strict=True)))
        update(
            *map(list, zip(*pieces, strict=True)),
            [],
            # One counter per piece; torch adds 1 to it before the update.
            [torch.tensor(float(group["step"] - 1)) for _ in pieces],
            foreach=False,
            fused=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def own_loaded_state() -> None:
    """From now on every optimizer copies loaded state whose memory cannot be resized, such as that of `torch.load`:
    --rl-swap could not free that memory."""
    load = torch.optim.Optimizer.load_state_dict

    @functools.wraps(load)
    def load_and_copy(self: torch.optim.Optimizer, *args: Any, **named: Any) -> None:
        load(self, *args, **named)
        for state in self.state.values():
            for value in state.values():
                if torch.is_tensor(value) and not value.untyped_storage().resizable():
                    value.data = value.clone()

    torch.optim.Optimizer.load_state_dict = load_and_copy  # type: ignore[method-assign]


def _pieces(tensors: Iterable[tuple[torch.Tensor, ...]]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape as views of at most PIECE numbers; tensors that are not contiguous are not split."""
    for together in tensors:
        if all(t.is_contiguous() for t in together):
            yield from zip(*(t.view(-1).split(PIECE) for t in together), strict=True)
        else:
            yield together
