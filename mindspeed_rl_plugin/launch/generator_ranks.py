"""Before the launch script runs: with `--rl-generators N` the last N ranks generate, and only the other ranks train.

Megatron uses all ranks that the environment names, with barriers over all of them. So the ranks are split before any
import of Megatron.
"""

from __future__ import annotations

import signal
import sys

from mindspeed_rl_plugin.checks import early
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.run_flags import MonitorConfig
from mindspeed_rl_plugin.environment import is_part, last_words, launch_env, leave_to_first_rank
from mindspeed_rl_plugin.generators.launcher_ranks import (
    RankSplit,
    begin,
    has_ended,
    join_group,
    part,
    ranks_text,
    wait_for_address,
)
from mindspeed_rl_plugin.monitor.run_files import GENERATOR
from mindspeed_rl_plugin.processes import attend
from mindspeed_rl_plugin.status import status_file


def split_of(config: RLConfig) -> RankSplit | None:
    """The split of ranks by the flags; None: all ranks train."""
    if not (ranks := config.schedule.generator_ranks):
        return None
    env, engine = launch_env(), max(config.rollout.generate_tp, config.rollout.generate_ep)
    return RankSplit(env["world_size"], env["local_world_size"], ranks, engine, config.monitor.wait_timeout)


def leave_if_generator() -> None:
    """A rank that generates stays in this function until the job ends; then its process ends. In a rank that trains the
    function returns, and the environment names only the ranks that train."""
    config = early.given_config()
    if config is None or is_part():
        return
    begin()
    split = split_of(config)
    if split is None:
        return
    try:
        engine = part(split)
    except ValueError as error:
        leave_to_first_rank()
        last_words(str(error))
        sys.exit(2)
    if engine is not None:
        _generate(split, engine, config.monitor)


def _generate(split: RankSplit, engine: int, flags: MonitorConfig) -> None:
    attend()
    from mindspeed_rl_plugin.dock.watch import heartbeat_of
    from mindspeed_rl_plugin.generators.serving import serve
    from mindspeed_rl_plugin.monitor.trace import Trace
    from mindspeed_rl_plugin.service.guest_dock import linked

    first = split.trainers + engine * split.engine
    rank = first + launch_env()["rank"]
    who = f"{GENERATOR} rank {rank}"
    try:
        address, secret = wait_for_address(split.deadline)
        # The launcher sends the signal to all ranks; trainers may still need rows for a last checkpoint.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        early.ready()
        save = early.given_save()
        if save:
            status_file.begin(save, who, stacks=flags.stack_signal)
        trace = Trace.of(flags.trace, flags.trace_ranks, rank, flags.directory(save))
        with linked(address, secret, rank, heartbeat_of(split.deadline)):
            join_group(engine, split.deadline)
            name = f"{GENERATOR} {ranks_text(first, split.engine)}"
            serve(address, secret, share=(engine, split.engines), who=name, trace=trace)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, RuntimeError, AssertionError) as error:
        if isinstance(error, ConnectionError) and has_ended():
            sys.exit(0)
        last_words(f"{who} stops: {type(error).__name__}: {error}", later=isinstance(error, ConnectionError))
        raise
    sys.exit(0)
