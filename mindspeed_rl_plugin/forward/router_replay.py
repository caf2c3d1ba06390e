"""Router replay: tokens go to experts that are given, and not to those that the trainer's router would choose.

The router's own code runs, and only its choice is replaced: the result of `torch.topk` over all experts. So scores of
the chosen experts, their gradients, auxiliary losses and counts are those of a router that had chosen so, in each
version of Megatron, MindSpeed and MindSpeed-LLM. The first call of each router proves that this is true for its code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.forward.tree import PrefixTree
from mindspeed_rl_plugin.ranks import gather_all
from mindspeed_rl_plugin.rows import route_dtype

CONTROLS = ("the token before", "the next layer", "other tokens")
# Tokens that the engine read: before an interruption of the response, the one that it left unread, and after it.
PARTS = ("in the first parts of responses", "of the first token after an interruption", "after an interruption")
OLDER = 4  # the part of tokens that older weights read, which choose otherwise: they are counted, and not checked
CHECKED = 100  # least number of slots of a layer
LEAST = 0.8  # smallest share of a layer's routes that must be those that the trainer's router would choose
SKEWED = 0.9  # a control that agrees more proves nothing: most tokens choose the same experts
FIX = "remove --rl-router-replay, and report this router"
ROUTE_COUNTS = ("slots", "doubled", "equal", *CONTROLS)

# of a pass that records: number of a layer with experts -> what its router chose in each micro-batch, in their order
recorded: dict[int, list[Tensor]] | None = None
weights_version = [0]  # of the weights with which the rollout is prepared
# number of a layer -> `[2, OLDER, ROUTE_COUNTS]` int64, since `differences` and since the job began
tallies: dict[int, Tensor] = {}
checked: set[str] = set()  # of PARTS


@dataclass(frozen=True)
class Routes:
    """Experts of the N tokens of a micro-batch in the model's order: position by position, each of all rows."""

    ids: Tensor  # `[layers with experts, N, K]` uint8 or int16
    part: Tensor  # `[N]` uint8, in PARTS from 1, or OLDER; 0, for padding and last tokens of rows: the router chooses
    rows: int  # number of rows between a token and the one before it

    @classmethod
    def laid_out(cls, ids: Tensor, part: Tensor, tree: PrefixTree | None = None) -> Routes:
        """From `[mb, S, layers, K]` and `[mb, S]`, by position. tree: of these positions; of several rows with a token,
        the last one that has routes decides."""
        rows, _, layers, k = ids.shape
        ids, part = ids.permute(2, 1, 0, 3).reshape(layers, -1, k), part.T.reshape(-1)
        if tree is None:
            return cls(ids, part, rows)
        read, last = part.nonzero()[:, 0], torch.full((tree.tokens.shape[1],), -1)
        last.scatter_reduce_(0, tree.at[read], read, "amax")
        return cls(ids[:, last.clamp(min=0)], torch.where(last < 0, 0, part[last]), rows)

    def to(self, device: torch.device) -> Routes:
        return replace(self, ids=self.ids.to(device), part=self.part.to(device))


class Choice(TorchFunctionMode):
    """Within the context, a router chooses these experts. ids: `[N, K]` int64, part: as in `Routes`, of all tensor
    parallel ranks; without them it chooses its own. Raises ValueError at the end if it has not chosen by `torch.topk`.
    """

    own: Tensor | None = None  # `[n, K]` that the router would have chosen, of those tokens that it saw
    ids: Tensor | None = None  # `[n, K]` that were given to these tokens
    part: Tensor | None = None  # `[n]`
    doubled: Tensor | None = None  # `[n]`, whether an expert is named twice; such a token chooses itself

    def __init__(self, router: torch.nn.Module, ids: Tensor | None = None, part: Tensor | None = None) -> None:
        super().__init__()
        self._router, self._all, self._unmasked = router, (ids, part), None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, every = kwargs or {}, self._router.config.num_moe_experts
        if func in (torch.Tensor.masked_fill, torch.masked_fill) and args[0].shape[-1:] == (every,):
            self._unmasked = args[0]  # also of experts outside of the groups from which this router would choose
        if func not in (torch.topk, torch.Tensor.topk) or not self._chooses(*args, **kwargs):
            return func(*args, **kwargs)
        # Core 0.19 sorts only if gradients are computed; the sum of weights depends on the order.
        result = func(*args, **kwargs | {"sorted": True})
        scores, self._unmasked = args[0] if self._unmasked is None else self._unmasked, None
        if self.own is None:  # further calls are those of auxiliary losses
            self.own = result[1]
            self.ids, self.part = (None if t is None else _of_rank(t, len(scores)) for t in self._all)
        if self.ids is None:
            return result
        ordered = self.ids.sort(1).values
        self.doubled = (ordered[:, 1:] == ordered[:, :-1]).any(1)  # Megatron would wait for more tokens than there are
        ids = torch.where(((self.part > 0) & ~self.doubled)[:, None], self.ids, result[1])
        ids = ids.gather(1, scores.detach().gather(1, ids).topk(ids.shape[1]).indices)
        return torch.return_types.topk((scores.gather(1, ids), ids))

    def __exit__(self, kind: Any, error: Any, where: Any) -> None:
        super().__exit__(kind, error, where)
        if error is None and self.own is None:
            raise ValueError(
                f"--rl-router-replay: the router of layer {self._router.layer_number} chooses without torch.topk; {FIX}"
            )

    def _chooses(self, scores: Tensor, k: int, dim: int = -1, *more: Any, **named: Any) -> bool:
        whole = scores.dim() == 2 and scores.shape[1] == self._router.config.num_moe_experts
        return whole and k == self._router.topk and dim in (1, -1)


