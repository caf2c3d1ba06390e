"""An engine that works for a job: built as the job says, on the ranks of the default group, until the job leaves."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.generators.description import JOB, WEIGHTS, Description
from mindspeed_rl_plugin.generators.lead import Lead
from mindspeed_rl_plugin.generators.service import Service
from mindspeed_rl_plugin.generators.team import Team
from mindspeed_rl_plugin.reshard.layout import EngineParallel
from mindspeed_rl_plugin.reshard.publish import TrainerWeights
from mindspeed_rl_plugin.reshard.pull import Puller


def serve(
    address: str,
    secret: str | bytes,
    share: tuple[int, int] | None = None,
    leaving: threading.Event | None = None,
    **changed: Any,
) -> None:
    """Generate for the job at `address` until it leaves. Collective over the ranks of the engine.

    secret: the job's, or the file that holds it; share: (i, n) under a strict order; leaving: set where the engine is
    to leave; changed: options of the engine that are not the job's.
    """
    team = Team()
    dock = Dock.join(address, secret)
    try:
        about = json.loads(dock.exchange.about or "{}")
        job = Description.from_json(about.get(JOB, ""))
        if job.strict and share is None:
            raise ValueError("--rl-async-order strict deals rollouts to the engines of its start: none can join later")
        options = replace(job.engine, sleep_mode=False, **changed)
        job.check_tokenizer(options.tokenizer)
        experts = team.size if options.expert_parallel > 1 else 1
        options = replace(options, tensor_parallel=team.size, expert_parallel=experts)
        engine = VllmEngine(options)
        parallel = EngineParallel(options.tensor_parallel, options.expert_parallel)
        weights = TrainerWeights.parse(about[WEIGHTS])
        puller = Puller(
            weights,
            parallel,
            engine.parameters(),
            dock.exchange.sources(),
            rank=team.rank,
            ranks=team.here,
            deadline=job.deadline,
            sharing=dock.exchange.once_a_machine,
        )
        lead = Lead(dock, job, options.max_running, share, leaving or threading.Event()) if team.leads else None
        try:
            Service(engine, puller, job, team, lead).run()
        finally:
            puller.close()
        engine.shutdown()
    finally:
        dock.close()
