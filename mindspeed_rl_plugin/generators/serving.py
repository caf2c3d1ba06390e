"""An engine that works for a job until that leaves: built as the job says, on the ranks of the default group, or a
server of the user's own, vLLM's, to which this process brings prompts, and takes its responses back."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

from mindspeed_rl_plugin.engine.engine_sizes import kv_cache_problems
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.rollout_engine import Engine
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
    **changed: Any,
) -> None:
    """Generate for the job at `address` until it leaves. Collective over the ranks of the engine.

    secret: the job's, or the file that holds it; share: (i, n) under a strict order, of an engine of the launcher;
    leaving: set where the engine is to leave; who: the engine, in what the job logs; url: of a server that samples, ""
    where the engine is built here; changed: options of the engine that are not the job's. Raises ValueError where a
    server or a tokenizer does not fit, with the mend, and what `VllmServer` raises where it fails.
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
            EngineLoop(engine, puller, job, team, scheduler).run()
        engine.shutdown()


def _built(dock: GuestDock, job: Description, options: VllmOptions, team: Team) -> tuple[Engine, Puller, int]:
    """An engine on the ranks of the team, what pulls its weights, and the responses that a replica samples at once."""
    options = sized(options, team.size)
    engine = VllmEngine(options)
    parallel = EngineParallel(options.tensor_parallel, options.expert_parallel)
    puller = puller_of(dock, job, parallel, engine.parameters(), team.rank, team.here)
    return engine, puller, options.max_running


def _at_url(
    url: str, address: str, secret: str, job: Description, options: VllmOptions
) -> tuple[Engine, ServerWeights, int]:
    """The same by a server, alone in the default group."""
    server = VllmServer(url, job.deadline)
    workers = server.check()
    check_served(url, workers[0], job.engine, bool(job.sampling.stop))
    engine = ServerEngine(server, options.eos_token_ids, workers[0].seeds or options.request_seeds)
    weights = ServerWeights(server, address, read_secret(secret), [one.machine for one in workers], engine.lose)
    return engine, weights, min(options.max_running, workers[0].max_running)


def sized(options: VllmOptions, ranks: int) -> VllmOptions:
    """Options of an engine on so many ranks: those of engines that share experts must be as many as the job says, else
    tensor parallelism is over all of them. Raises ValueError, for a KV cache larger than this host too."""
    for problem in kv_cache_problems(options.kv_cache_bytes / 2**30, launch_env()["local_world_size"]):
        raise ValueError(problem)
    if options.sharing == 1:
        return replace(options, tensor_parallel=ranks, expert_parallel=ranks if options.expert_parallel > 1 else 1)
    if ranks != options.expert_parallel:
        raise ValueError(
            f"the job spreads experts over {options.expert_parallel} ranks (--rl-generate-ep), here are {ranks}: start "
            f"the engine by torchrun with --nproc-per-node {options.expert_parallel}"
        )
    return options


def tokenizer_here(job: Description, options: VllmOptions, url: str, given: str | None) -> str | None:
    """The directory of the tokenizer that this process needs, if any, of the same tokens as the job's. A server at
    `url` has its own for --rl-stop. Raises ValueError."""
    if url and job.tokenizer is None:
        if given is not None:
            raise ValueError(
                f"--tokenizer {given}: the server at {url} has its own, and only tools and environments need one here; "
                "leave it out"
            )
        return None
    path = options.tokenizer or job.tokenizer
    job.check_tokenizer(path)
    return path
