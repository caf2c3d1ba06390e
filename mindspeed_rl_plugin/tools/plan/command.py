"""`python -m mindspeed_rl_plugin plan`: what a reshard of weights moves and holds, for every mode, on no machine.

    python -m mindspeed_rl_plugin plan --model qwen2.5-32b --train tp8,dp2 --generate tp4,dp4
    python -m mindspeed_rl_plugin plan SCRIPT.sh --generate tp2,ep8

GB are 1e9 bytes, and MB, in which smaller models are printed, 1e6; MiB are 2**20. Activations and the KV cache are not
counted; gradients and optimizer state leave the device before any reshard.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl_plugin.reshard.footprint import MODES
from mindspeed_rl_plugin.reshard.layout import EngineParallel, ModelShape, Parallel
from mindspeed_rl_plugin.tools.plan.estimate import Cost, Estimate, Machine, estimate
from mindspeed_rl_plugin.tools.plan.script import Script, read_script
from mindspeed_rl_plugin.tools.plan.words import (
    check_engine,
    check_experts,
    check_train,
    engine_layout_of,
    model_shape,
    train_layout,
)

GB = 1e9
PAPERS_LINK = 0.3  # GB/s between two nodes, in the paper's cluster
RUN_DEFAULT = "tp1"  # engines of a run without --rl-generate-tp


@dataclass(frozen=True)
class _Unit:
    """How bytes are printed: as GB, or as MB where the whole model is below one GB."""

    name: str
    size: float

    @classmethod
    def of(cls, found: Estimate) -> _Unit:
        return cls("GB", GB) if found.weights.total >= GB else cls("MB", 1e6)

    def __call__(self, count: float) -> str:
        return f"{count / self.size:.2f}"


def main(argv: list[str]) -> int:
    """Print the plan. Returns 0, or 1 where the layouts do not fit together."""
    options = _parser().parse_args(argv)
    try:
        print("\n".join(report(options)))
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_rl_plugin plan",
        description="Memory a device, bytes a rank and link, and seconds of a reshard. `plan --dock --help` has the "
        "plan of the sample flow.",
    )
    parser.add_argument(
        "script", nargs="?", type=Path, help="launch script (bash) whose arguments describe the trainer"
    )
    parser.add_argument("--model", help="published model by name, or a Hugging Face config.json, instead of a script")
    parser.add_argument("--train", help="trainer, such as tp4,pp2,ep8: tp pp vpp cp ep etp dp first last")
    parser.add_argument("--generate", help="engines, such as tp2,ep8: tp ep dp (default: the script's)")
    parser.add_argument("--world", type=int, help="ranks of the trainer (default: tp x pp x cp x dp)")
    parser.add_argument("--vocab", type=int, help="vocabulary (default: the script's, or its tokenizer's)")
    parser.add_argument("--generate-world", type=int, help="ranks of all engines (default: the trainer's)")
    parser.add_argument("--generate-first", type=int, default=0, help="first rank with an engine (default: 0)")
    parser.add_argument("--node", type=int, help="ranks a node (default: the script's, else 8)")
    parser.add_argument("--near", type=float, default=50.0, help="GB/s between ranks of a node (default: 50)")
    parser.add_argument(
        "--far",
        type=float,
        default=PAPERS_LINK,
        help=f"GB/s of a node's link each way (default: {PAPERS_LINK}, the paper's)",
    )
    parser.add_argument("--host", type=float, default=50.0, help="GB/s of device and host (default: 50, the paper's)")
    parser.add_argument("--device-gb", type=float, default=64.0, help="memory of a device (default: 64)")
    parser.add_argument(
        "--bucket-mb", type=int, help="--rl-reshard-bucket-mb, in MiB (default: the script's, else 256)"
    )
    parser.add_argument("--weight-bytes", type=int, choices=(2, 4), help="of a weight (default: the script's, else 2)")
    parser.add_argument("--grad-bytes", type=int, choices=(2, 4), default=4, help="of a gradient (default: 4)")
    parser.add_argument(
        "--critic", action="store_true", help="count PPO's critic (default: where the script's algorithm has one)"
    )
    parser.add_argument("--no-distributed-optimizer", action="store_true", help="optimizer state whole on every rank")
    return parser


def report(options: argparse.Namespace) -> list[str]:
    """Lines of the plan. Raises ValueError where the layouts do not fit together."""
    for name in ("node", "near", "far", "host", "device_gb"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be greater than 0, got {value}")
    for name, least in (("bucket_mb", 1), ("world", 1), ("vocab", 1), ("generate_world", 1), ("generate_first", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    script = read_script(options.script, options.vocab) if options.script else None
    notes = list(script.notes) if script else []
    shape, train = _trainer(options, script)
    world = options.generate_world or train.world
    words = _generate(options, script, notes)
    of_engine = f"--generate {words}" if options.generate else f"{options.script}, engines {words}"
    check_experts(shape, words, of_engine)
    engine, engines = engine_layout_of(words, world)
    check_train(shape, train, f"--train {options.train}" if options.train else f"{options.script}, trainer")
    check_engine(shape, engine, of_engine)
    if shape.groups % train.tp:
        notes.append(f"{shape.groups} query groups are fewer than tp{train.tp}: core 0.12 and MindSpeed refuse that")
    node = options.node or (script.node if script else None) or 8
    machine = Machine(node, options.near * GB, options.far * GB, options.host * GB, int(options.device_gb * GB))
    found = estimate(
        shape,
        train,
        engine,
        engines,
        machine,
        first=options.generate_first,
        itemsize=options.weight_bytes or (script.itemsize if script else 2),
        engine_itemsize=options.weight_bytes or (script.engine_itemsize if script else 2),
        grad_bytes=options.grad_bytes,
        distributed=not options.no_distributed_optimizer and (script is None or script.distributed),
        critic=options.critic or (script is not None and script.critic),
        experts=script.experts if script else "sequential",
        bucket_bytes=(options.bucket_mb or (script.bucket_mb if script else None) or 256) << 20,
    )
    unit = _Unit.of(found)
    head = [
        f"model   {options.model or options.script}: {shape.family}, {unit(found.weights.total)} {unit.name} of "
        f"weights (TW, cut by tensor parallelism, {unit(found.weights.tensor)}; EW, routed experts, "
        f"{unit(found.weights.expert)}; common, whole on every rank, {unit(found.weights.common)})",
        f"train   tp{train.tp} pp{train.pp} vpp{train.vpp} cp{train.cp} dp{train.dp}"
        + (f", experts etp{train.expert_tp} ep{train.ep} dp{train.edp}" if shape.moe_layers else "")
        + f": {train.world} ranks, layers a stage {_stages(shape, train)}",
        f"engines {engines} x (tp{engine.tp} ep{engine.ep}: {engine.ranks} ranks), on ranks "
        f"{options.generate_first} to {options.generate_first + engines * engine.ranks - 1}",
    ]
    lines = [*_memory(found, machine, unit), "", *_traffic(found, machine, unit), "", *_equation(found, unit, engine)]
    refused = [f"a run refuses: {line}" for line in script.refused] if script else []
    return [*head, *(f"note: {note}" for note in notes), *refused, "", *lines]


def _generate(options: argparse.Namespace, script: Script | None, notes: list[str]) -> str:
    """The engines in words: the option, else the script's, else what a run without flags has."""
    given = options.generate or (script.generate if script else None)
    if given is None and script is None:
        raise ValueError("give the engines, for example --generate tp4")
    if given is None:
        notes.append("the script has no --rl-generate-tp: engines of one rank, as in a run; --generate plans others")
    return given or RUN_DEFAULT


