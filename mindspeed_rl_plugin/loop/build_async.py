"""Builds the parts that only the asynchronous schedule has: published weights, and a dock that is open to engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.config.schedule_flags import ScheduleConfig
from mindspeed_rl_plugin.dock.gate import Opening
from mindspeed_rl_plugin.dock.machines import own_address
from mindspeed_rl_plugin.environment import say
from mindspeed_rl_plugin.generators.description import JOB, TRAINER_WEIGHTS, Description
from mindspeed_rl_plugin.generators.external_engines import ExternalEngines
from mindspeed_rl_plugin.generators.launcher_ranks import publish_address, publish_end
from mindspeed_rl_plugin.layout.layout import ModelShape, Parallel
from mindspeed_rl_plugin.loop import engine_options
from mindspeed_rl_plugin.loop.rank_parts import RankParts
from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.apart import AsyncSchedule
from mindspeed_rl_plugin.loop.schedules.publications import Publications
from mindspeed_rl_plugin.loop.schedules.schedule import Job
from mindspeed_rl_plugin.prompts import Offers
from mindspeed_rl_plugin.prompts.tokenizer import vocabulary_digest
from mindspeed_rl_plugin.service.job_service import JobService
from mindspeed_rl_plugin.stages.evaluate import EvaluateApart
from mindspeed_rl_plugin.stages.response_validator import READS, STATE, ResponseValidator
from mindspeed_rl_plugin.stages.stage import Stages
from mindspeed_rl_plugin.stages.trainer import Trainer
from mindspeed_rl_plugin.weights.publish import Publisher, TrainerWeights
from mindspeed_rl_plugin.weights.published_memory import publish_memory

ADVICE = "lower --rl-max-staleness if --rl-async-order is strict, or spread trainers over more machines"


def build_schedule(at: RankParts, stages: Stages, trainer: Trainer, model: Any, resumes: bool) -> AsyncSchedule:
    """The schedule; also opens the dock to engines. Collective over all ranks that train. model: this rank's chunks;
    resumes: whether the state of a checkpoint is loaded next."""
    inputs, job = at.inputs, at.job
    engine_options.check_engine_rotary(inputs, model)
    config, sizes = inputs.config, inputs.sizes
    schedule = config.schedule
    strict = schedule.async_order == "strict"
    dtype = engine_options.dtype_of(inputs.args, config.rollout.engine_dtype)
    engine = engine_options.options(inputs, dtype)
    description = Description(
        engine=engine,
        vocabulary=vocabulary_digest(inputs.tokenizer_path, engine.trust_remote_code)
        if engine.tokenizer or inputs.responses.tokenizer
        else "",
        sampling=inputs.sampling,
        seed=inputs.response_seed,
        inflight=schedule.inflight,
        strict=strict,
        deadline=config.monitor.wait_timeout,
        run=str(Path(job.monitor.run_dir).absolute()),
        tokenizer=inputs.responses.tokenizer,
        environments=inputs.responses.described(),
    )
    about = {JOB: description.to_json(), TRAINER_WEIGHTS: trainer.weights.text()}
    validator = ResponseValidator(
        inputs.vocab, config.rollout.max_response_length, inputs.responses, inputs.forward.experts
    )
    service = JobService(job.dock)
    service.guard({STATE: Opening(validator.check, READS)})
    job.monitor.on_record = service.record
    offers = Offers(inputs.data, inputs.check_fields, sizes.prompts, resumes, inputs.check_answers)
    if not strict:
        service.take_prompts(offers.add)
    external_engines = _invite(job, service, about, schedule, strict)
    admission = Admission(sizes.prompts, schedule.max_staleness, sizes.rollouts)
    return AsyncSchedule(
        job,
        stages,
        inputs.dynamic_rounds,
        service=service,
        publications=Publications(trainer, admission, kept_versions(schedule), validator.published),
        evaluate=EvaluateApart(stages["reward"], inputs.held_out or ()),
        strict=strict,
        whole=strict or schedule.exact_resume,
        external_engines=external_engines,
        offers=offers,
    )


def kept_versions(schedule: ScheduleConfig) -> int:
    """Number of versions of the weights that trainers keep."""
    return max(2, schedule.max_staleness + 1) if schedule.async_order == "strict" else 2


def make_publisher(at: RankParts, model: Sequence[Any]) -> Publisher:
    """The publisher of this rank's weights. Collective. Raises MemoryError if the versions of all ranks of a machine do
    not fit into its memory."""
    inputs, ranks, rank = at.inputs, at.job.ranks, at.job.topology.rank
    args, config, versions = inputs.args, inputs.config, kept_versions(inputs.config.schedule)
    weights = TrainerWeights.of(
        ModelShape.from_megatron_args(args, inputs.vocab),
        Parallel.from_megatron_args(args),
        rank,
        model,
        engine_options.dtype_of(args, config.rollout.engine_dtype),
        ranks.gather,
        verify=config.reshard.verify_weights,
    )
    kept = f"keeping {versions} versions of the weights"
    inputs.host_memory_budget().reserve(weights.shares[rank].nbytes * versions, kept, ADVICE)
    memory = partial(publish_memory, at.job.dock)
    return Publisher(weights, rank, memory, versions=versions, gather=ranks.gather)


def _invite(
    job: Job, service: JobService, about: dict[str, str], schedule: ScheduleConfig, strict: bool
) -> ExternalEngines | None:
    """Let engines join from now on. Gives the address to the engines of the launcher, and makes the supervisors of
    Ray's engines and of the user's servers. Returns these supervisors on the leader, None elsewhere."""
    folder, ranks = Path(job.monitor.run_dir).absolute(), schedule.generator_ranks
    secret_file = folder / "secret"
    address = service.invite(secret_file, own_address(), json.dumps(about))
    on_ray = schedule.who_generates if schedule.who_generates.engines else None
    has_some = ranks or on_ray or schedule.engine_url
    if strict:
        say(f"programs may observe: address {address}, secret file {secret_file}")
    else:
        what = "engines may join" if has_some else "this job has no engine yet, and waits for one to join"
        say(f"{what}: {sys.executable} -m mindspeed_rl_plugin generate --join {address} --secret-file {secret_file}")
    what = "an engine"
    if has_some:
        what = "a first response (engines may take minutes to start)"
    say(f"the job waits for {what} at most {job.ranks.deadline:g} s (--rl-wait-timeout)")
    if not job.topology.leader:
        return None
    if ranks:
        service.expect(range(job.ranks.world, job.ranks.world + ranks))
        publish_address(address, str(secret_file))
    ended = publish_end if ranks else lambda: None
    return ExternalEngines(address, secret_file, ended, on_ray, schedule.engine_url, folder)
