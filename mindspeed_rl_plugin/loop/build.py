"""Builds the loop around the loaded models: stages, dock, engine, plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.algorithms.describe import describe
from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.engine import hf_config
from mindspeed_rl_plugin.engine.hf_rope import check_rotary
from mindspeed_rl_plugin.engine.protocol import Engine
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.environment import launch_env
from mindspeed_rl_plugin.episodes.protocol import tool_names
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
from mindspeed_rl_plugin.layout.layout import EngineParallel, ModelShape, Parallel
from mindspeed_rl_plugin.loop import engine_options
from mindspeed_rl_plugin.loop.arithmetic import reads_old_logps
from mindspeed_rl_plugin.loop.build_async import build_schedule, make_publisher
from mindspeed_rl_plugin.loop.colocation import Colocation
from mindspeed_rl_plugin.loop.docks import Docks, DockSize, place
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.loop.loop import Loop
from mindspeed_rl_plugin.loop.megatron_trainer import MegatronTrainer
from mindspeed_rl_plugin.loop.rollout_plan import RolloutPlan
from mindspeed_rl_plugin.loop.run_setup import SETUP, Setup
from mindspeed_rl_plugin.loop.schedules.colocated import SCHEDULES, SyncSchedule
from mindspeed_rl_plugin.loop.schedules.in_flight import InFlight
from mindspeed_rl_plugin.loop.schedules.partial import PartialSchedule
from mindspeed_rl_plugin.loop.schedules.schedule import Job, Stages
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.monitor import run_files
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.prompts import Pair
from mindspeed_rl_plugin.ranks import Collectives
from mindspeed_rl_plugin.reward.specs import ENVIRONMENT
from mindspeed_rl_plugin.rows import Sampling
from mindspeed_rl_plugin.stages.advantages import Advantages
from mindspeed_rl_plugin.stages.evaluate import Due, Evaluate
from mindspeed_rl_plugin.stages.generate import Generate
from mindspeed_rl_plugin.stages.logprobs import TokenPass
from mindspeed_rl_plugin.stages.measure import Dump, IterationLog, Measure
from mindspeed_rl_plugin.stages.prompts import Prompts
from mindspeed_rl_plugin.stages.reward import Reward
from mindspeed_rl_plugin.stages.select import Select
from mindspeed_rl_plugin.stages.stage import StageSpec
from mindspeed_rl_plugin.stages.table import stage_table
from mindspeed_rl_plugin.stages.trainer import Trainer
from mindspeed_rl_plugin.stages.update import CriticUpdate, Update
from mindspeed_rl_plugin.stages.user import UserStage
from mindspeed_rl_plugin.update.step import PolicyStep
from mindspeed_rl_plugin.update.value_step import ValueStep
from mindspeed_rl_plugin.weights.host_memory import HostMemoryBudget
from mindspeed_rl_plugin.weights.host_weights import HostWeights
from mindspeed_rl_plugin.weights.offload import TrainState
from mindspeed_rl_plugin.weights.resharder import Resharder
from mindspeed_rl_plugin.weights.storages import unwrap


def build_loop(
    inputs: Inputs, model: Any, optimizer: Any, reference: HostWeights | None, start: Start, critic: Critic | None
) -> Loop:
    """The loop of an algorithm that samples responses. model: this rank's chunks. Collective over all ranks; the engine
    takes seconds to start."""
    old_logps = inputs.sizes.steps > 1 or reads_old_logps(inputs.config, inputs.algorithm)
    inputs = dataclasses.replace(inputs, algorithm=dataclasses.replace(inputs.algorithm, old_logps=old_logps))
    args, config, algorithm = inputs.args, inputs.config, inputs.algorithm
    topology = Topology.from_megatron(1 if config.schedule.apart else config.rollout.generate_tp, model)
    ranks = Collectives(config.monitor.wait_timeout)
    mixed = algorithm.dynamic_sampling or config.schedule.partial  # groups of several epochs make a rollout
    plan = RolloutPlan(inputs.sizes, place(topology, ranks.group), inputs.forward.budget, mixed)
    table = table_of(inputs)
    size = dock_size(inputs, table)
    size.check_placed(plan.owners_of_round())
    docks = Docks.make(table, config, topology, ranks.group, plan)
    monitor = make_monitor(inputs, topology, start)
    apart = config.schedule.apart
    colocation = None if apart else _colocation(inputs, model, optimizer, critic, topology, docks, monitor)
    engine = None if colocation is None else colocation.engine
    policy = PolicyStep(algorithm, inputs.forward, model, norm_length=config.rollout.max_response_length)
    publisher = None
    if apart:
        publisher = make_publisher(inputs, topology.rank, ranks, docks.trainers, model, host_memory_budget(inputs))
    trainer: Trainer = MegatronTrainer(model, inputs.forward, policy, publisher)
    stages = _stages(inputs, trainer, model, reference, critic, topology, ranks, docks, table, engine, monitor)
    due = Due(bool(inputs.held_out), config.monitor.eval_every, args.train_iters)
    prompts = Prompts(docks.trainers, inputs.data, inputs.sizes.members, topology.leader)
    job = Job(plan, topology, ranks, monitor, docks.trainers, prompts, due)
    if colocation is None:
        _check_rotary(inputs, model)
        resumes = start.kind == "resume"
        schedule = build_schedule(inputs, job, stages, size.rounds, trainer, sampling_of(inputs), resumes)
    else:
        schedule = _colocated(inputs, job, stages, colocation, size.rounds)
    return Loop(
        args,
        job,
        schedule,
        _update(inputs, trainer, critic, topology, docks, table),
        IterationLog(monitor, ranks, docks.trainers),
        colocation,
        warmup=config.algorithm.critic_warmup if critic is not None else 0,
    )


def _colocated(inputs: Inputs, job: Job, stages: Stages, colocation: Colocation, rounds: int) -> SyncSchedule:
    flags, sizes = inputs.config.schedule, inputs.sizes
    if not flags.partial:
        return SCHEDULES[flags.schedule](job, stages, colocation, rounds)
    staleness = flags.max_staleness if flags.carry_unfinished else 0
    in_flight = InFlight(sizes.prompts, sizes.members, flags.in_the_making(sizes.prompts), staleness)
    longest = inputs.config.rollout.max_response_length
    return PartialSchedule(
        job, stages, colocation, rounds, in_flight=in_flight, carries=flags.carry_unfinished, longest=longest
    )


def table_of(inputs: Inputs) -> list[StageSpec]:
    """The stages of a run."""
    graders, own = inputs.graders, [spec for spec, _ in inputs.own_stages]
    rewards = {"graders": len(graders.names), "by_group": graders.by_group} if graders else {"graders": 0}
    config = inputs.config
    more = {"dump": config.monitor.dump_dir is not None, "own": own}
    return stage_table(inputs.algorithm, **rewards, **more, episodes=inputs.episodes)


def dock_size(inputs: Inputs, table: Sequence[StageSpec]) -> DockSize:
    """How much the dock must hold under these flags."""
    config = inputs.config
    rounds = config.algorithm.dynamic_sampling_rounds if inputs.algorithm.dynamic_sampling else 0
    ahead = (0, 0)
    if config.schedule.apart:
        held_out = len(inputs.held_out or ()) * (config.monitor.eval_pass_k + 1)
        ahead = (config.schedule.max_staleness + 1, -(-held_out // inputs.sizes.members))
    elif config.schedule.partial:
        ahead = (-(-config.schedule.in_the_making(inputs.sizes.prompts) // inputs.sizes.prompts) - 1, 0)
    return DockSize(config, table, inputs.sizes, rounds, ahead)


def make_monitor(inputs: Inputs, topology: Topology, start: Start) -> Monitor:
    """The monitor of a run."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    config, device, first = inputs.config.monitor, get_device(), inputs.data.at(0)
    return Monitor(
        config.run_dir or str(Path(inputs.args.save) / "rl"),
        topology.rank,
        topology.world,
        tensorboard_writer=get_tensorboard_writer(),
        wandb=get_wandb_writer() or None,
        is_terminal=None if config.progress else False,
        total_iterations=inputs.args.train_iters,
        resume_iteration=start.iteration,
        meter=device.memory,
        compares=inputs.algorithm.members > 1,
        synchronize=device.synchronize_stream,  # copies of the offload go on beside stages
        info={
            "algorithm": inputs.config.algorithm.algorithm,
            "parts": describe(inputs.algorithm),
            "flags": inputs.flags,
            "arguments": run_files.arguments(inputs.args),
            "versions": run_files.versions(),
            "device": device.kind,
            "held_out": len(inputs.held_out or ()),
            "first_prompt": inputs.tokenizer.decode(list(first.prompt if isinstance(first, Pair) else first.tokens)),
            "start": start.kind,
            "reference": start.reference_path,
            "graders": list(inputs.config.graders),
            **timing_setup(inputs, topology.world),
            **({"dump_dir": str(Path(config.dump_dir).resolve())} if config.dump_dir else {}),
        },
    )


