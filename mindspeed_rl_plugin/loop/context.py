"""The parts of the loop, built once from Megatron's arguments: what is read before the model, what after it."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from mindspeed_rl_plugin.algorithms import Algorithm, resolve
from mindspeed_rl_plugin.algorithms.describe import describe as describe_algorithm
from mindspeed_rl_plugin.config import RLConfig, given_flags
from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.engine import hf_config
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine, prepare_environment
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.forward import ForwardSettings, Step, plan_tokens
from mindspeed_rl_plugin.loop import engine_options as engine
from mindspeed_rl_plugin.loop import megatron_globals as megatron
from mindspeed_rl_plugin.loop.arithmetic import Arithmetic, derive_from_args
from mindspeed_rl_plugin.loop.docking import check_dock, check_homes, make_consumers, make_homes, place
from mindspeed_rl_plugin.loop.placement import Placement
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.prompts import PromptStream, check_vocabulary, load_tokenizer, tokenizer_path
from mindspeed_rl_plugin.reshard.host_memory import HostMemoryBudget
from mindspeed_rl_plugin.reshard.layout import EngineParallel, ModelShape, Parallel
from mindspeed_rl_plugin.reshard.offload import HostWeights, TrainState, unwrap
from mindspeed_rl_plugin.reshard.resharder import Resharder
from mindspeed_rl_plugin.reward import RewardPool
from mindspeed_rl_plugin.rows import Prompt, SampleId, Sampling
from mindspeed_rl_plugin.stages import select as drawing
from mindspeed_rl_plugin.update.step import Update
from mindspeed_rl_plugin.update.values import ValueUpdate


@dataclass(frozen=True)
class Inputs:
    """What RL reads besides the checkpoint, checked before any model is built.

    forward: how batches become the model's inputs; vocab: tokens that the model may produce (the rest of Megatron's
    rows is padding); engine_config: config.json of the engine's model; held_out: prompts of the evaluation.
    """

    args: argparse.Namespace
    config: RLConfig
    tokenizer: Any
    vocab: int
    forward: ForwardSettings
    engine_config: Mapping[str, Any]
    prompts: PromptStream
    held_out: tuple[Prompt, ...]
    graders: RewardPool

    @classmethod
    def read(cls, args: argparse.Namespace, config: RLConfig) -> Inputs:
        """Raises ValueError for whatever is missing or does not fit, on every rank alike."""
        data, monitor, reward = config.data, config.monitor, config.reward
        prepare_environment(get_device().kind)
        tokenizer = load_tokenizer(tokenizer_path(args))
        check_vocabulary(args, len(tokenizer))
        hf_model = config.rollout.hf_model
        reference = hf_config.load_reference(hf_model) if hf_model else None
        vocab = hf_config.model_vocab_size(len(tokenizer), args.padded_vocab_size, reference)
        forward = ForwardSettings.from_args(
            args,
            vocab_size=vocab,
            temperature=config.rollout.temperature,
            chunk_tokens=config.forward.logprob_chunk_tokens,
            max_tokens=config.forward.max_tokens_per_microbatch,
            packed=config.forward.pack_sequences,
        )
        engine_config = hf_config.derive_config(args, vocab_size=vocab, eos_token_ids=engine.eos(tokenizer))
        if hf_model:
            hf_config.check_against(engine_config, hf_model)

        def stream(paths: Sequence[str], seed: int) -> PromptStream:
            found = PromptStream(
                paths,
                tokenizer,
                prompt_key=data.prompt_key,
                answer_key=data.answer_key,
                chat_template=data.apply_chat_template,
                max_length=data.max_prompt_length,
                seed=seed,
            )
            if launch_env()["rank"] == 0:
                limit = f"longer than {data.max_prompt_length} tokens (--rl-max-prompt-length)"
                print(f"[rl] {len(found)} prompts from {' '.join(paths)}; dropped {found.dropped} {limit}", flush=True)
            return found

        prompts = stream(data.prompt_data, args.seed if data.data_seed is None else data.data_seed)
        held = stream(monitor.eval_data, 0) if monitor.eval_data else None
        graders = RewardPool(
            reward.reward,
            regex=reward.reward_regex,
            timeout=reward.reward_timeout,
            wait_timeout=monitor.wait_timeout,
            workers=reward.reward_workers,
            on_error=reward.reward_on_error,
            device="cpu" if reward.reward_model_device == "host" else str(get_device().current()),
        )
        for data_of in (prompts, held) if held else (prompts,):
            graders.check_fields(data_of.kinds_of_rows())
        check_dock(args, config, len(graders.names))
        held_out = tuple(held.all()[: monitor.eval_prompts or None]) if held else ()
        return cls(args, config, tokenizer, vocab, forward, engine_config, prompts, held_out, graders)

    def decode(self, tokens: Sequence[int]) -> str:
        """Response tokens as graders and readers see them."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