def route(
    router: torch.nn.Module,
    layer: int,
    routing: Callable[..., tuple],
    logits: Tensor,
    *more: Any,
    routes: Routes | None,
    at: Tensor | None,
    **named: Any,
) -> tuple[Tensor, ...]:
    """What `routing` returns for logits `[n, 1, experts]`, or `[S, mb, experts]`, with the given experts. Without
    routes its own choice is recorded.

    layer: number of the layer among those with experts. at: tokens whose logits these are, on all tensor parallel ranks
    together; None: all N. Raises ValueError for a router whose choice cannot be replaced.
    """
    if routes is None:
        with Choice(router) as choice:
            result = routing(logits, *more, **named)
        _record(router, layer, choice.own, logits)
        return result
    given = routes.ids[layer], routes.ids[(layer + 1) % len(routes.ids)], routes.part
    ids, of_next, part = given if at is None else (each[at] for each in given)
    if "_rl_replays" not in vars(router):
        _prove(router, lambda: routing(logits, *more, **named))
        vars(router)["_rl_replays"] = True
    with Choice(router, ids.long(), part) as choice:
        result = routing(logits, *more, **named)
    _tally(layer, choice, of_next, routes.rows)
    return result


def _record(router: torch.nn.Module, layer: int, own: Tensor, logits: Tensor) -> None:
    """Add the choice of all tensor parallel ranks, `[N, K]` on the host, to `recorded`; in trees with losses of routers
    of all packed positions."""
    if router.config.sequence_parallel and len(own) * logits.shape[-1] == logits.numel():  # it has not gathered them
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        own = gather_from_sequence_parallel_region(own)
    recorded.setdefault(layer, []).append(own.to("cpu", route_dtype(router.config.num_moe_experts)))


@torch.no_grad()
def _prove(router: torch.nn.Module, run: Callable[[], tuple]) -> None:
    """Raise ValueError unless the router, given its own choice, returns the same to the bit, and given other experts
    sends its tokens to these."""
    original = run()
    with Choice(router) as choice:
        ordered = run()
    own, same = choice.own, True
    others = {"its own choice as another": own, "other experts than those that it was given": own.roll(1, 0)}
    for what, ids in others.items():
        with Choice(router, ids, own.new_ones(len(own))):
            scores, chosen = run()
        wanted = torch.zeros(len(ids), router.config.num_moe_experts, dtype=torch.bool, device=ids.device)
        same = torch.equal(chosen, _of_rank(wanted.scatter_(1, ids, True), len(chosen)))
        if ids is own:
            pairs = (scores, ordered[0]), (chosen, ordered[1]), (chosen, original[1])
            same = same and all(torch.equal(*pair) for pair in pairs)
        if not same:
            raise ValueError(f"--rl-router-replay: the router of layer {router.layer_number} takes {what}; {FIX}")


def _of_rank(values: Tensor, count: int) -> Tensor:
    """The `count` rows that this tensor parallel rank has of `values`, which are those of all of them or its own."""
    if len(values) == count:
        return values
    from megatron.core import parallel_state  # not above: collating rows needs no Megatron

    size = parallel_state.get_tensor_model_parallel_world_size()
    assert len(values) == count * size, f"{len(values)} tokens have routes, a router has {count} on one of {size} ranks"
    return values.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]