def timing_setup(inputs: Inputs, ranks: int) -> dict[str, Any]:
    """What the model of a run's seconds needs of it, for run.json; nothing of pairs and of partial rollouts, which it
    does not know. ranks: that train."""
    if inputs.algorithm.from_pairs or inputs.config.schedule.partial:
        return {}
    return {SETUP: dataclasses.asdict(Setup.of(inputs.config, inputs.sizes, ranks))}


def host_memory_budget(inputs: Inputs) -> HostMemoryBudget:
    """The host memory of this machine, for what its ranks offload. Collective over all ranks."""
    return HostMemoryBudget.of_machine(launch_env()["local_world_size"], inputs.config.monitor.wait_timeout)


def _colocation(
    inputs: Inputs,
    model: Any,
    optimizer: Any,
    critic: Critic | None,
    topology: Topology,
    docks: Docks,
    monitor: Monitor,
) -> Colocation:
    args, config = inputs.args, inputs.config
    dtype = engine_options.dtype_of(args, config.rollout.engine_dtype)
    resharder = Resharder(
        ModelShape.from_megatron_args(args, inputs.vocab),
        Parallel.from_megatron_args(args),
        EngineParallel(config.rollout.generate_tp, config.rollout.generate_ep),
        rank=topology.rank,
        engine_dtype=dtype,
        mode=config.reshard.reshard,
        bucket_bytes=config.reshard.reshard_bucket_mb << 20,
        node_size=launch_env()["local_world_size"],
        verify=config.reshard.verify_weights,
        deadline=config.monitor.wait_timeout,
    )
    _check_rotary(inputs, model)
    budget = host_memory_budget(inputs)
    state = TrainState(model, optimizer, budget=budget, verify=config.reshard.verify_weights)
    if critic is not None:
        critic.state.budget, critic.state.verify = budget, config.reshard.verify_weights
    # The engine measures the free memory when it starts: the training state must not be in its way.
    trained = (state,) if critic is None else (state, critic)
    for one in trained:
        one.offload(config.reshard.offloaded)
    engine: Engine = VllmEngine(engine_options.options(inputs, dtype))
    if (setup := EpisodeSetup.of(config, inputs.tokenizer_path)) is not None:
        engine = setup.over(engine, inputs.tokenizer, inputs.environments, docks.engines.peers)
    engine.sleep()
    for one in trained:
        one.onload()
    return Colocation(model, state, critic, engine, resharder, config.reshard.offloaded, monitor.stage)


