"""Refuses flags that do not work with a schedule: for each problem one message, with value, limit and fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.flag import as_given, flag_name, valued
from mindspeed_rl_plugin.config.rl_config import given
from mindspeed_rl_plugin.config.schedule_flags import OF_COLOCATED
from mindspeed_rl_plugin.environment import is_part, launch_env
from mindspeed_rl_plugin.generators.external_engines import check_ray, check_servers

GIVE_CORRECTION = "give --rl-correction truncate, mask, decoupled or decoupled-clip"


def problems(args: Any, config: RLConfig) -> Iterator[str]:
    """Problems of the schedule and of its flags."""
    algorithm, flags = resolve(config.algorithm), config.schedule
    if flags.schedule != "sync" and algorithm.filters and algorithm.filtration_whole_batch:
        yield (
            f"--rl-schedule {flags.schedule} selects group by group, and --rl-filtration-whole-batch needs all "
            "responses of an optimizer step; give --rl-schedule sync, or remove --rl-filtration-whole-batch"
        )
    if config.rollout.stop and (going_on := flags.going_on):
        yield (
            f"--rl-stop with {going_on}: a stop string that is sampled partly by old and partly by new weights "
            f"would not be found; give --rl-stop-token-ids instead of --rl-stop, or remove {going_on}"
        )
    if flags.apart:
        yield from _apart(config)
    elif flags.schedule == "streamed":
        yield from _partial(config)
    if (flags.apart or flags.partial) and config.reward.reward_model_device == "accelerator":
        how = "--rl-schedule async" if flags.apart else "--rl-carry-unfinished or --rl-oversample-drop"
        yield (
            f"--rl-reward-model-device accelerator: with {how} reward models would run during training, in "
            "memory that training needs; give host"
        )


def notes(config: RLConfig) -> Iterator[str]:
    """Given flags that have no effect under the schedule; allowed, since a script may use several schedules."""
    unread = [as_given(f.name, value) for f, value in given(config) if flag_name(f.name) in OF_COLOCATED]
    if config.schedule.apart and unread:
        yield (
            f"{', '.join(unread)}: no effect under --rl-schedule async, since engines pull published weights "
            "and trainers are never offloaded"
        )


def _partial(config: RLConfig) -> Iterator[str]:
    flags, bound = config.schedule, config.schedule.max_staleness
    staleness = valued(flags, "max_staleness")
    if flags.carry_unfinished and flags.oversample_drop:
        yield (
            "--rl-carry-unfinished and --rl-oversample-drop: unfinished responses are either continued or dropped; "
            "remove one of the two"
        )
    elif flags.oversample is not None and not flags.partial:
        yield (
            f"--rl-oversample {flags.oversample:g} does not say what happens to unfinished prompts; give "
            "--rl-carry-unfinished (the next rollout continues them), or --rl-oversample-drop (they are dropped)"
        )
    elif flags.partial and flags.oversample == 1:
        yield (
            "--rl-oversample 1: all prompts are needed, so none would be unfinished; give more, such as 1.25, or "
            "remove the flag"
        )
    if not flags.carry_unfinished:
        return
    if bound < 1:
        yield (
            f"{staleness}: a response that --rl-carry-unfinished continues is trained at least 1 publication "
            "after its first token; give 1 or more"
        )
    elif flags.oversample is not None and flags.oversample > bound + 1:
        yield (
            f"--rl-oversample {flags.oversample:g} is more than 1 + {staleness}: some prompts would wait longer than "
            f"this allows; give at most {bound + 1}, or raise --rl-max-staleness"
        )
    if config.algorithm.correction == "off":
        yield f"--rl-carry-unfinished: responses of older weights need importance weights; {GIVE_CORRECTION}"


def _apart(config: RLConfig) -> Iterator[str]:
    schedule, correction = config.schedule, config.algorithm.correction
    if schedule.generators is None and not schedule.engine_url:
        yield (
            "--rl-schedule async without generators: give --rl-generators N (the last N ranks of the job), 0 (only "
            "engines that join the job) or ray:N (engines that Ray places), or --rl-engine-url (your own servers)"
        )
    if schedule.generator_ranks and not is_part():
        yield (
            f"--rl-generators {schedule.generators}: these ranks were not separated from the trainers in time; start "
            "with -m mindspeed_rl_plugin, or make mindspeed_rl_plugin.adaptor the first import of the script"
        )
    if schedule.who_generates.engines and launch_env()["rank"] == 0:
        yield from check_ray(schedule.who_generates, config.monitor.wait_timeout)
    if schedule.engine_url:
        yield from check_servers(config, {}, "")
    if schedule.max_staleness > 0 and correction == "off":
        yield (
            f"{valued(schedule, 'max_staleness')}: responses of older weights need importance weights; "
            f"{GIVE_CORRECTION}, or --rl-max-staleness 0"
        )
    joining = schedule.engine_url or (schedule.generators and not schedule.generator_ranks)
    if schedule.async_order == "strict" and joining:
        yield (
            "--rl-async-order strict needs a fixed number of engines; give --rl-generators N without --rl-engine-url, "
            "or --rl-async-order free"
        )
