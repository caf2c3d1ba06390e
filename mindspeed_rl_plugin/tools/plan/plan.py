"""`python -m mindspeed_rl_plugin plan`: what a reshard of weights moves and holds, and host memory, on no machine.

    python -m mindspeed_rl_plugin plan --model qwen2.5-32b --train tp8,dp2 --generate tp4,dp4
    python -m mindspeed_rl_plugin plan SCRIPT.sh --generate tp2,ep8
    python -m mindspeed_rl_plugin plan --dock          the bytes of a rollout's samples (dock_volume.py)

GB are 1e9 bytes, and MB, in which smaller models are printed, 1e6; MiB are 2**20. Activations and the KV cache are not
counted; gradients and optimizer state leave the device before any reshard.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from mindspeed_rl_plugin.reshard.layout import EngineParallel, ModelShape, Parallel
from mindspeed_rl_plugin.tools.layout_args import (
    check_engine,
    check_experts,
    check_train,
    engine_layout_of,
    model_shape,
    train_layout,
)
from mindspeed_rl_plugin.tools.plan import dock_volume
from mindspeed_rl_plugin.tools.plan.estimate import COMMON, EXPERT, MODES, TENSOR, Cost, Estimate, Machine, estimate
from mindspeed_rl_plugin.tools.plan.script_args import DEFAULT_BUCKET_MB, Script, read_script
from mindspeed_rl_plugin.tools.text_table import aligned

GB = 1e9
RUN_DEFAULT = "tp1"  # engines of a run without --rl-generate-tp
Unit = Callable[[float], str]


def main(argv: list[str]) -> int:
    """Print the plan. Returns 0, or 1 where the layouts do not fit together."""
    if any(word.startswith("--dock") for word in argv):
        return dock_volume.main(argv)
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
        description="Memory a device and machine, bytes a rank and link, and seconds of a reshard. "
        "`plan --dock --help` has the plan of the sample flow.",
    )
    add = parser.add_argument
    add("script", nargs="?", type=Path, help="launch script (bash) whose arguments describe the trainer")
    add("--model", help="published model by name, or a Hugging Face config.json, instead of a script")
    add("--train", help="trainer, such as tp4,pp2,ep8: tp pp vpp cp ep etp dp first last")
    add("--generate", help="engines, such as tp2,ep8: tp ep dp (default: the script's)")
    add("--world", type=int, help="ranks of the trainer (default: tp x pp x cp x dp)")
    add("--vocab", type=int, help="vocabulary (default: the script's, or its tokenizer's)")
    add("--generate-world", type=int, help="ranks of all engines (default: the trainer's)")
    add("--generate-first", type=int, default=0, help="first rank with an engine (default: 0)")
    add("--node", type=int, help="ranks a node (default: the script's, else 8)")
    add("--near", type=float, default=50.0, help="GB/s between ranks of a node (default: 50)")
    add("--far", type=float, default=100.0, help="GB/s of a node's links each way (default: 100; the paper's: 0.3)")
    add("--host", type=float, default=25.0, help="GB/s of device and host (default: 25; the paper's: 50)")
    add("--device-gb", type=float, default=64.0, help="memory of a device (default: 64)")
    add("--bucket-mb", type=int, help="--rl-reshard-bucket-mb, in MiB (default: the script's, else 256)")
    add("--weight-bytes", type=int, choices=(2, 4), help="of a weight (default: the script's, else 2)")
    add("--grad-bytes", type=int, choices=(2, 4), default=4, help="of a gradient (default: 4)")
    add("--critic", action="store_true", help="count PPO's critic (default: where the script's algorithm has one)")
    add("--no-distributed-optimizer", action="store_true", help="optimizer state whole on every rank")
    return parser


def report(options: argparse.Namespace) -> list[str]:
    """Lines of the plan. Raises ValueError where the layouts do not fit together."""
    least = {"node": 1, "bucket_mb": 1, "world": 1, "vocab": 1, "generate_world": 1, "generate_first": 0}
    for name, limit in {**dict.fromkeys(("near", "far", "host", "device_gb")), **least}.items():
        value = getattr(options, name)
        if value is not None and (value <= 0 if limit is None else value < limit):
            what = "greater than 0" if limit is None else f"at least {limit}"
            raise ValueError(f"--{name.replace('_', '-')} must be {what}, got {value}")
    script = read_script(options.script, options.vocab) if options.script else None
    notes = list(script.notes) if script else []
    shape, train = _trainer(options, script)
    engine, engines = _engines(options, script, shape, train, notes)
    machine = Machine(
        node_size=options.node or (script.node if script else None) or 8,
        near=options.near * GB,
        far=options.far * GB,
        host=options.host * GB,
        device_bytes=int(options.device_gb * GB),
    )
    bucket_mb = options.bucket_mb or (script.bucket_mb if script else DEFAULT_BUCKET_MB)
    plan = estimate(
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
        bucket_bytes=bucket_mb << 20,
    )
    name, size = ("GB", GB) if plan.weights.sum() >= GB else ("MB", 1e6)

    def unit(count: float) -> str:
        return f"{count / size:.2f}"

    tw, ew, cw = (unit(plan.weights[kind]) for kind in (TENSOR, EXPERT, COMMON))
    last = options.generate_first + engines * engine.ranks - 1
    counts = [str(sum(map(len, train.stage_layers(shape.layers, p)))) for p in range(train.pp)]
    experts = f", experts etp{train.expert_tp} ep{train.ep} dp{train.edp}" if shape.moe_layers else ""
    return [
        f"links   assumed, give your own: {options.near:g} GB/s between ranks of a node of {machine.node_size} "
        f"(--near, --node), {options.far:g} GB/s a node to others (--far), {options.host:g} GB/s a device to its host "
        "(--host)",
        f"model   {options.model or options.script}: {shape.family}, {unit(plan.weights.sum())} {name} of weights (TW, "
        f"cut by tensor parallelism, {tw}; EW, routed experts, {ew}; common, whole on every rank, {cw})",
        f"train   tp{train.tp} pp{train.pp} vpp{train.vpp} cp{train.cp} dp{train.dp}{experts}: {train.world} ranks, "
        f"layers a stage {counts[0] if len(set(counts)) == 1 else ','.join(counts)}",
        f"engines {engines} x (tp{engine.tp} ep{engine.ep}: {engine.ranks} ranks), on ranks {options.generate_first} "
        f"to {last}",
        *(f"note: {note}" for note in notes),
        *(f"a run refuses: {line}" for line in (script.refused if script else ())),
        "",
        *_memory(plan, machine, unit, name, bucket_mb),
        *_host(plan, machine, unit, name, script),
        "",
        *_traffic(plan, unit, name),
        "",
        *_equation(plan, unit, name, engine),
    ]


def _engines(
    options: argparse.Namespace, script: Script | None, shape: ModelShape, train: Parallel, notes: list[str]
) -> tuple[EngineParallel, int]:
    """One engine and how many: of the option, else the script's, else what a run without flags has."""
    text = options.generate or (script.generate if script else None)
    if text is None and script is None:
        raise ValueError("give the engines, for example --generate tp4")
    if text is None:
        notes.append("the script has no --rl-generate-tp: engines of one rank, as in a run; --generate plans others")
        text = RUN_DEFAULT
    flag = f"--generate {text}" if options.generate else f"{options.script}, engines {text}"
    check_experts(shape, text, flag)
    engine, engines = engine_layout_of(text, options.generate_world or train.world)
    check_train(shape, train, f"--train {options.train}" if options.train else f"{options.script}, trainer")
    check_engine(shape, engine, flag)
    if shape.groups % train.tp:
        notes.append(f"{shape.groups} query groups are fewer than tp{train.tp}: core 0.12 and MindSpeed refuse that")
    return engine, engines


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