def _trainer(options: argparse.Namespace, script: Script | None) -> tuple[ModelShape, Parallel]:
    if script is not None:
        if options.model or options.train or options.world:
            raise ValueError("a script says model, layout and world itself; leave out --model, --train and --world")
        return script.shape, script.train
    if not options.model:
        raise ValueError("give a launch script, or --model and --train")
    shape = model_shape(options.model, 1)  # an unknown name is said before a layout is asked for
    if not options.train:
        raise ValueError(f"--model {options.model}: give the trainer too, for example --train tp8,dp2")
    if options.vocab:
        raise ValueError("--vocab is for a launch script; the model says its vocabulary itself")
    check_experts(shape, options.train, f"--train {options.train}")
    train = train_layout(options.train, options.world)
    return model_shape(options.model, train.tp), train


def _stages(shape: ModelShape, train: Parallel) -> str:
    counts = [sum(map(len, train.stage_layers(shape.layers, p))) for p in range(train.pp)]
    return str(counts[0]) if len(set(counts)) == 1 else ",".join(map(str, counts))


def _memory(found: Estimate, machine: Machine, unit: _Unit) -> list[str]:
    f = found.footprint

    def marked(count: float) -> str:
        return unit(count) + (" (does not fit)" if count > machine.device_bytes else "")

    rows = [
        (
            f"{unit.name} a device, fullest",
            "update",
            "reshard peak",
            "generate",
            f"left of {unit(machine.device_bytes)}",
        )
    ]
    for mode in MODES:
        left = machine.device_bytes - f.resident(mode)
        rows.append((mode, *map(marked, (f.update(), f.peak(mode), f.resident(mode))), unit(left)))
    released = (
        f"swapping releases {unit(f.train)} {unit.name} ({f.train / 2**30:.2f} GiB) of training weights a device to "
        "the KV cache"
    )
    own = f"engine's weights {unit(f.generate)}"
    critic = f", critic's weights {unit(f.critic)}" if f.critic else ""
    kept = f", and in naive weights {unit(f.train)}{critic}" if f.shared else ""
    return [
        *_table(rows),
        f"update: weights {unit(f.train)}, gradients {unit(f.gradients)}, optimizer {unit(f.optimizer)}"
        + (f"; critic's weights {unit(f.critic)}, gradients and optimizer {unit(f.critic_state)}" if f.critic else ""),
        "reshard peak: " + (f"weights {unit(f.train)}, " if f.shared else "") + f"{own}, and in naive two rounds of "
        f"shards {unit(f.rounds)}{critic if f.shared else ''}; in allgather the whole model {unit(f.whole)}; in stream "
        f"what is in flight {unit(f.in_flight)} (at most two buckets of {f.bucket_bytes >> 20} MiB)",
        f"generate: {own}{kept}; left is for the KV cache and the engine's working memory",
        "activations, of the update as of the engine, are in no column",
        released if f.shared else "no device has both trainer and engine: nothing needs to be swapped",
    ]


