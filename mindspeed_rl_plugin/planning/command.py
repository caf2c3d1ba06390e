"""`python -m mindspeed_rl_plugin plan`: what a reshard of weights moves and holds, for every mode, on no machine.

    python -m mindspeed_rl_plugin plan --model qwen2.5-32b --train tp8,dp2 --generate tp4,dp4
    python -m mindspeed_rl_plugin plan SCRIPT.sh --generate tp2,ep8

GB are 1e9 bytes. Activations and the KV cache are not counted; gradients and optimizer state leave the device before
any reshard.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mindspeed_rl_plugin.planning.estimate import Cost, Estimate, Machine, estimate
from mindspeed_rl_plugin.planning.script import Script, read_script
from mindspeed_rl_plugin.planning.words import engine_layout_of, model_shape, train_layout
from mindspeed_rl_plugin.reshard.footprint import MODES
from mindspeed_rl_plugin.reshard.layout import ModelShape, Parallel

GB = 1e9


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
    parser.add_argument("--generate", help="engines, such as tp2,ep8: tp ep dp")
    parser.add_argument("--world", type=int, help="ranks of the trainer (default: tp x pp x cp x dp)")
    parser.add_argument("--vocab", type=int, help="vocabulary, where a script leaves it to the tokenizer")
    parser.add_argument("--generate-world", type=int, help="ranks of all engines (default: the trainer's)")
    parser.add_argument("--generate-first", type=int, default=0, help="first rank with an engine (default: 0)")
    parser.add_argument("--node", type=int, default=8, help="ranks a node (default: 8)")
    parser.add_argument("--near", type=float, default=50.0, help="GB/s between ranks of a node (default: 50)")
    parser.add_argument(
        "--far", type=float, default=0.3, help="GB/s of a node's link each way (default: 0.3, the paper's)"
    )
    parser.add_argument("--host", type=float, default=50.0, help="GB/s of device and host (default: 50, the paper's)")
    parser.add_argument("--device-gb", type=float, default=64.0, help="memory of a device (default: 64)")
    parser.add_argument("--bucket-mb", type=int, help="--rl-reshard-bucket-mb (default: the script's, else 256)")
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
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be greater than 0, got {getattr(options, name)}")
    script = read_script(options.script, options.vocab) if options.script else None
    shape, train = _trainer(options, script)
    world = options.generate_world or train.world
    generate = options.generate or (f"tp{script.generate_tp}" if script and script.generate_tp else None)
    if generate is None:
        raise ValueError("give the engines, for example --generate tp4; the script has no --rl-generate-tp")
    engine, engines = engine_layout_of(generate, world)
    machine = Machine(options.node, options.near * GB, options.far * GB, options.host * GB, int(options.device_gb * GB))
    found = estimate(
        shape,
        train,
        engine,
        engines,
        machine,
        first=options.generate_first,
        itemsize=options.weight_bytes or (script.itemsize if script else 2),
        grad_bytes=options.grad_bytes,
        distributed=not options.no_distributed_optimizer and (script is None or script.distributed),
        critic=options.critic or (script is not None and script.critic),
        bucket_bytes=(options.bucket_mb or (script.bucket_mb if script else None) or 256) << 20,
    )
    notes = [f"note: {note}" for note in script.notes] if script else []
    head = [
        f"model   {options.model or options.script}: {shape.family}, {_gb(found.weights.total)} GB of weights "
        f"(tensor parallel TW {_gb(found.weights.tensor)}, expert EW {_gb(found.weights.expert)}, "
        f"common {_gb(found.weights.common)})",
        f"train   tp{train.tp} pp{train.pp} vpp{train.vpp} cp{train.cp} dp{train.dp}"
        + (f", experts etp{train.expert_tp} ep{train.ep} dp{train.edp}" if shape.moe_layers else "")
        + f": {train.world} ranks, layers a stage {_stages(shape, train)}",
        f"engines {engines} x (tp{engine.tp} ep{engine.ep}: {engine.ranks} ranks), on ranks "
        f"{options.generate_first} to {options.generate_first + engines * engine.ranks - 1}",
    ]
    return [*head, *notes, "", *_memory(found, machine), "", *_traffic(found, machine), "", *_equation(found)]


def _trainer(options: argparse.Namespace, script: Script | None) -> tuple[ModelShape, Parallel]:
    if script is not None:
        if options.model or options.train or options.world:
            raise ValueError("a script says model, layout and world itself; leave out --model, --train and --world")
        return script.shape, script.train
    if not options.model or not options.train:
        raise ValueError("give a launch script, or --model and --train")
    train = train_layout(options.train, options.world)
    return model_shape(options.model, train.tp), train


def _stages(shape: ModelShape, train: Parallel) -> str:
    counts = [sum(map(len, train.stage_layers(shape.layers, p))) for p in range(train.pp)]
    return str(counts[0]) if len(set(counts)) == 1 else ",".join(map(str, counts))


def _memory(found: Estimate, machine: Machine) -> list[str]:
    f = found.footprint
    rows = [("GB a device, fullest", "update", "reshard peak", "generate", f"left of {_gb(machine.device_bytes)}")]
    for mode in MODES:
        left = machine.device_bytes - f.resident(mode)
        over = " (does not fit)" if f.peak(mode) > machine.device_bytes else ""
        rows.append((mode, _gb(f.update()), _gb(f.peak(mode)) + over, _gb(f.resident(mode)), _gb(left)))
    released = (
        f"swapping releases {_gb(f.train)} GB ({f.train / 2**30:.2f} GiB) of training weights a device to the KV cache"
    )
    return [
        *_table(rows),
        f"update: weights {_gb(f.train)}, gradients {_gb(f.gradients)}, optimizer {_gb(f.optimizer)}; "
        + (f"critic's weights {_gb(f.critic)}, gradients and optimizer {_gb(f.critic_state)}; " if f.critic else "")
        + f"engine's weights {_gb(f.generate)}",
        released if f.shared else "no device has both trainer and engine: nothing needs to be swapped",
    ]


def _traffic(found: Estimate, machine: Machine) -> list[str]:
    head = ("GB moved", "received, mean", "most", "from other nodes", "sent, most", "node in", "node out")
    rows = [(*head, "s in node", "s between", "s")]
    rows += [(mode, *_bytes(cost), *_seconds(cost)) for mode, cost in found.costs.items()]
    stream, whole = found.costs["stream"], found.costs["allgather"]
    less = whole.flow.received.sum() / max(stream.flow.received.sum(), 1)
    return [
        *_table(rows),
        f"at {machine.near / GB:g} GB/s in a node of {machine.node_size}, {machine.far / GB:g} GB/s between nodes; "
        f"weights to the host at {machine.host / GB:g} GB/s: {found.out_seconds:.2f} s, and back again",
        f"stream receives {less:.1f} times fewer bytes than allgather",
        _published(found),
    ]


def _published(found: Estimate) -> str:
    """MindSpeed-RL's own path beside ours."""
    moved = found.published
    if isinstance(moved, str):
        return f"MindSpeed-RL's own path refuses this pair: {moved}"
    less = moved.sum() / max(found.costs["stream"].flow.received.sum(), 1)
    return (
        f"MindSpeed-RL's own path receives {_gb(moved.mean())} GB a rank, {_gb(moved.max())} at most: {less:.2f} times "
        "what stream does"
    )


def _bytes(cost: Cost) -> tuple[str, ...]:
    f = cost.flow
    receivers = f.received[f.received > 0]
    mean = receivers.mean() if len(receivers) else 0
    return tuple(
        map(_gb, (mean, f.received.max(), f.received_far.max(), f.sent.max(), f.node_in.max(), f.node_out.max()))
    )


def _seconds(cost: Cost) -> tuple[str, ...]:
    return tuple(f"{s:.2f}" for s in (cost.near_seconds, cost.far_seconds, cost.seconds))


def _equation(found: Estimate) -> list[str]:
    w = found.weights
    return [
        f"Eq. 3: R = GDP x (TW / UTP + EW / GEP) = {found.gdp} x ({_gb(w.tensor)} / {found.utp} + {_gb(w.expert)} / "
        f"{found.gep}) = {_gb(found.redundant)} GB on all devices, {_gb(found.redundant / found.gdp)} GB each"
    ]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _gb(count: float) -> str:
    return f"{count / GB:.2f}"
