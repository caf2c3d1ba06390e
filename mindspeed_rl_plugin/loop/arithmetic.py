"""Batch sizes that follow from the flags: prompts, samples, optimizer steps, micro-batches, rollouts."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

from mindspeed_rl_plugin.algorithms import Algorithm
from mindspeed_rl_plugin.algorithms.presets import learns_from_pairs
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.flag import valued


@dataclass(frozen=True)
class Arithmetic:
    """Sizes of a rollout and of its parts. A preference pair counts as a prompt with two responses; a rollout of pairs
    is one optimizer step."""

    prompts: int  # of one rollout
    members: int  # responses of a prompt
    global_batch: int  # sequences of one optimizer step
    epochs: int  # passes over a rollout
    micro_batch: int  # sequences of one forward
    data_parallel: int  # data parallel size of training
    engines: int | None  # rollout engines on ranks of the launcher (with async others may join); None for pairs
    train_iters: int  # optimizer steps of the whole run
    max_tokens: int | None = None  # of a micro-batch, if micro-batches are limited by tokens

    @property
    def samples(self) -> int:
        """Sequences of one rollout."""
        return self.prompts * self.members

    @property
    def steps(self) -> int:
        """Optimizer steps (Megatron iterations) on one rollout."""
        return self.samples // self.global_batch * self.epochs

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one optimizer step on each data-parallel rank, if tokens do not limit them."""
        return self.global_batch // (self.micro_batch * self.data_parallel)

    @property
    def rollouts(self) -> int:
        """Rollouts of the run; the last one may have fewer steps."""
        return -(-self.train_iters // self.steps)

    def table(self) -> str:
        """A small table for the console."""
        rows = self._of_pairs() if self.engines is None else self._of_rollouts()
        return "\n".join(["[rl] batch arithmetic", *(f"[rl]   {n:<32}{v:>8}  {how}".rstrip() for n, v, how in rows)])

    def _of_rollouts(self) -> list[tuple[str, int, str]]:
        return [
            ("prompts per rollout", self.prompts, ""),
            ("samples per rollout", self.samples, f"{self.prompts} prompts x {self.members} responses"),
            ("sequences per optimizer step", self.global_batch, "--global-batch-size"),
            ("optimizer steps per rollout", self.steps, f"{self.samples} / {self.global_batch} x {self.epochs} epochs"),
            self._cut(),
            ("rollouts", self.rollouts, f"{self.train_iters} optimizer steps / {self.steps}{self._last()}"),
            ("rollout engines", self.engines, ""),
        ]

    def _of_pairs(self) -> list[tuple[str, int, str]]:
        micro = f"--micro-batch-size {self.micro_batch} / 2"
        return [
            ("sequences per optimizer step", self.global_batch, "--global-batch-size, two per pair"),
            ("pairs per optimizer step", self.prompts, f"{self.global_batch} / 2"),
            *(() if self.max_tokens else (("pairs per micro-batch", self.micro_batch // 2, micro),)),
            self._cut(),
            ("pairs of the run", self.train_iters * self.prompts, f"{self.train_iters} optimizer steps"),
        ]

    def _cut(self) -> tuple[str, int, str]:
        if self.max_tokens is not None:
            share = self.global_batch // self.data_parallel
            return "tokens per micro-batch, at most", self.max_tokens, f"for {share} rows per step and rank"
        across = f"({self.micro_batch} x {self.data_parallel} data-parallel ranks)"
        return "micro-batches per step and rank", self.micro_batches, f"{self.global_batch} / {across}"

    def _last(self) -> str:
        left = self.train_iters % self.steps
        return f", {left} for the last" if left else ""


def tokens_of_group(prompt: int, response: int, members: int, budget: int) -> tuple[int, int]:
    """Tokens of the rows of a group, and tokens that --rl-share-prompts computes for them in micro-batches of at most
    `budget` tokens: the prompt once in each. prompt, response: tokens of each row."""
    together = max((budget - prompt) // max(response, 1), 1)
    return members * (prompt + response), -(-members // together) * prompt + members * response


def check_batch(args: argparse.Namespace, trainers: str = "") -> None:
    """Check, before Megatron validates its arguments, that --global-batch-size is a multiple of --micro-batch-size x
    data parallel ranks. Missing or invalid sizes are left to Megatron's check. trainers: text for the error, which
    explains the number of these ranks. Raises ValueError with value, limit and fix."""
    across = math.prod(
        getattr(args, f"{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")
    )
    ranks, rest = divmod(getattr(args, "world_size", 0), across)
    batch, micro = getattr(args, "global_batch_size", None), getattr(args, "micro_batch_size", None)
    if batch and micro and ranks and not rest:
        _check_split(batch, micro, ranks, trainers)


def derive_pairs(
    *, global_batch: int, micro_batch: int, data_parallel: int, train_iters: int, max_tokens: int | None = None
) -> Arithmetic:
    """Sizes for pairs. Raises ValueError, with value, limit and fix, if a batch cannot be divided or cuts a pair."""
    if micro_batch % 2:
        raise ValueError(
            f"--micro-batch-size {micro_batch} cuts a pair: it counts sequences, and a micro-batch holds the chosen "
            "and the rejected answer of a pair; give an even number"
        )
    _check_split(global_batch, micro_batch, data_parallel)
    return Arithmetic(global_batch // 2, 2, global_batch, 1, micro_batch, data_parallel, None, train_iters, max_tokens)


def derive(
    config: RLConfig, world: int, *, global_batch: int, micro_batch: int, data_parallel: int, train_iters: int
) -> Arithmetic:
    """The sizes if responses are sampled; by default a rollout has `global_batch` samples. world: number of ranks that
    train; the other sizes: values of Megatron's flags. Raises ValueError with value, limit and fix."""
    members, prompts = config.rollout.samples_per_prompt, config.rollout.rollout_prompts
    of_prompt = valued(config.rollout, "samples_per_prompt")
    if prompts is None:
        if global_batch % members:
            raise ValueError(
                f"--global-batch-size {global_batch} is not a multiple of {of_prompt}, so --rl-rollout-prompts has no "
                "default; change one of them, or set --rl-rollout-prompts"
            )
        prompts = global_batch // members
    samples = prompts * members
    if samples % global_batch:
        raise ValueError(
            f"one rollout has {samples} samples (--rl-rollout-prompts {prompts} x {of_prompt}), "
            f"not a multiple of --global-batch-size {global_batch}; {_near(prompts, members, global_batch)}"
        )
    _check_split(global_batch, micro_batch, data_parallel)
    ranks = config.schedule.generator_ranks if config.schedule.apart else world
    return Arithmetic(
        prompts=prompts,
        members=members,
        global_batch=global_batch,
        epochs=config.algorithm.ppo_epochs,
        micro_batch=micro_batch,
        data_parallel=data_parallel,
        engines=ranks // config.rollout.generate_tp,
        train_iters=train_iters,
        max_tokens=config.forward.max_tokens_per_microbatch,
    )


def arithmetic_of(args: Any) -> Arithmetic:
    """The sizes for Megatron's validated arguments, under any algorithm. Raises ValueError as `derive` and
    `derive_pairs` do."""
    of_megatron = {
        "global_batch": args.global_batch_size,
        "micro_batch": args.micro_batch_size,
        "data_parallel": args.data_parallel_size,
        "train_iters": args.train_iters,
    }
    if learns_from_pairs(args.rl_algorithm):
        return derive_pairs(**of_megatron, max_tokens=args.rl_max_tokens_per_microbatch)
    return derive(RLConfig.from_args(args), args.world_size, **of_megatron)


def _check_split(global_batch: int, micro_batch: int, data_parallel: int, trainers: str = "") -> None:
    if global_batch % (micro_batch * data_parallel):
        raise ValueError(
            f"--global-batch-size {global_batch} is not a multiple of --micro-batch-size {micro_batch} x "
            f"{data_parallel} data-parallel ranks = {micro_batch * data_parallel}{trainers}; change one of them"
        )


def _near(prompts: int, members: int, global_batch: int) -> str:
    """The fix: the nearest valid values of --rl-rollout-prompts."""
    step = next(n for n in range(1, global_batch + 1) if n * members % global_batch == 0)
    below, above = prompts // step * step, -(-prompts // step) * step
    choices = " or ".join(str(n) for n in (below, above) if n)
    return f"set --rl-rollout-prompts to {choices}"


def reads_old_logps(config: RLConfig, algorithm: Algorithm) -> bool:
    """Whether old log-probs need their own pass even if a rollout has one optimizer step: a KL reward or a dump reads
    them, or --rl-old-logprobs pass or --rl-router-replay old is given. Else the update's forward pass gives them, even
    for rows that older weights sampled."""
    dumped, forward = config.monitor.dump_dir is not None, config.forward
    asked = forward.old_logprobs != "auto" or forward.router_replay == "old"
    return asked or algorithm.kl_reward_coef != 0 or dumped