def _traffic(found: Estimate, machine: Machine, unit: _Unit) -> list[str]:
    moved = f"{unit.name} moved"
    head = (moved, "received, mean", "most", "from other nodes", "sent, most", "node in", "node out")
    rows = [(*head, "s in node", "s between", "s")]
    rows += [(mode, *map(unit, _bytes(cost)), *_seconds(cost)) for mode, cost in found.costs.items()]
    stream, whole = (found.costs[mode].flow.received.sum() for mode in ("stream", "allgather"))
    papers = ", the paper's link" if machine.far == PAPERS_LINK * GB else ""
    return [
        *_table(rows),
        "received and sent: of one rank; node in and out: all ranks of the busiest node together",
        f"at {machine.near / GB:g} GB/s in a node of {machine.node_size} (--near, --node), {machine.far / GB:g} GB/s "
        f"between nodes (--far{papers}); weights to the host at {machine.host / GB:g} GB/s (--host): "
        f"{found.out_seconds:.2f} s, and back again",
        f"stream receives {whole / stream:.1f} times fewer bytes than allgather"
        if stream
        else "stream receives nothing: every rank has what its engine needs",
        _published(found, unit),
    ]


def _published(found: Estimate, unit: _Unit) -> str:
    """MindSpeed-RL's own path beside ours."""
    moved = found.published
    if isinstance(moved, str):
        return f"MindSpeed-RL's own path: - ({moved})"
    ours = found.costs["stream"].flow.received.sum()
    times = f": {moved.sum() / ours:.2f} times what stream does" if ours else ""
    return (
        f"MindSpeed-RL's own path receives {unit(moved.mean())} {unit.name} a rank, {unit(moved.max())} at most{times}"
    )


def _bytes(cost: Cost) -> tuple[float, ...]:
    f = cost.flow
    receivers = f.received[f.received > 0]
    mean = receivers.mean() if len(receivers) else 0
    return (mean, f.received.max(), f.received_far.max(), f.sent.max(), f.node_in.max(), f.node_out.max())


def _seconds(cost: Cost) -> tuple[str, ...]:
    return tuple(f"{s:.2f}" for s in (cost.near_seconds, cost.far_seconds, cost.seconds))


def _equation(found: Estimate, unit: _Unit, engine: EngineParallel) -> list[str]:
    w = found.weights
    return [
        f"Eq. 3 of the paper: R = GDP x (TW / UTP + EW / GEP) = {found.gdp} x ({unit(w.tensor)} / {found.utp} + "
        f"{unit(w.expert)} / {found.gep}) = {unit(found.redundant)} {unit.name} of redundant weights in all, R / GDP = "
        f"{unit(found.redundant / found.gdp)} {unit.name}",
        f"GDP: data parallel ranks in generation, each {_devices(engine.tp)}; UTP: tensor parallel ranks in the "
        "update; GEP: expert parallel ranks in generation",
    ]


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices (tp{count})"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
