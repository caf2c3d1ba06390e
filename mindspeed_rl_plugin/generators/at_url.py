"""A server of the user's own, vLLM's, at work for a job: this process brings it prompts, and its responses back."""

from __future__ import annotations

import threading
from contextlib import closing

from mindspeed_rl_plugin.dock import Dock
from mindspeed_rl_plugin.engine.server_api import Server, check_served
from mindspeed_rl_plugin.engine.server_engine import ServerEngine
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.generators.description import Description, job_of, welcome
from mindspeed_rl_plugin.generators.engine import with_episodes
from mindspeed_rl_plugin.generators.lead import LEASE_SECONDS, Lead
from mindspeed_rl_plugin.generators.server_weights import ServerWeights
from mindspeed_rl_plugin.generators.service import Service
from mindspeed_rl_plugin.generators.team import Team
from mindspeed_rl_plugin.invitation import read_secret


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
    mend, and what `Server` raises where it fails.
    """
    who = f"server at {url}"
    with closing(Dock.join(address, secret_file, lease_seconds=LEASE_SECONDS, who=who)) as dock:
        job = job_of(dock)
        say(welcome(dock, job, address))
        tokenizer = tokenizer_here(job, url, tokenizer)
        server = Server(url, job.deadline)
        workers = server.check()
        check_served(url, workers[0], job.engine, bool(job.sampling.stop))
        slots = min(max_running or job.engine.max_running, workers[0].max_running)
        engine = ServerEngine(server, job.engine.eos_token_ids, workers[0].seeds or job.engine.request_seeds)
        machines = [worker.machine for worker in workers]
        with closing(ServerWeights(server, address, read_secret(secret_file), machines, engine.lose)) as weights:
            say(f"the {who} generates, up to {slots} responses at once")
            team = Team(job.deadline)
            over = with_episodes(engine, job, tokenizer, team)
            Service(over, weights, job, team, Lead(dock, job, slots, 1, None, leaving)).run()
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
