"""An engine that works for a job until the job ends. It is built with the job's options on the ranks of the default
group, or it is a vLLM server of the user, to which this process sends prompts."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.engine.engine_sizes import kv_cache_problems
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.rollout_engine import Engine
from mindspeed_rl_plugin.engine.routes import RouteSizes
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.environment import launch_env, say
from mindspeed_rl_plugin.episodes.episode_kind import with_environments
from mindspeed_rl_plugin.generators.description import Description, job_of, welcome
from mindspeed_rl_plugin.generators.engine_loop import EngineLoop, Team
from mindspeed_rl_plugin.generators.pulling import puller_of
from mindspeed_rl_plugin.generators.scheduler import LEASE_SECONDS, Scheduler
from mindspeed_rl_plugin.generators.server_engine import ServerEngine, ServerWeights
from mindspeed_rl_plugin.generators.vllm_server import VllmServer, check_served
from mindspeed_rl_plugin.layout.layout import EngineParallel
from mindspeed_rl_plugin.monitor.trace import Trace
from mindspeed_rl_plugin.service.guest_dock import GuestDock, here
from mindspeed_rl_plugin.service.invitation import read_secret
from mindspeed_rl_plugin.weights.pull import Puller


def serve(
    address: str,
    secret: str | bytes,
    share: tuple[int, int] | None = None,
    leaving: threading.Event | None = None,
    who: str = "",
    url: str = "",
    trace: Trace | None = None,
    **changed: Any,
) -> None:
    """Generate for the job at `address` until the job ends or the engine leaves. Collective over the engine's ranks.

    secret: of the job, or path of a file with it.
    share: (i, n): under a strict order this engine samples part i of n of each rollout; None: the order is free.
    leaving: set when the engine must leave.
    who: name of the engine in the job's log.
    url: of a server that samples; "": the engine is built here.
    trace: of this process; weights after N steps count as iteration N + 1.
    changed: options of the engine that replace the job's options.
    Raises ValueError with the fix if a server or a tokenizer does not fit, and the errors of `VllmServer`.
    """
    name = f"server at {url}" if url else "engine"
    who = who or (name if url else here("joined engine"))
    with closing(GuestDock.join(address, secret, lease_seconds=LEASE_SECONDS, who=who)) as dock:
        job = job_of(dock, strict=share is not None)
        team = Team(job.deadline)
        if share is None:
            say(welcome(dock, job, address))
        options = replace(job.engine, sleep_mode=False, **changed)
        tokenizer = tokenizer_here(job, options, url, changed.get("tokenizer"))
        if url:
            engine, puller, slots = _at_url(url, address, secret, job, options)
        else:
            engine, puller, slots = _built(dock, job, options, team)
        with closing(puller):
            sampler, ranks = engine, lambda: team.of_replica(sampler, job.deadline)
            engine = with_environments(sampler, job.environments, tokenizer, job.run, ranks)
            scheduler = None
            if team.rank == 0:
                scheduler = Scheduler(dock, job, slots, engine.replicas, share, leaving or threading.Event())
                if share is None:
                    say(f"the {name} generates, up to {slots} responses at once")
            trace = trace or Trace(None, Path(), "")
            EngineLoop(engine, puller, job, team, scheduler, trace).run()
            trace.close()
        engine.shutdown()


def _built(dock: GuestDock, job: Description, options: VllmOptions, team: Team) -> tuple[Engine, Puller, int]:
    """An engine on the ranks of the team, the puller of its weights, and the most responses that an engine samples at
    once (of engines that share experts: each)."""
    options = sized(options, team.size)
    engine = VllmEngine(options)
    parallel = EngineParallel(options.tensor_parallel, options.expert_parallel)
    puller = puller_of(dock, job, parallel, engine.parameters(), team.rank, team.here)
    return engine, puller, options.max_running


def _at_url(
    url: str, address: str, secret: str, job: Description, options: VllmOptions
) -> tuple[Engine, ServerWeights, int]:
    """As `_built`, with a server as the engine. This process is alone in the default group."""
    server = VllmServer(url, job.deadline)
    workers = server.check()
    check_served(url, workers[0], job.engine, bool(job.sampling.stop))
    routes = RouteSizes.of(options.config) if options.record_routes else None
    engine = ServerEngine(server, options.eos_token_ids, workers[0].seeds or options.request_seeds, routes)
    weights = ServerWeights(server, address, read_secret(secret), [one.machine for one in workers], engine.lose)
    return engine, weights, min(options.max_running, workers[0].max_running)


def sized(options: VllmOptions, ranks: int) -> VllmOptions:
    """Options of an engine on `ranks` ranks. Tensor parallelism is over all ranks; but engines that share experts have
    the job's sizes, which `ranks` must fit. Raises ValueError, also for a KV cache above this host's memory."""
    for problem in kv_cache_problems(options.kv_cache_bytes / 2**30, launch_env()["local_world_size"]):
        raise ValueError(problem)
    if options.sharing == 1:
        return replace(options, tensor_parallel=ranks, expert_parallel=ranks if options.expert_parallel > 1 else 1)
    if ranks != options.expert_parallel:
        raise ValueError(
            f"the job spreads experts over {options.expert_parallel} ranks (--rl-generate-ep), this engine has {ranks};"
            f" start it by torchrun with --nproc-per-node {options.expert_parallel}"
        )
    return options


def tokenizer_here(job: Description, options: VllmOptions, url: str, given: str | None) -> str | None:
    """The directory of the tokenizer that this process needs; None: it needs none (a server at `url` has its own).
    Raises ValueError if `given` is not needed, or if the tokens are not those of the job's tokenizer."""
    if url and job.tokenizer is None:
        if given is not None:
            raise ValueError(
                f"--tokenizer {given}: the server at {url} has its own tokenizer, and this process needs one only for "
                "tools and environments; leave the option out"
            )
        return None
    path = options.tokenizer or job.tokenizer
    job.check_tokenizer(path)
    return path
