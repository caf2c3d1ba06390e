"""The monitor of a run, and the description of the run in run.json."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.algorithms.describe import describe
from mindspeed_rl_plugin.device import get_device
from mindspeed_rl_plugin.loop.inputs import Inputs
from mindspeed_rl_plugin.loop.run_setup import SETUP, Setup
from mindspeed_rl_plugin.loop.start import Start
from mindspeed_rl_plugin.loop.topology import Topology
from mindspeed_rl_plugin.monitor import run_files
from mindspeed_rl_plugin.monitor.monitor import Monitor
from mindspeed_rl_plugin.monitor.trace import Trace
from mindspeed_rl_plugin.prompts import Pair


def make_monitor(inputs: Inputs, topology: Topology, start: Start) -> Monitor:
    """The monitor of a run."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    config, device, first = inputs.config.monitor, get_device(), inputs.data.at(0)
    run_dir = config.directory(inputs.args.save)
    return Monitor(
        run_dir,
        topology.rank,
        topology.world,
        tensorboard_writer=get_tensorboard_writer(),
        wandb=get_wandb_writer() or None,
        is_terminal=None if config.progress else False,
        total_iterations=inputs.args.train_iters,
        resume_iteration=start.iteration,
        trace=Trace.of(config.trace, config.trace_ranks, topology.rank, run_dir),
        meter=device.memory,
        compares=inputs.algorithm.members > 1,
        synchronize=device.synchronize_stream,  # only this stream: copies of the offload may overlap stages
        info={
            "algorithm": inputs.config.algorithm.algorithm,
            "parts": describe(inputs.algorithm),
            "flags": inputs.flags,
            "arguments": run_files.arguments(inputs.args),
            "versions": run_files.versions(),
            "launch": {"words": sys.argv, "directory": os.getcwd(), "ranks": topology.world},  # for `replay`
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
    """Settings in run.json from which `plan --schedule` computes the run's time; empty for pairs and partial rollouts,
    which `plan` does not support. ranks: number of ranks that train."""
    if inputs.algorithm.from_pairs or inputs.config.schedule.partial:
        return {}
    return {SETUP: dataclasses.asdict(Setup.of(inputs.config, inputs.sizes, ranks))}
