"""`plan --schedule`: seconds of an iteration and shares of idle time under each schedule, computed by `simulate`.

python -m mindspeed_rl_plugin plan --schedule --from SAVE/rl               flags and costs of a run
python -m mindspeed_rl_plugin plan --schedule SCRIPT.sh --from SAVE/rl     flags of a script, costs of a run
python -m mindspeed_rl_plugin plan --schedule SCRIPT.sh --step-ms 18       flags of a script, costs from options
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.flag import spelt
from mindspeed_rl_plugin.loop.arithmetic import derive, tokens_of_group
from mindspeed_rl_plugin.loop.run_setup import Setup
from mindspeed_rl_plugin.prompts import Renderer
from mindspeed_rl_plugin.prompts.sources import open_source
from mindspeed_rl_plugin.prompts.tokenizer import TOKENIZER_FLAGS, load_tokenizer
from mindspeed_rl_plugin.tools.layout_args import check_least
from mindspeed_rl_plugin.tools.plan import fit
from mindspeed_rl_plugin.tools.plan.script_args import launched, rl_flags
from mindspeed_rl_plugin.tools.plan.simulate import Outcome, simulate
from mindspeed_rl_plugin.tools.plan.virtual import Costs, Responses, lognormal
from mindspeed_rl_plugin.tools.rehearse.command_line import Flags
from mindspeed_rl_plugin.tools.text_table import aligned

# Option -> (default without a run, meaning). The defaults are only typical values of 7B models on one device.
ASSUMED = {
    "step_ms": (20.0, "milliseconds of a decode step of an engine"),
    "sequence_ms": (0.05, "milliseconds that each sequence adds to a decode step"),
    "train_tokens": (8000.0, "tokens per second that a data parallel rank trains on"),
    "reshard_s": (5.0, "seconds to move weights to colocated engines and back"),
    "publish_s": (1.0, "seconds that training pauses to publish weights"),
    "pull_s": (3.0, "seconds in which an engine reads published weights, while it decodes"),
    "apply_s": (0.5, "seconds that an engine pauses to load the weights that it has read"),
}
ROWS = 100  # rows of each file whose prompts are rendered
PROMPTS = f"mean {{}} tokens, of at most the first {ROWS} rows of each file of --rl-prompt-data"
GENERATOR_COUNTS = 8  # how many numbers of generators are tried at most, evenly spread over the possible numbers
WORTH = 1.02  # factor; with a smaller gain the simpler schedule is advised
MISS = 1.25  # factor between the times of model and run; above it the advice is marked as doubtful
MISSES = ": THE MODEL MISSES THIS RUN, so its advice may be wrong"
TAIL_SIGMA, MEAN_FILL = 0.8, 0.4  # assumed lengths: sigma of the lognormal, mean length / limit
SCHEDULE_HEAD = ("schedule", "generators", "s an iteration", "speed (sync = 1)", "trainers starved", "engines starved")
SCHEDULE_HEAD += ("back-pressure", "waiting for a version", "lag")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m mindspeed_rl_plugin plan --schedule",
        description="Seconds of an iteration under each schedule, and which schedule to use; by a model of the run.",
    )
    add = made.add_argument
    add("script", nargs="?", type=Path, help="launch script (bash) with the RL flags; default: the flags of the run")
    add("--from", dest="runs", action="append", type=Path, default=[], metavar="RUN_DIR", help="directory (SAVE/rl) of "
        "a run whose costs are used, preferably one with --rl-schedule sync; repeat --from for more runs")  # fmt: skip
    add("--world", type=int, help="ranks in all (default: those of the script or run)")
    add("--node", type=int, default=8, help="ranks of a machine (default: %(default)s)")
    add("--staleness", type=int, help="--rl-max-staleness (default: that of the script or run)")
    add("--response-tokens", type=float, help=f"mean length (default: as in the run, or {MEAN_FILL:g} of the limit)")
    add("--prompt-tokens", type=int, help="mean length of a prompt (default: the run's, else that of the script's "
        "data, or 0)")  # fmt: skip
    add("--tail", type=float, help=f"sigma of lognormal lengths (default: the run's, or {TAIL_SIGMA:g})")
    add("--grade-s", type=float, help="mean seconds of grading a response (default: as in the run, or 0)")
    add("--grade-together", type=float, help="responses that a reward worker grades at the same time, such as "
        "64 with an asynchronous grader (default: as in the run, or 1)")  # fmt: skip
    for name, (value, what) in ASSUMED.items():
        add(spelt(name), type=float, help=f"{what} (default: the run's, or {value:g})")
    return made


def report(options: argparse.Namespace) -> list[str]:
    """Lines of the plan. Raises ValueError if an argument is missing, or if sizes do not divide."""
    check_least(options, 1, "world", "node", "response_tokens", "grade_together")
    check_least(options, 0, "tail", "grade_s", "staleness", "prompt_tokens", *ASSUMED)
    if options.train_tokens == 0:
        raise ValueError("--train-tokens must be greater than 0")
    runs = [fit.observed(folder) for folder in options.runs]
    if not options.script and not runs:
        raise ValueError("give a launch script with RL flags, or a run of yours by --from RUN_DIR")
    from_data = not runs and options.prompt_tokens is None
    setup = script_setup(options.script, prompts=from_data) if options.script else runs[0].setup
    of_run = {"prompt_tokens": runs[0].setup.prompt_tokens} if runs else {}  # a script does not have them
    by_hand = {"prompt_tokens": options.prompt_tokens, "staleness": options.staleness}
    setup = replace(setup, **of_run | {name: value for name, value in by_hand.items() if value is not None})
    costs, notes, assumed = _costs(options, runs)
    responses, lengths, assumed_too = _responses(options, setup, runs)
    notes += _compared(options.runs, runs)
    if from_data and not setup.prompt_tokens:
        assumed_too["prompt_tokens"] = setup.prompt_tokens
    setups = list(candidates(setup, options.world or setup.world, options.node))
    outcomes = [simulate(one, costs, responses) for one in setups]
    rows = [_row(one, outcome, outcomes[0]) for one, outcome in zip(setups, outcomes, strict=True)]
    sizes = setup.sizes
    return [
        f"run     {options.world or setup.world} ranks; a rollout has {sizes.prompts} prompts x {sizes.members} "
        f"responses and {sizes.steps} optimizer steps; async has staleness {setup.staleness}, {setup.order} order",
        f"lengths {lengths}",
        *([f"prompts {PROMPTS.format(setup.prompt_tokens)}"] if from_data and setup.prompt_tokens else ()),
        *_sharing(setup, responses),
        *notes,
        *(f"note    {flag} excludes --rl-schedule {one}" for one, flag in setup.ruled_out.items()),
        *("", *aligned([SCHEDULE_HEAD, *rows], 1), ""),
        *with_care(advice(setups, outcomes), {**assumed, **assumed_too}),
        "This is a model: it does not know batches that exceed a device's memory, slower links, and noise.",
    ]


def script_setup(path: Path, prompts: bool = False) -> Setup:
    """The setup of a launch script. prompts: also read the mean length of its prompts. Raises ValueError for a script
    that samples no responses or has partial rollouts, for sizes that do not divide, and for data that a run refuses."""
    launch = launched(path)
    flags = Flags.parse(launch.arguments)
    config, algorithm, _ = rl_flags(flags)
    if algorithm is None or algorithm.from_pairs:
        raise ValueError(f"{path} has no --rl-algorithm that samples responses: there is no schedule to choose")
    if config.schedule.partial:
        raise ValueError(f"{path}: the model has no partial rollouts; leave their flags out to plan other schedules")
    parallel = ("tensor-model", "pipeline-model", "context")
    sizes = [flags.number(f"--{kind}-parallel-size", 1) for kind in parallel]
    ranks = sizes[0] * sizes[1] * sizes[2]
    apart = config.schedule.generator_ranks
    trainers, rest = divmod(launch.world - apart, ranks)
    if rest or not trainers:
        raise ValueError(f"{path}: {launch.world - apart} training ranks are no multiple of tp x pp x cp = {ranks}")
    batch = flags.number("--global-batch-size", 0)
    if not batch:
        raise ValueError(f"{path}: the plan needs --global-batch-size")
    arithmetic = derive(
        config,
        trainers * ranks,
        global_batch=batch,
        micro_batch=flags.number("--micro-batch-size", 1),
        data_parallel=trainers,
        train_iters=flags.number("--train-iters", 1),
    )
    setup = Setup.of(config, arithmetic, trainers * ranks)
    return replace(setup, prompt_tokens=prompt_tokens(flags, config, launch.cwd)) if prompts else setup


def prompt_tokens(flags: Flags, config: RLConfig, folder: Path) -> int:
    """Mean tokens of prompts (without those that are too long) in the first rows of each file, rendered as in a run; 0
    if the files or the tokenizer are missing, and for episodes, whose tools are not known yet."""
    data, files = config.data, [folder / path for path in config.data.prompt_data]
    tokenizer = next((folder / path for path in map(flags.get, TOKENIZER_FLAGS) if path), None)
    here = tokenizer is not None and tokenizer.is_dir() and all(file.exists() for file in files)
    if config.episodes.on or not here:
        return 0
    try:
        made = load_tokenizer(str(tokenizer), data.trust_remote_code)
        renderer = Renderer(made, data.prompt_key, data.answer_key, data.apply_chat_template)
        sources = [open_source(str(file)) for file in files]
        lengths = [len(renderer.read(s, i, i).tokens) for s in sources for i in range(min(len(s), ROWS))]
    except ValueError as error:
        raise ValueError(f"{error}; give --prompt-tokens to plan without data") from error
    kept = [length for length in lengths if length <= data.max_prompt_length]
    return round(sum(kept) / max(len(kept), 1))


def candidates(setup: Setup, world: int, node: int) -> Iterator[Setup]:
    """Setups to compare, on `world` ranks with `node` ranks per machine: sync, streamed, and async with several numbers
    of generators, except those that flags exclude. Raises ValueError if the sizes of sync do not divide."""
    sizes, graders = setup.sizes, setup.graders / max(setup.sizes.data_parallel * setup.trainer_ranks, 1)

    def on(trainers: int, generators: int) -> Setup | None:
        data_parallel, rest = divmod(trainers, setup.trainer_ranks)
        if rest or not data_parallel or generators % setup.engine_ranks:
            return None
        if sizes.global_batch % (sizes.micro_batch * data_parallel):
            return None
        engines = generators // setup.engine_ranks
        on_these = replace(sizes, data_parallel=data_parallel, engines=engines)
        return replace(setup, sizes=on_these, graders=max(round(graders * trainers), 1))

    colocated = on(world, world)
    if colocated is None:
        trainers = sizes.data_parallel * setup.trainer_ranks
        fits = next((f", such as {fewer}" for fewer in range(world - 1, 0, -1) if on(fewer, fewer)), "")
        apart = f" ({trainers} that train, {world - trainers} of engines)" if world == setup.world > trainers else ""
        raise ValueError(
            f"{world} ranks{apart} do not divide: a trainer has {setup.trainer_ranks} ranks, an engine "
            f"{setup.engine_ranks}; --global-batch-size {sizes.global_batch} must be a multiple of --micro-batch-size "
            f"{sizes.micro_batch} x the number of trainers; give another --world{fits}"
        )
    yield replace(colocated, schedule="sync")
    if "streamed" not in setup.ruled_out:
        yield replace(colocated, schedule="streamed")
    if "async" in setup.ruled_out:
        return
    unit = node if world > node else 1
    apart = [one for n in range(unit, world, unit) if (one := on(world - n, n)) is not None]
    spread = len(apart) if len(apart) <= GENERATOR_COUNTS else GENERATOR_COUNTS
    for i in range(spread):
        yield replace(apart[i * (len(apart) - 1) // max(spread - 1, 1)], schedule="async")


def advice(setups: Sequence[Setup], outcomes: Sequence[Outcome]) -> str:
    """The schedule to use: the first (and so simplest) of the schedules that are nearly as fast as the fastest."""
    least = min(outcome.iteration for outcome in outcomes)
    best = next(i for i, outcome in enumerate(outcomes) if outcome.iteration <= least * WORTH)
    setup, gain = setups[best], outcomes[0].iteration / outcomes[best].iteration
    if setup.schedule == "sync":
        return "use --rl-schedule sync: no other schedule gains 2%"
    flags = f"--rl-schedule {setup.schedule}"
    if setup.schedule == "async":
        flags += f" --rl-generators {_generators(setup)} --rl-max-staleness {setup.staleness}"
        flags += " (and a --rl-correction)" if setup.staleness else ""
    return f"use {flags}: {gain:.2f} times as fast as sync"


def with_care(advised: str, assumed: Mapping[str, float]) -> list[str]:
    """An advice, after a list of its assumptions. assumed: value of each option that was not measured."""
    if not assumed:
        return [advised]
    return [
        f"ASSUMED, NOT MEASURED: {', '.join(f'{spelt(name)} {value:.4g}' for name, value in assumed.items())}",
        f"if these values are right: {advised}",
        "To measure your values: run a few rollouts with --rl-schedule sync, and a few with async, and give both runs "
        "by --from RUN_DIR; or give known values by these options.",
    ]


# inside


def _sharing(setup: Setup, responses: Responses) -> Iterator[str]:
    """What --rl-share-prompts saves in each pass, for responses of mean length."""
    if setup.shared and setup.sizes.max_tokens:
        rng, members = Random(0), setup.sizes.members
        mean = round(sum(responses.length(row, 0, rng) for row in range(ROWS)) / ROWS)
        rows, computed = tokens_of_group(setup.prompt_tokens, mean, members, setup.sizes.max_tokens)
        yield (
            f"shared  a group of {members} computes {computed} instead of {rows} tokens a pass: prompts of "
            f"{setup.prompt_tokens}, responses of {mean}"
        )


def _costs(options: argparse.Namespace, runs: Sequence[fit.Observed]) -> tuple[Costs, list[str], dict[str, float]]:
    """The costs, lines that show them, and option -> value for the costs that are assumed."""
    given = {name: getattr(options, name) for name in ASSUMED if getattr(options, name) is not None}
    if runs:
        costs, taken = fit.fit(runs), given
        guessed = {name for name in ASSUMED if name.rpartition("_")[0] in fit.guessed(runs, costs)}
        source = f"fitted to {len(runs)} run{'s' * (len(runs) > 1)}"
    else:
        costs, taken = Costs(notice=fit.NOTICE), {name: value for name, (value, _) in ASSUMED.items()} | given
        guessed, source = set(ASSUMED), "by hand or assumed"
    costs = replace(costs, **{field: value for name in taken for field, value in _by_hand(name, taken[name]).items()})
    if not costs.step + costs.sequence:
        raise ValueError("these runs or options give a decode step of 0 ms; give --step-ms")
    assumed = {name: _in_use(name, costs) for name in ASSUMED if name in guessed and name not in given}
    lines = [
        f"costs   {source}: decode step {1e3 * costs.step:.3g} ms and {1e3 * costs.sequence:.3g} ms a sequence; "
        f"training {1 / costs.token if costs.token else 0:,.0f} tokens/s a data parallel rank;",
        f"        a rollout {costs.rollout:.2g} s, reshard {costs.reshard:.2g} s, publish {costs.publish:.2g} s, pull "
        f"{costs.pull:.2g} s, apply {costs.apply:.2g} s",
    ]
    return costs, lines, assumed


def _by_hand(name: str, value: float) -> dict[str, float]:
    if name == "train_tokens":
        return {"token": 1 / value, "old_token": fit.OLD_SHARE / value}
    cost, _, unit = name.rpartition("_")
    return {cost: value / 1e3 if unit == "ms" else value}


def _in_use(name: str, costs: Costs) -> float:
    """Value of an option of ASSUMED that gives these costs."""
    if name == "train_tokens":
        return 1 / costs.token
    cost, _, unit = name.rpartition("_")
    return getattr(costs, cost) * (1e3 if unit == "ms" else 1)


def _compared(folders: Sequence[Path], runs: Sequence[fit.Observed]) -> Iterator[str]:
    """Notes on each run: its measured seconds of an iteration, and those by the fitted model, without costs from
    options; also the numbers of engines, if the number at work changed in the run."""
    costs = fit.fit(runs) if runs else Costs()
    for folder, run in zip(folders, runs, strict=True):
        line = f"note    {folder} measured {run.iteration:.2f} s an iteration, {run.setup.schedule}"
        if costs.step + costs.sequence:
            model = simulate(run.setup, costs, _graded(run.responses, *run.calls or (0.0, 1.0))).iteration
            off = max(model, run.iteration) / max(min(model, run.iteration), 1e-9)
            line += f"; the model gives {model:.2f}" + MISSES * (off > MISS)
        yield line
        low, high = run.engines
        if low < high:
            yield f"note    {folder} had {low} to {high} engines at work; the model has {run.setup.sizes.engines}"


def _responses(
    options: argparse.Namespace, setup: Setup, runs: Sequence[fit.Observed]
) -> tuple[Responses, str, dict[str, float]]:
    """Properties of responses, a line about them, and option -> value for those that are assumed."""
    measured = max((calls for run in runs if (calls := run.calls)), key=lambda calls: calls[0] / calls[1], default=None)
    grade, together = measured or (0.0, 1.0)
    grade = grade if options.grade_s is None else options.grade_s
    together = together if options.grade_together is None else options.grade_together
    grading = f"; grading a response takes {grade:.2g} s, {max(setup.graders * together, 1):.4g} at the same time"
    by_hand = options.response_tokens is not None or options.tail is not None
    assumed = {} if measured or options.grade_s is not None else {"grade_s": grade}
    assumed |= {"grade_together": together} if grade and not measured and options.grade_together is None else {}
    if runs and not by_hand:
        mean, longest = (runs[0].mean(f"response/length_{name}") for name in ("mean", "max"))
        return (
            _graded(runs[0].responses, grade, together),
            f"as in {options.runs[0]}: mean {mean:.0f}, longest {longest:.0f} tokens{grading}",
            assumed,
        )
    mean = options.response_tokens or (runs[0].mean("response/length_mean") if runs else MEAN_FILL * setup.limit)
    tail = TAIL_SIGMA if options.tail is None else options.tail
    assumed |= {} if runs or options.response_tokens else {"response_tokens": mean}
    assumed |= {} if options.tail is not None else {"tail": tail}
    return (
        _graded(Responses(lognormal(mean, tail, setup.limit)), grade, together),
        f"lognormal, mean {mean:.0f} of at most {setup.limit}, sigma {tail:g}{grading}",
        assumed,
    )


def _graded(responses: Responses, seconds: float, together: float) -> Responses:
    return replace(responses, grading=lambda rng: seconds, together=together)


def _generators(setup: Setup) -> int:
    return setup.sizes.engines * setup.engine_ranks


def _row(setup: Setup, outcome: Outcome, first: Outcome) -> tuple[str, ...]:
    apart = setup.schedule == "async"
    shares = (outcome.trainers["starved"], *(outcome.engines[c] for c in ("starved", "back-pressure", "version")))
    return (
        setup.schedule,
        str(_generators(setup)) if apart else "",
        f"{outcome.iteration:.2f}",
        f"{first.iteration / outcome.iteration:.2f}",
        *(f"{100 * share:.0f}%" for share in shares),
        f"{outcome.lag:.2f}" if apart else "",
    )