def _memory(plan: Estimate, machine: Machine, unit: Unit, name: str, bucket_mb: int) -> list[str]:
    f, p, c = plan.footprint, plan.footprint.policy, plan.footprint.critic

    def marked(count: float) -> str:
        return unit(count) + (" (does not fit)" if count > machine.device_bytes else "")

    head = (f"{name} a device, fullest", "update", "reshard peak", "generate", f"left of {unit(machine.device_bytes)}")
    left = unit(machine.device_bytes - f.generate)
    rows = [head, *((mode, *map(marked, (f.update, f.peak(mode), f.generate)), left) for mode in MODES)]
    critic = f"; critic's weights {unit(c.weights)}, gradients and optimizer {unit(c.total - c.weights)}"
    return [
        *aligned(rows, 1),
        f"update: weights {unit(p.weights)}, gradients {unit(p.gradients)}, optimizer {unit(p.optimizer)}"
        + (critic if c.total else ""),
        "reshard peak: " + (f"weights {unit(p.weights)}, " if f.shared else "") + f"engine's weights {unit(f.generate)}"
        f", and in allgather the whole model {unit(f.whole)}; in stream what is in flight {unit(f.in_flight)} (at most "
        f"two buckets of {bucket_mb} MiB)",
        f"generate: engine's weights {unit(f.generate)}; left is for the KV cache and the engine's working memory",
        "activations, of the update as of the engine, are in no column",
        f"swapping releases {unit(p.weights)} {name} ({p.weights / 2**30:.2f} GiB) of training weights a device to the "
        "KV cache"
        if f.shared
        else "no device has both trainer and engine: nothing needs to be swapped",
    ]