def _stages(
    inputs: Inputs,
    trainer: Trainer,
    model: Any,
    reference: HostWeights | None,
    critic: Critic | None,
    topology: Topology,
    ranks: Collectives,
    docks: Docks,
    table: Sequence[StageSpec],
    engine: Engine | None,
    monitor: Monitor,
) -> Stages:
    config, algorithm, deadline = inputs.config, inputs.algorithm, ranks.deadline
    specs = {spec.name: spec for spec in table}
    limit, seed = config.rollout.max_response_length, inputs.response_seed
    passes = {
        "logp_old": (trainer.forward,),
        "logp_ref": (trainer.forward, functools.partial(HostWeights.swapped_into, reference, model))
        if reference
        else (),
        "values": (functools.partial(critic.values, settings=inputs.forward),) if critic else (),
    }
    writer = topology.writer

    def at(name: str) -> tuple[StageSpec, Dock, float]:
        return specs[name], docks.of(specs[name]), deadline

    dump = Dump(config.monitor.dump_dir, inputs.decode) if config.monitor.dump_dir else None
    return Stages(
        generate=engine and Generate(*at("generate"), engine, sampling_of(inputs), seed, monitor.progress),
        reward=Reward(*at("reward"), inputs.graders, inputs.decode, config.episodes.environment_on_error == "drop"),
        own=[UserStage(*at(spec.name), instance) for spec, instance in inputs.own_stages],
        select=Select(*at("select"), algorithm, ranks.gather, seed),
        passes=[
            TokenPass(*at(name), forward, writer, *weights)
            for name, (forward, *weights) in ((n, p) for n, p in passes.items() if n in specs)
        ],
        advantages=Advantages(*at("advantage"), algorithm, limit, ranks.gather, _turn_weight(inputs)),
        measure=Measure(
            *at("measure"),
            ranks=ranks,
            algorithm=algorithm,
            limit=limit,
            graders=inputs.graders,
            dump=dump,
            tools=tool_names(inputs.environments),
        ),
        evaluation=engine and _evaluation(inputs, engine, ranks, monitor),
    )