@dataclass(frozen=True)
class Parts:
    """Everything that a rank's loop works with.

    placement: who works on which rows; homes_of: groups of an epoch -> machine of each; rounds: groups of epochs that a
    former start drew. One dock, seen by three kinds of consumers: dock by data parallel ranks,
    dock_of_engine by rollout engines, dock_of_rank by single ranks. group: all ranks, over gloo.
    """

    inputs: Inputs
    model: Any
    algorithm: Algorithm
    sizes: Arithmetic
    topology: Topology
    placement: Placement
    dock: Dock
    dock_of_engine: Dock
    dock_of_rank: Dock
    group: dist.ProcessGroup
    engine: VllmEngine
    resharder: Resharder
    train_state: TrainState
    reference: HostWeights | None
    critic: Critic | None
    forward: ForwardSettings
    update: Update
    value_update: ValueUpdate | None
    monitor: Monitor
    sampling: Sampling
    homes_of: Callable[[int], np.ndarray]
    rounds: dict[int, int] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        inputs: Inputs,
        model: Any,
        optimizer: Any,
        reference: HostWeights | None,
        start: Start,
        critic: Critic | None = None,
    ) -> Parts:
        """Build around the loaded models. Collective over all ranks; the engine takes seconds to start."""
        args, config = inputs.args, inputs.config
        rollout = config.rollout
        sizes = derive_from_args(args)
        algorithm = _with_old_logps(resolve(config.algorithm), config, sizes)
        topology = Topology.from_megatron(rollout.generate_tp)
        timeout = datetime.timedelta(seconds=config.monitor.wait_timeout)
        group = dist.new_group(backend="gloo", timeout=timeout)
        dtype = engine.dtype_of(args, rollout.engine_dtype)
        placement = place(topology, group)

        homes = make_homes(placement, sizes.prompts, lambda groups: _plan(sizes, topology, groups))
        graders = len(inputs.graders.names)
        check_homes(config, graders, sizes, homes(sizes.prompts))
        docks = make_consumers(config, graders, topology, group, algorithm, homes)
        resharder = Resharder(
            ModelShape.from_megatron_args(args, inputs.vocab),
            Parallel.from_megatron_args(args),
            EngineParallel(rollout.generate_tp, rollout.generate_ep),
            rank=topology.rank,
            engine_dtype=dtype,
            mode=config.reshard.reshard,
            bucket_bytes=config.reshard.reshard_bucket_mb << 20,
            node_size=launch_env()["local_world_size"],
            verify=config.reshard.verify_weights,
            deadline=config.monitor.wait_timeout,
        )
        _check_rotary(inputs, model)
        budget = host_memory_budget(config)
        train_state = TrainState(model, optimizer, budget=budget, verify=config.reshard.verify_weights)
        if critic is not None:
            critic.state.budget, critic.state.verify = budget, config.reshard.verify_weights
        # The engine measures the free memory when it starts: the training state must not be in its way.
        with budget.expecting(0 if get_device().is_cpu else resharder.engine_copy_bytes()):
            train_state.offload(config.reshard.offloaded)
            if critic is not None:
                critic.offload(config.reshard.offloaded)
        vllm = VllmEngine(engine.options(inputs, dtype))
        vllm.sleep()
        train_state.onload()
        if critic is not None:
            critic.onload()
        return cls(
            inputs=inputs,
            model=model,
            algorithm=algorithm,
            sizes=sizes,
            topology=topology,
            placement=placement,
            dock=docks[0],
            dock_of_engine=docks[1],
            dock_of_rank=docks[2],
            group=group,
            engine=vllm,
            resharder=resharder,
            train_state=train_state,
            reference=reference,
            critic=critic,
            forward=inputs.forward,
            update=Update(algorithm, inputs.forward, model, norm_length=rollout.max_response_length),
            value_update=ValueUpdate(algorithm, inputs.forward, critic.model) if critic else None,
            monitor=make_monitor(inputs.args, inputs.config, topology, start),
            sampling=Sampling(
                max_tokens=rollout.max_response_length,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                stop=rollout.stop,
                stop_token_ids=rollout.stop_token_ids,
                ignore_eos=rollout.ignore_eos,
            ),
            homes_of=homes,
        )

    def close(self) -> None:
        """End the engine and leave the dock. The engine wakes for that, in the memory that the training state gives up
        for good."""
        self.train_state.discard()
        if self.critic is not None:
            self.critic.state.discard()
        self.engine.shutdown()
        self.dock.close()

    def start_offload(self) -> None:
        """Begin to copy to the host what the transfer of weights does not read: gradients and optimizer state, those
        of the critic too. What has begun to leave is passed over. It may still be read, for a checkpoint."""
        early = set(self.offloaded) - {"params"}
        self.train_state.ensure_offloading(early)
        if self.critic is not None:
            self.critic.state.ensure_offloading(early)

    def finish_offload(self) -> None:
        """All of that, and the critic's weights, are away."""
        self.start_offload()
        if self.critic is not None:
            self.critic.offload(set(self.offloaded) & {"params"})
        self.train_state.finish_offload()

    @property
    def deadline(self) -> float:
        """Seconds that any wait may take."""
        return self.inputs.config.monitor.wait_timeout

    @property
    def response_seed(self) -> int:
        """Base of the seeds of all responses."""
        seed = self.inputs.config.rollout.rollout_seed
        return self.inputs.args.seed if seed is None else seed

    @property
    def offloaded(self) -> tuple[str, ...]:
        """What leaves the device during generation."""
        return self.inputs.config.reshard.offloaded

    @property
    def total_iterations(self) -> int:
        """Optimizer steps of the whole run."""
        return self.inputs.args.train_iters

    def iterations_done(self) -> int:
        """Optimizer steps taken so far, those before a resume included: the version of the weights."""
        return self.inputs.args.curr_iteration

    def evaluation_due(self, done: int) -> bool:
        """Whether to evaluate after `done` iterations: before the first, every n, and after the last."""
        every = self.inputs.config.monitor.eval_every
        return bool(self.inputs.held_out) and (done % every == 0 or done == self.total_iterations)

    def ids(self, groups: Iterable[drawing.Group]) -> list[SampleId]:
        """All samples of some groups."""
        return drawing.samples(groups, self.sizes.members)

    def plan(self, groups: Sequence[drawing.Group], lengths: drawing.Lengths | None = None) -> list[Step]:
        """Optimizer steps of one pass over the groups of a rollout. lengths: tokens of each sample of each group; then
        micro-batches are within the budget of tokens where there is one. Which rows make a step depends on neither."""
        plan, budget = _plan(self.sizes, self.topology, groups), self.forward.budget
        if budget is None or lengths is None:
            # Where all of a round is trained, it lies where this plan trains it.
            return self.placement.near(plan, self.home) if self.algorithm.dynamic_sampling else plan
        ids = self.ids(groups)
        near = {i: self.placement.trainers[self.home(i[:2])] for i in ids}
        return plan_tokens(plan, {i: lengths[i[:2]][i.member] for i in ids}, budget, near)

    def homes(self, epoch: int) -> np.ndarray:
        """`[groups]` machine of each group of a round, as if all of it were trained on."""
        return self.homes_of(self.rounds.get(epoch, self.sizes.prompts))

    def home(self, group: drawing.Group) -> int:
        """Machine of one group."""
        return int(self.homes(group[0])[group[1]])

    def forget(self, groups: Iterable[drawing.Group]) -> None:
        """Clear groups from the dock."""
        for epoch, part in drawing.by_epoch(groups).items():
            self.dock.clear(epoch, part)

    def share(self, value: Any) -> Any:
        """The leader's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def meet(self, what: str) -> None:
        """Return once every rank has come here, for the collectives that follow wait by Megatron's own, shorter limit.

        Raises TimeoutError that names the ranks that did not come before `what`.
        """
        if self.topology.world > 1:
            try:
                dist.monitored_barrier(self.group, timeout=datetime.timedelta(seconds=self.deadline))
            except RuntimeError as error:
                raise TimeoutError(
                    f"rank {self.topology.rank} waited for the others before {what}, at most {self.deadline:g} s "
                    f"(--rl-wait-timeout): {str(error).splitlines()[0][:300]}"
                ) from error

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        box = [None] * self.topology.world
        dist.all_gather_object(box, value, group=self.group)
        return box


def _plan(sizes: Arithmetic, topology: Topology, groups: Sequence[drawing.Group]) -> list[Step]:
    batch = {"global_batch_size": sizes.global_batch, "micro_batch_size": sizes.micro_batch}
    return drawing.plan_groups(groups, sizes.members, dp_size=topology.dp_size, **batch)


def _with_old_logps(algorithm: Algorithm, config: RLConfig, sizes: Arithmetic) -> Algorithm:
    """Without old log-probs where each rollout makes one optimizer step, so that they would be the update's own, and
    nothing else reads them."""
    read = algorithm.kl_reward_coef != 0 or config.monitor.dump_dir is not None
    own = config.forward.old_logprobs == "auto" and sizes.steps == 1 and not read
    return dataclasses.replace(algorithm, old_logps=not own)


def _check_rotary(inputs: Inputs, model: Any) -> None:
    """The engine's rotary frequencies are those of the built model, whatever the launch script made of the flags."""
    for chunk in model:
        for module in unwrap(chunk).modules():  # with latent attention every layer has one of its own
            rotary = getattr(module, "rotary_pos_emb", None)
            if rotary is not None:
                hf_config.check_rotary(inputs.engine_config, rotary.inv_freq)