@torch.no_grad()
def _tally(layer: int, choice: Choice, of_next: Tensor, rows: int) -> None:
    own, ids = choice.own, choice.ids
    controls = ids.roll(rows, 0), _of_rank(of_next, len(ids)), ids.roll(len(ids) // 2, 0)
    equal = [(own[:, :, None] == other[:, None, :]).any(2).sum(1) for other in (ids, *controls)]
    of_token = torch.stack([torch.full_like(equal[0], ids.shape[1]), choice.doubled.to(equal[0]), *equal], 1)
    in_part = choice.part == torch.arange(1, 1 + OLDER, device=ids.device)[:, None]
    counts = (in_part[:, :, None] * of_token).sum(1)
    tallies[layer] = tallies.get(layer, counts.new_zeros(2, 1, 1)) + counts


def check(numbers: tuple[int, ...]) -> Tensor:
    """`[layers, ROUTE_COUNTS]` of all passes of the job since `differences`. numbers: of these layers in Megatron.

    As soon as there are CHECKED slots of each of PARTS, it checks that routes are those of the tokens to which they
    were given: in each layer they agree with the trainer's own choice in at least LEAST of the slots, and more than
    routes of other tokens or layers do, by at least half of what these lack. Raises ValueError if not, or if a layer
    was given none. Collective.
    """
    total = torch.zeros(len(numbers), 2, OLDER, len(ROUTE_COUNTS), dtype=torch.int64)
    for of_rank in gather_all({layer: counts.tolist() for layer, counts in tallies.items()}):
        for layer, counts in of_rank.items():
            total[layer] += torch.tensor(counts)
    if len(numbers) == 1:  # its next layer is itself
        total[..., ROUTE_COUNTS.index(CONTROLS[1])] = 0
    now, ever = total.unbind(1)
    if idle := [number for number, slots in zip(numbers, now[..., 0].sum(1), strict=True) if not slots]:
        raise ValueError(
            f"--rl-router-replay: {len(idle)} of {len(numbers)} layers with experts got no routes, as {idle[0]}; {FIX}"
        )
    for i, part in enumerate(PARTS):
        if part not in checked and ever[:, i, 0].min() >= CHECKED:
            checked.add(part)
            agree = [counts[ROUTE_COUNTS.index("equal")] / counts[0] for counts in ever[:, i].tolist()]
            say(
                f"routes of the engine's tokens {part}: at least {min(agree):.1%} in each layer are the trainer's own "
                f"choice ({int(ever[:, i, 0].sum())} slots)"
            )
            for number, counts in zip(numbers, ever[:, i].tolist(), strict=True):
                _check(f"--rl-router-replay: routes of layer {number} {part}", *counts)
    return now.sum(1)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Within the context passes count in no metric and no check."""
    kept = {layer: counts.clone() for layer, counts in tallies.items()}, set(checked)
    yield
    tallies.clear()
    tallies.update(kept[0])
    checked.intersection_update(kept[1])


def differences(numbers: tuple[int, ...]) -> dict[str, float]:
    """Metrics of all passes of the job since the last call; see `check`. Collective."""
    slots, _, equal, *_ = check(numbers).T
    for counts in tallies.values():
        counts[0] = 0
    by_layer = (1 - equal / slots).tolist()
    whole = float(1 - equal.sum() / slots.sum())
    return {"router/differ": whole} | {f"router/differ/{n}": d for n, d in zip(numbers, by_layer, strict=True)}


def _check(where: str, slots: int, doubled: int, equal: int, *controls: int) -> None:
    """Raise ValueError for routes of one layer, by its counts as in ROUTE_COUNTS."""
    fix = "this version of the engine may record them wrongly; install another, or remove --rl-router-replay"
    if doubled:
        raise ValueError(f"{where} name an expert twice for {doubled} tokens; {fix}")
    least = max([LEAST, *((1 + c / slots) / 2 for c in controls if c / slots < SKEWED)])
    if equal / slots < least:
        shares = ", ".join(f"those of {name} in {c / slots:.3f}" for name, c in zip(CONTROLS, controls, strict=True))
        raise ValueError(
            f"{where} agree with the trainer's own choice in {equal / slots:.3f} of {slots} slots ({shares}), but must "
            f"in at least {least:.3f}; {fix}"
        )