def _host(plan: Estimate, machine: Machine, unit: Unit, name: str, script: Script | None) -> list[str]:
    """Host memory of a machine that is full of the fullest ranks."""
    f, ranks = plan.footprint, machine.node_size
    held = {"training state that is swapped out": f.offloaded if f.shared else 0}
    if script is None or script.reference is not False:
        held["copy of the reference (with a KL term, or DPO)"] = f.policy.weights
    held["engine's weights while it sleeps (on an accelerator)"] = f.generate
    if script and script.dock_bytes:
        held["dock"] = script.dock_bytes / script.train.world
    total = ranks * sum(held.values())
    more = "; and the dock, by `plan --dock` or of a script with RL flags"
    more = "" if script and script.reference is not None else more
    return [
        f"host memory a machine of {ranks} ranks, at most {unit(total)} {name}: "
        + ", ".join(f"{what} {unit(ranks * each)}" for what, each in held.items())
        + more
    ]


def _traffic(plan: Estimate, unit: Unit, name: str) -> list[str]:
    head = (f"{name} moved", "received, mean", "most", "from other nodes", "sent, most", "node in", "node out")
    rows = [(*head, "s in node", "s between", "s")]
    rows += [(mode, *map(unit, _bytes(cost)), *_seconds(cost)) for mode, cost in plan.costs.items()]
    stream, whole = (plan.costs[mode].flow.received.sum() for mode in ("stream", "allgather"))
    return [
        *aligned(rows, 1),
        "received and sent: of one rank; node in and out: all ranks of the busiest node together",
        f"weights to the host: {plan.out_seconds:.2f} s, and back again",
        f"stream receives {whole / stream:.1f} times fewer bytes than allgather"
        if stream
        else "stream receives nothing: every rank has what its engine needs",
    ]


def _bytes(cost: Cost) -> tuple[float, ...]:
    f = cost.flow
    receivers = f.received[f.received > 0]
    mean = receivers.mean() if len(receivers) else 0
    return (mean, f.received.max(), f.received_far.max(), f.sent.max(), f.node_in.max(), f.node_out.max())


def _seconds(cost: Cost) -> tuple[str, ...]:
    return tuple(f"{s:.2f}" for s in (cost.near_seconds, cost.far_seconds, cost.seconds))


def _equation(plan: Estimate, unit: Unit, name: str, engine: EngineParallel) -> list[str]:
    devices = "one device" if engine.tp == 1 else f"{engine.tp} devices (tp{engine.tp})"
    return [
        f"Eq. 3 of the paper: R = GDP x (TW / UTP + EW / GEP) = {plan.gdp} x ({unit(plan.weights[TENSOR])} / "
        f"{plan.utp} + {unit(plan.weights[EXPERT])} / {plan.gep}) = {unit(plan.redundant)} {name} of redundant weights "
        f"in all, R / GDP = {unit(plan.redundant / plan.gdp)} {name}",
        f"GDP: data parallel ranks in generation, each {devices}; UTP: tensor parallel ranks in the update; GEP: "
        "expert parallel ranks in generation",
    ]
