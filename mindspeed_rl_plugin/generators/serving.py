"""An engine that works for a job until that leaves: built as the job says, on the ranks of the default group, or a
server of the user's own, vLLM's, to which this process brings prompts, and takes its responses back."""

from __future__ import annotations

import atexit
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

from mindspeed_rl_plugin.engine.engine_sizes import kv_cache_problems
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.rollout_engine import Engine
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.environment import launch_env, say
from mindspeed_rl_plugin.generators.description import Description, job_of, welcome
from mindspeed_rl_plugin.generators.engine_loop import EngineLoop, Team
from mindspeed_rl_plugin.generators.pulling import puller_of
from mindspeed_rl_plugin.generators.scheduler import LEASE_SECONDS, Scheduler
from mindspeed_rl_plugin.generators.server_engine import ServerEngine, ServerWeights
from mindspeed_rl_plugin.generators.vllm_server import VllmServer, check_served
from mindspeed_rl_plugin.layout.layout import EngineParallel
from mindspeed_rl_plugin.prompts.tokenizer import load_tokenizer
from mindspeed_rl_plugin.service.guest_dock import GuestDock, here
from mindspeed_rl_plugin.service.invitation import read_secret


def serve(
    address: str,
    secret: str | bytes,
    share: tuple[int, int] | None = None,
    leaving: threading.Event | None = None,
    who: str = "",
    **changed: Any,
) -> None:
    """Generate for the job at `address` until it leaves. Collective over the ranks of the engine.

    secret: the job's, or the file that holds it; share: (i, n) under a strict order, of an engine of the launcher;
    leaving: set where the engine is to leave; who: the engine, in what the job logs, by default one that joined;
    changed: options of the engine that are not the job's.
    """
    with closing(
        GuestDock.join(address, secret, lease_seconds=LEASE_SECONDS, who=who or here("joined engine"))
    ) as dock:
        job = job_of(dock, strict=share is not None)
        team = Team(job.deadline)
        if share is None:
            say(welcome(dock, job, address))
        options = replace(job.engine, sleep_mode=False, **changed)
        tokenizer = options.tokenizer or (job.episodes and job.episodes.tokenizer)
        job.check_tokenizer(tokenizer)
        options = sized(options, team.size)
        engine = with_episodes(VllmEngine(options), job, tokenizer, team)
        parallel = EngineParallel(options.tensor_parallel, options.expert_parallel)
        puller = puller_of(dock, job, parallel, engine.parameters(), team.rank, team.here)
        scheduler = None
        if team.leads:
            leaving = leaving or threading.Event()
            scheduler = Scheduler(dock, job, options.max_running, engine.replicas, share, leaving)
            if share is None:
                say(f"the engine generates, up to {options.max_running} responses at once")
        with closing(puller):
            EngineLoop(engine, puller, job, team, scheduler).run()
        engine.shutdown()


def with_episodes(engine: Engine, job: Description, tokenizer: str | None, team: Team) -> Engine:
    """The engine, over which are episodes where the job has some; their environments end with this process at the
    latest, by an error too. tokenizer: directory. Collective."""
    if (setup := job.episodes) is None:
        return engine
    setup = replace(setup, tokenizer=tokenizer, run=job.run)
    peers = team.of_replica(engine, job.deadline)
    environments = setup.environments() if engine.leader else None
    if environments is not None:
        atexit.register(environments.close)
    return setup.over(engine, load_tokenizer(tokenizer, setup.trust_remote_code), environments, peers)


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


def serve_at(
    url: str,
    address: str,
    secret_file: str,
    leaving: threading.Event,
    max_running: int | None = None,
    tokenizer: str | None = None,
) -> None:
    """Generate by the server at `url` for the job at `address` until it leaves. Alone in the default group.

    leaving: set where the engine is to leave; max_running: most responses at once, None for the job's; tokenizer: its
    directory here, where the job has episodes, None for the job's. Raises ValueError where the server cannot, with the
    mend, and what `VllmServer` raises where it fails.
    """
    who = f"server at {url}"
    with closing(GuestDock.join(address, secret_file, lease_seconds=LEASE_SECONDS, who=who)) as dock:
        job = job_of(dock)
        say(welcome(dock, job, address))
        tokenizer = tokenizer_here(job, url, tokenizer)
        server = VllmServer(url, job.deadline)
        workers = server.check()
        check_served(url, workers[0], job.engine, bool(job.sampling.stop))
        slots = min(max_running or job.engine.max_running, workers[0].max_running)
        engine = ServerEngine(server, job.engine.eos_token_ids, workers[0].seeds or job.engine.request_seeds)
        machines = [worker.machine for worker in workers]
        with closing(ServerWeights(server, address, read_secret(secret_file), machines, engine.lose)) as weights:
            say(f"the {who} generates, up to {slots} responses at once")
            team = Team(job.deadline)
            over = with_episodes(engine, job, tokenizer, team)
            EngineLoop(over, weights, job, team, Scheduler(dock, job, slots, 1, None, leaving)).run()
            over.shutdown()


def tokenizer_here(job: Description, url: str, given: str | None) -> str | None:
    """The directory of the tokenizer by which this process renders episodes, None without. Raises ValueError."""
    if job.episodes is None:
        if given is not None:
            raise ValueError(
                f"--tokenizer {given}: the server at {url} has its own, and only episodes need one here; leave it out"
            )
        return None
    path = given or job.episodes.tokenizer
    job.check_tokenizer(path)
    return path