def make_monitor(args: argparse.Namespace, config: RLConfig, topology: Topology, start: Start) -> Monitor:
    """The monitor of a run."""
    device = get_device()
    dump_dir = config.monitor.dump_dir
    return Monitor(
        config.monitor.run_dir or str(Path(args.save) / "rl"),
        topology.rank,
        topology.world,
        tensorboard_writer=megatron.tensorboard_writer(),
        wandb=megatron.wandb_writer(),
        is_terminal=None if config.monitor.progress else False,
        total_iterations=args.train_iters,
        resume_iteration=start.iteration,
        meter=device.memory,
        synchronize=device.synchronize_stream,  # copies of the swap go on beside stages
        info={
            "algorithm": config.algorithm.algorithm,
            "parts": describe_algorithm(resolve(config.algorithm)),
            "flags": given_flags(config),
            "start": start.kind,
            "reference": start.reference_path,
            "graders": list(config.reward.reward),
            **({"dump_dir": str(Path(dump_dir).resolve())} if dump_dir else {}),
        },
    )


def host_memory_budget(config: RLConfig) -> HostMemoryBudget:
    """The host memory of this machine, for what its ranks swap. Collective over all ranks."""
    return HostMemoryBudget.of_machine(launch_env()["local_world_size"], config.monitor.wait_timeout)
