"""`python -m mindspeed_rl_plugin generate`: one more engine for a running job, on any machine.

An engine of several ranks is started by torchrun: `torchrun --nproc-per-node N -m mindspeed_rl_plugin generate ...`.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.environment import launch_env, say
from mindspeed_rl_plugin.processes import attend
from mindspeed_rl_plugin.service.invitation import parse_address, read_secret

LEFT = "the engine has left the job"
OF_OWN = ("kv_cache_gb", "device_memory_utilization")  # options that have no effect on a server
_EPILOG = (
    "Model, tokenizer, sampling and seeds come from the job. After SIGTERM the engine gives its unfinished rows back "
    "and leaves. If an engine dies, other engines sample its unfinished responses again."
)


def main(argv: Sequence[str]) -> int:
    """Join, and generate until the job ends. Returns the exit status."""
    options = _options(argv)
    leaving = threading.Event()
    try:
        parse_address(options.join)
        read_secret(options.secret_file)
        if options.tokenizer is not None and not Path(options.tokenizer).is_dir():
            raise ValueError(f"--tokenizer {options.tokenizer}: no such directory; give a copy of the job's")
        _generate(options, leaving)
    except (ValueError, ConnectionError, PermissionError, TimeoutError, FileNotFoundError) as error:
        print(f"[rl] generate: {error}", file=sys.stderr, flush=True)
        return 1
    say(LEFT if leaving.is_set() else "the job has ended")
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Ends the process if options are given that have no effect on a server."""
    parser = _parser()
    options = parser.parse_args(argv)
    given = [f"--{name.replace('_', '-')}" for name in OF_OWN if getattr(options, name) is not None]
    if options.engine_url and given:
        parser.error(
            f"{', '.join(given)}: the server at --engine-url {options.engine_url} manages its own memory; remove this "
            "here, and set the server's memory when you start it"
        )
    return options


def _generate(options: argparse.Namespace, leaving: threading.Event) -> None:
    attend()
    # Imported only now, since these imports take seconds.
    import torch.distributed as dist

    from mindspeed_rl_plugin.generators.launcher_ranks import begin, init_group, store
    from mindspeed_rl_plugin.generators.serving import serve

    begin()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    keys = store() if launch_env()["world_size"] > 1 else dist.HashStore()
    kind = "cpu" if options.engine_url else None  # the server has the devices; this process needs none
    init_group(keys, datetime.timedelta(seconds=options.timeout), kind)
    serve(options.join, options.secret_file, leaving=leaving, url=options.engine_url or "", **_changed(options))


def _changed(options: argparse.Namespace) -> dict[str, Any]:
    """Options of the engine that the command line sets."""
    changed = {
        "max_running": options.max_running,
        "kv_cache_bytes": int((options.kv_cache_gb or 0) * 2**30),
        "memory_utilization": options.device_memory_utilization,
        "tokenizer": options.tokenizer,
    }
    return {name: value for name, value in changed.items() if value}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_rl_plugin generate",
        description="One more engine for a running job (--rl-schedule async).",
        epilog=_EPILOG,
    )
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="the job's address, printed at its start")
    parser.add_argument("--secret-file", required=True, help="the job's secret file, of mode 600; its path is printed")
    parser.add_argument("--engine-url", metavar="URL", help="generate with this `vllm serve`, see docs/schedules.md")
    parser.add_argument("--max-running", type=int, help="most sequences decoded at once (default: the job's)")
    parser.add_argument("--kv-cache-gb", type=float, help="GiB of one rank's KV cache, on a host without accelerator")
    parser.add_argument("--device-memory-utilization", type=float, help="share of the device's memory for the engine")
    of_job = "copy of the job's tokenizer here, if the job runs elsewhere and has --rl-stop, tools or environments"
    parser.add_argument("--tokenizer", help=of_job)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that ranks wait for each other at start")
    return parser