def _turn_weight(inputs: Inputs) -> float:
    """Of the grader that gives what environments gave, 0 where there is none."""
    return dict(zip(inputs.graders.names, inputs.graders.weights, strict=True)).get(ENVIRONMENT, 0.0)


def _evaluation(inputs: Inputs, engine: Engine, ranks: Collectives, monitor: Monitor) -> Evaluate:
    return Evaluate(
        engine,
        inputs.held_out,
        inputs.graders,
        inputs.decode,
        sampling_of(inputs),
        ranks,
        monitor,
        samples=inputs.config.monitor.eval_pass_k,
        seed=inputs.response_seed,
        episodes=inputs.config.episodes.on,
    )


def _update(
    inputs: Inputs,
    trainer: Trainer,
    critic: Critic | None,
    topology: Topology,
    docks: Docks,
    table: Sequence[StageSpec],
) -> Update:
    config, algorithm = inputs.config, inputs.algorithm
    spec = next(spec for spec in table if spec.name == "update")
    given = spec, docks.of(spec), config.monitor.wait_timeout, trainer, topology.last_stage
    if critic is None:
        return Update(*given)
    value_step = ValueStep(algorithm, inputs.forward, critic.model)
    warmup, batch = config.algorithm.critic_warmup, inputs.sizes.global_batch
    return CriticUpdate(*given, critic=critic, value_step=value_step, warmup=warmup, global_batch=batch)


def sampling_of(inputs: Inputs) -> Sampling:
    """How responses are sampled."""
    rollout = inputs.config.rollout
    return Sampling(
        max_tokens=rollout.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        ignore_eos=rollout.ignore_eos,
    )


def _check_rotary(inputs: Inputs, model: Any) -> None:
    """The engine's rotary frequencies are those of the built model, whatever the launch script made of the flags."""
    for chunk in model:
        for module in unwrap(chunk).modules():  # with latent attention every layer has one of its own
            rotary = getattr(module, "rotary_pos_emb", None)
            if rotary is not None:
                check_rotary(hf_config.normalized(inputs.engine_config), rotary)
