"""`python -m mindspeed_rl_plugin plan`: computes, without a device, the traffic and memory of a reshard (which moves
weights from trainer to engines), and host memory.

    python -m mindspeed_rl_plugin plan --model qwen2.5-32b --train tp8,dp2 --generate tp4,dp4
    python -m mindspeed_rl_plugin plan SCRIPT.sh --generate tp2,ep8
    python -m mindspeed_rl_plugin plan --dock          the bytes of a rollout's samples (dock_volume.py)
    python -m mindspeed_rl_plugin plan --schedule ...  seconds of an iteration under each schedule (which_schedule.py)

GB: 1e9 bytes; MB, for models of less than 1 GB: 1e6; MiB: 2**20. Activations and the KV cache are not counted. During a
reshard, the plan assumes, the trainer has only the policy's weights (with LoRA, merged ones too) on a device.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mindspeed_rl_plugin.adapters.targets import describe_adapters, saved_numel
from mindspeed_rl_plugin.checkpoints.disk import checkpoint_bytes
from mindspeed_rl_plugin.config.flag import spelt
from mindspeed_rl_plugin.layout.layout import EngineParallel
from mindspeed_rl_plugin.tools.layout_args import (
    check_engine,
    check_experts,
    check_least,
    check_train,
    engine_layout_of,
    model_shape,
    train_layout,
)
from mindspeed_rl_plugin.tools.plan import dock_volume, which_schedule
from mindspeed_rl_plugin.tools.plan.estimate import COMMON, EXPERT, FLOW_MODES, TENSOR, Estimate, PlannedRun, estimate
from mindspeed_rl_plugin.tools.plan.script_args import read_script
from mindspeed_rl_plugin.tools.text_table import aligned

GB = 1e9
NEAR_GB_PER_SECOND, FAR_GB_PER_SECOND, HOST_GB_PER_SECOND = 50.0, 100.0, 25.0  # defaults of --near, --far, --host
RUN_DEFAULT = "tp1"  # engines of a run without --rl-generate-tp and --rl-generate-ep


def main(argv: list[str]) -> int:
    """Print the plan. Returns 0, or 1 after an error message."""
    if any(word.startswith("--dock") for word in argv):
        return dock_volume.main(argv)
    by_schedule = "--schedule" in argv
    parser, lines = (which_schedule.parser, which_schedule.report) if by_schedule else (_parser, report)
    options = parser().parse_args([word for word in argv if word != "--schedule"])
    try:
        print("\n".join(lines(options)))
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_rl_plugin plan",
        description="Memory per device and machine, bytes per rank and link, and seconds of a reshard. "
        "See also `plan --dock --help` (the bytes of a rollout) and `plan --schedule --help` (the schedules).",
    )
    add = parser.add_argument
    add("script", nargs="?", type=Path, help="launch script (bash) whose arguments describe the trainer")
    add("--model", help="published model by name, or a Hugging Face config.json, instead of a script")
    add("--train", help="trainer's layout, such as tp4,pp2,ep8: tp pp vpp cp ep etp dp first last")
    add("--generate", help="engines' layout, such as tp2,ep8: tp ep dp (default: the script's)")
    add("--world", type=int, help="ranks of the trainer (default: tp x pp x cp x dp)")
    add("--vocab", type=int, help="size of the vocabulary (default: the script's)")
    add("--generate-world", type=int, help="ranks of all engines (default: as many as train)")
    add("--generate-first", type=int, default=0, help="first rank with an engine (default: 0)")
    add("--node", type=int, help="ranks per node (default: the script's, else 8)")
    add("--near", type=float, default=NEAR_GB_PER_SECOND, help="GB/s between ranks of a node (default: 50)")
    of_node = "GB/s from a node to all others (default: 100; arXiv 2507.19017: 0.3)"
    add("--far", type=float, default=FAR_GB_PER_SECOND, help=of_node)
    of_host = "GB/s from a device to its host (default: 25; arXiv 2507.19017: 50)"
    add("--host", type=float, default=HOST_GB_PER_SECOND, help=of_host)
    add("--device-gb", type=float, default=64.0, help="GB of memory per device (default: 64)")
    add("--bucket-mb", type=int, help="--rl-reshard-bucket-mb, in MiB (default: the script's, else 256)")
    add("--weight-bytes", type=int, choices=(2, 4), help="bytes of a weight (default: the script's, else 2)")
    add("--grad-bytes", type=int, choices=(2, 4), default=4, help="bytes of a gradient (default: 4)")
    add("--critic", action="store_true", help="count PPO's critic (default: if the script's algorithm has one)")
    add("--lora-rank", type=int, help="--rl-lora-rank (default: the script's; without a script no LoRA)")
    add("--no-distributed-optimizer", action="store_true", help="each rank has the optimizer state of all its weights")
    return parser


def report(options: argparse.Namespace) -> list[str]:
    """Lines of the plan. Raises ValueError for a wrong option, and if the layouts do not fit together."""
    _check_numbers(options)
    run = _run(options)
    engine, engines, notes = _engines(options, run)
    first = options.generate_first
    shown = _Shown(estimate(run, engine, engines, first))
    return [
        f"links   assumed, give yours: {options.near:g} GB/s between ranks of a node (--near; {run.node} ranks per "
        f"node, --node), {options.far:g} GB/s from a node to all others (--far), {options.host:g} GB/s between a "
        "device and its host (--host)",
        *shown.trainer(options.model or options.script),
        f"engines {engines} x (tp{engine.tp} ep{engine.ep}: {engine.ranks} ranks), on ranks {first} "
        f"to {first + engines * engine.ranks - 1}",
        *(f"note: {note}" for note in (*run.notes, *notes)),
        *("", *shown.memory(), shown.host(), *shown.lora(), "", *shown.traffic(), "", *shown.equation(engine)),
        *(f"a run refuses: {line}" for line in run.refused),
        *("", shown.conclusion()),
    ]


def _check_numbers(options: argparse.Namespace) -> None:
    for name in ("near", "far", "host", "device_gb"):
        if getattr(options, name) <= 0:
            raise ValueError(f"{spelt(name)} must be greater than 0, got {getattr(options, name)}")
    check_least(options, 1, "node", "bucket_mb", "world", "vocab", "generate_world", "lora_rank")
    check_least(options, 0, "generate_first")


def _run(options: argparse.Namespace) -> PlannedRun:
    """The planned run of the script, or of --model and --train, changed by the other options."""
    if options.script and (options.model or options.train or options.world):
        raise ValueError("a script has its own model, layout and world; leave out --model, --train and --world")
    run = read_script(options.script, options.vocab) if options.script else _run_of_model(options)
    check_train(run.shape, run.train, f"--train {options.train}" if options.train else f"{options.script}, trainer")
    return replace(
        run,
        node=options.node or run.node,
        near=options.near * GB,
        far=options.far * GB,
        host=options.host * GB,
        device_bytes=options.device_gb * GB,
        itemsize=options.weight_bytes or run.itemsize,
        engine_itemsize=options.weight_bytes or run.engine_itemsize,
        grad_bytes=options.grad_bytes,
        distributed=run.distributed and not options.no_distributed_optimizer,
        critic=run.critic or options.critic,
        lora=replace(run.lora, lora_rank=options.lora_rank) if options.lora_rank else run.lora,
        bucket_bytes=options.bucket_mb << 20 if options.bucket_mb else run.bucket_bytes,
    )


def _run_of_model(options: argparse.Namespace) -> PlannedRun:
    if not options.model:
        raise ValueError("give a launch script, or --model and --train")
    shape = model_shape(options.model, 1)  # an unknown name is refused before a layout is asked for
    if not options.train:
        raise ValueError(f"--model {options.model}: give the layout of the trainer too, for example --train tp4,dp2")
    if options.vocab:
        raise ValueError("--vocab is for a launch script; --model has its own vocabulary")
    check_experts(shape, options.train, f"--train {options.train}")
    train = train_layout(options.train, options.world)
    return PlannedRun(model_shape(options.model, train.tp), train)


def _engines(options: argparse.Namespace, run: PlannedRun) -> tuple[EngineParallel, int, list[str]]:
    """Layout of one engine, number of engines, and notes. The layout is that of --generate, else that of the script,
    else the default of the flags."""
    text, notes = options.generate or run.generate, []
    if text is None and not options.script:
        raise ValueError("give the layout of an engine, for example --generate tp4")
    if text is None:
        notes.append("the script has no --rl-generate-tp, so engines have 1 rank, as in a run; --generate: plan others")
        text = RUN_DEFAULT
    flag = f"--generate {text}" if options.generate else f"{options.script}, engines {text}"
    check_experts(run.shape, text, flag)
    engine, engines = engine_layout_of(text, options.generate_world or run.train.world)
    check_engine(run.shape, engine, flag)
    tp = run.train.tp
    if run.shape.groups % tp:
        notes.append(f"{run.shape.groups} query groups are fewer than tp{tp}: core 0.12 and MindSpeed refuse this")
    return engine, engines, notes


@dataclass(frozen=True)
class _Shown:
    """An estimate as lines; sizes are in MB if the model has less than 1 GB."""

    plan: Estimate

    @property
    def name(self) -> str:
        return "GB" if self.plan.weights.sum() >= GB else "MB"

    def unit(self, nbytes: float) -> str:
        return f"{nbytes / (GB if self.name == 'GB' else 1e6):.2f}"

    def trainer(self, source: str | Path) -> list[str]:
        shape, t, weights = self.plan.run.shape, self.plan.run.train, self.plan.weights
        tw, ew, cw = (self.unit(weights[kind]) for kind in (TENSOR, EXPERT, COMMON))
        counts = [str(sum(map(len, t.stage_layers(shape.layers, p)))) for p in range(t.pp)]
        chunks = "dualpipev" if t.folded else f"vpp{t.vpp}"
        experts = f", experts etp{t.expert_tp} ep{t.ep} dp{t.edp}" if shape.moe_layers else ""
        return [
            f"model   {source}: {shape.family}, {self.unit(weights.sum())} {self.name} of weights (TW, cut by tensor "
            f"parallelism, {tw}; EW, routed experts, {ew}; common, complete on every rank, {cw})",
            f"train   tp{t.tp} pp{t.pp} {chunks} cp{t.cp} dp{t.dp}{experts}: {t.world} ranks, layers per stage "
            f"{counts[0] if len(set(counts)) == 1 else ','.join(counts)}",
        ]

    def memory(self) -> list[str]:
        f, unit, most = self.plan, self.unit, self.plan.run.device_bytes
        p, c = f.policy, f.critic

        def marked(nbytes: float) -> str:
            return unit(nbytes) + (" (does not fit)" if nbytes > most else "")

        head = (f"{self.name} per device, fullest", "update", "reshard peak", "generate", f"left of {unit(most)}")
        left = unit(most - f.generate)
        modes = [(mode, *map(marked, (f.update, f.peak(mode), f.generate)), left) for mode in FLOW_MODES]
        merged = f"weights {unit(p.weights)}, " + (f"merged weights {unit(p.merged)}, " if p.merged else "")
        critic = f"; critic's weights {unit(c.weights)}, gradients and optimizer {unit(c.device - c.weights)}"
        return [
            *aligned([head, *modes], 1),
            f"update: weights {unit(p.weights)}, gradients {unit(p.gradients)}, optimizer {unit(p.optimizer)}"
            + (critic if c.device else ""),
            f"reshard peak: {merged if f.shared else ''}engine's weights "
            f"{unit(f.generate)}, and in allgather the complete model {unit(f.whole)}, in stream buffers of "
            f"{unit(f.in_flight)} (at most two buckets of {f.run.bucket_bytes >> 20} MiB)",
            f"generate: engine's weights {unit(f.generate)}; left: for the KV cache and the engine's working memory",
            "not counted: activations of the update and of the engine"
            + (", a layer's merged weight and its gradient in the update" if p.merged else ""),
            f"offloading the training weights (--rl-swap) frees {unit(p.weights)} {self.name} "
            f"({p.weights / 2**30:.2f} GiB) per device for the KV cache"
            if f.shared
            else "no device has both trainer and engine: nothing needs to be offloaded",
        ]

    def conclusion(self) -> str:
        """Whether the run fits a device, with the reshard in its default mode."""
        f, most = self.plan, self.plan.run.device_bytes
        needs = {"the update": f.update, "the reshard": f.peak("stream"), "generation": f.generate}
        needs["the check of merged weights before a checkpoint"] = f.update + f.policy.merged
        phase = max(needs, key=needs.__getitem__)
        fits, size = f"fits {most / GB:g} GB", f"{needs[phase] / GB:.2f} GB"
        if needs[phase] > most:
            return f"{fits}: no, {phase} needs {size} per device; use more ranks, or give --device-gb"
        only = "" if f.peak("allgather") <= most else ", but not with --rl-reshard allgather"
        left = f"{(most - f.generate) / GB:.1f} GB left for the KV cache and the engine's working memory"
        return f"{fits}: yes, {left}{only}"

    def host(self) -> str:
        """Host memory of a machine, if each of its ranks needs as much as the largest one."""
        run, held = self.plan.run, _on_host(self.plan)
        parts = ", ".join(f"{what} {self.unit(run.node * each)}" for what, each in held.items())
        more = "; not counted: the dock (plan a script with RL flags)" if run.reference is None else ""
        total = self.unit(run.node * sum(held.values()))
        return f"host memory per machine of {run.node} ranks, at most {total} {self.name}: {parts}{more}"

    def lora(self) -> list[str]:
        if self.plan.run.lora.lora_rank is None:
            return []
        f, run, unit, whole = self.plan, self.plan.run, self.unit, self.plan.whole_training
        host = run.node * (sum(_on_host(whole).values()) - sum(_on_host(f).values()))
        files = [checkpoint_bytes(None, saved_numel(run.shape, each.run.lora), run.itemsize) for each in (f, whole)]
        return [
            describe_adapters(run.shape, run.lora),
            f"LoRA saves {unit(whole.update - f.update)} {self.name} of gradients and optimizer per device, per host "
            f"{unit(host)}; a checkpoint, with optimizer, takes about {unit(files[0])} instead of {unit(files[1])}",
            "merge: while weights are sent, or checked before a checkpoint, a device of the trainer also has at most "
            f"{unit(f.policy.merged)} {self.name} of merged weights; engines have merged weights only, "
            f"{unit(f.generate)} as without LoRA",
        ]

    def traffic(self) -> list[str]:
        head = (f"{self.name} moved", "received, mean", "most", "from other nodes", "sent, most", "node in", "node out")
        rows = [(*head, "s in node", "s between", "s")]
        for mode, flow in self.plan.flows.items():
            seconds = self.plan.seconds(mode)
            most = (flow.received, flow.received_far, flow.sent, flow.node_in, flow.node_out)
            mean = flow.received.sum() / max(1, np.count_nonzero(flow.received))
            rows.append(
                (mode, *map(self.unit, (mean, *map(np.max, most))), *(f"{s:.2f}" for s in (*seconds, max(seconds))))
            )
        whole, stream = (self.plan.flows[mode].received.sum() for mode in FLOW_MODES)
        return [
            *aligned(rows, 1),
            "received, sent: of one rank (mean: of ranks that receive); node in, out: of the busiest node; s: the "
            "longer of s in node, s between",
            f"offload of the weights: {self.plan.policy.weights / self.plan.run.host:.2f} s each way",
            f"stream receives {whole / stream:.1f} times fewer bytes than allgather"
            if stream
            else "stream receives nothing: every rank has what its engine needs",
        ]

    def equation(self, engine: EngineParallel) -> list[str]:
        plan, unit = self.plan, self.unit
        devices = "one device" if engine.tp == 1 else f"{engine.tp} devices (tp{engine.tp})"
        return [
            f"Eq. 3 of MindSpeed RL (arXiv 2507.19017): R = GDP x (TW / UTP + EW / GEP) = {plan.gdp} x "
            f"({unit(plan.weights[TENSOR])} / {plan.run.train.tp} + {unit(plan.weights[EXPERT])} / {plan.gep}) = "
            f"{unit(plan.redundant)} {self.name} of redundant weights in all, R / GDP = "
            f"{unit(plan.redundant / plan.gdp)} {self.name}",
            f"GDP: data parallel ranks in generation, each {devices}; UTP: tensor parallel ranks in the update; GEP: "
            "expert parallel ranks in generation",
        ]


def _on_host(plan: Estimate) -> dict[str, float]:
    """Bytes of host memory that a rank needs, by purpose."""
    run, held = plan.run, {"offloaded training state": plan.offloaded if plan.shared else 0}
    if plan.parked:
        held["optimizer state (--swap-optimizer)"] = plan.parked
    if run.reference is not False and run.lora.lora_rank is None:
        held["copy of the reference (with a KL term, or DPO)"] = plan.reference
    if run.dock_bytes:
        held["dock"] = run.dock_bytes / run.train.world
    return held
