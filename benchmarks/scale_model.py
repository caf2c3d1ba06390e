"""A discrete-event model of this project's schedules beside what was measured, and beside what others published.

    python benchmarks/schedules.py --json MEASURED.json      # on a quiet machine
    python benchmarks/scale_model.py --measured MEASURED.json [--json OUT.json] [--only measured,published,scale]

The model (mindspeed_rl_plugin/tools/plan/simulate.py) drives the job's own admission, choice of what an engine does
next, selection and plan of steps by a virtual clock. `measured`: its costs are fitted to some cases of schedules.py,
and it predicts the others. `published`: rows of other projects, whose inputs and fitted parameters are printed; a fit
is consistency, no prediction. `scale`: the same work for each rank on 16 to 1,024 ranks. See README.md beside this
file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "training")]

import workload  # noqa: E402
from schedules import ARMS, CASES, Case  # noqa: E402

from mindspeed_rl_plugin.loop.arithmetic import Arithmetic  # noqa: E402
from mindspeed_rl_plugin.loop.run_setup import Setup  # noqa: E402
from mindspeed_rl_plugin.tools.plan.fit import NOTICE  # noqa: E402
from mindspeed_rl_plugin.tools.plan.simulate import Outcome, simulate  # noqa: E402
from mindspeed_rl_plugin.tools.plan.virtual import Costs, Responses, lognormal, recorded  # noqa: E402

# (case, arm) to which costs are fitted
FITTED = (("short", "sync"), ("short", "async"), ("long-tailed", "sync"), ("long-tailed", "async"))
MODELLED = ("sync", "streamed", "async", "drain", "one-step-off")
ASKED = 0.10  # most error of a gain over sync
ROLLOUTS, RUNS = 30, 8  # rollouts of the model: of measured cases, of published ones
MOST_SLOWER = 2.0  # of an engine's steps beside a trainer
HALVINGS = 9  # of a bisection
Measured = Mapping[tuple[str, str], Mapping[str, float]]
# Medians of schedules.py in README.md, of 2026-11-24.
IN_README = {
    ("short", "sync"): {"iteration": 2.27, "generate": 1.0, "update": 1.21},
    ("short", "streamed"): {"iteration": 2.21},
    ("short", "async"): {"iteration": 2.25, "generate": 0.0},
    ("long-tailed", "sync"): {"iteration": 6.52, "generate": 3.62, "update": 2.84},
    ("long-tailed", "streamed"): {"iteration": 6.76},
    ("long-tailed", "async"): {"iteration": 5.23, "generate": 0.61},
    ("long-tailed", "drain"): {"iteration": 4.85},
    ("long-tailed", "one-step-off"): {"iteration": 4.85},
    ("slow-32", "sync"): {"iteration": 9.95},
    ("slow-32", "streamed"): {"iteration": 8.38},
    ("slow-32", "async"): {"iteration": 6.0},
    ("slow-4", "sync"): {"iteration": 25.21},
    ("slow-4", "streamed"): {"iteration": 22.22},
    ("slow-4", "async"): {"iteration": 17.87},
}

# verl's docs/advance/one_step_off.md and fully_async.md: Qwen2.5-Math-7B on H20, DAPO, seconds of a step. devices:
# (all, those that generate in the asynchronous run); sync, apart: step, generation, old log-probs, update, and apart
# also what training waited for generation.
ONE_STEP_OFF = {
    "verl one step off, FSDP2": {
        "devices": (16, 4),
        "sync": {"step": 749, "gen": 321, "generate": 247, "old": 88, "update": 286},
        "apart": {"step": 520, "generate": 458, "old": 108, "update": 337, "wait": 45},
    },
    "verl one step off, Megatron": {
        "devices": (16, 4),
        "sync": {"step": 699, "gen": 207, "generate": 162, "old": 119, "update": 344},
        "apart": {"step": 566, "generate": 501, "old": 120, "update": 347, "wait": 59},
    },
}
FULLY = {
    "verl fully async, 32": ((32, 16), (790.10, 357.41, 107.71, 313.81), (294.77, 21.26, 269.80)),
    "verl fully async, 64": ((64, 32), (365.28, 150.72, 70.26, 133.41), (189.26, 28.46, 156.98)),
    "verl fully async, 128": ((128, 64), (356.30, 177.85, 53.92, 113.81), (150.63, 33.14, 113.16)),
}
# They train on responses in the order in which these end, this project in the order of admission: with one publication
# ahead the longest response holds up each rollout here and not there, so the model is given more.
AHEAD = 3
ASYNCFLOW = (1.59, 2.03)  # arXiv 2507.01663: mean and most gain
MOST_SIGMA = 1.6  # of lognormal lengths
PARTS = {"g": 1.0, "u": 1.0, "L": 0.4, "XR": 0.3}  # assumed: generation, update, log-probs, the rest, of one rollout
A_RANK = 16  # responses of `scale`
PAPER = 0.811, 192  # linearity of MindSpeed RL's transfer dock and its NPUs, Fig. 9 of arXiv 2507.19017


def apart(arm: str) -> bool:
    """Whether engines of an arm stand apart."""
    return "--rl-generators" in ARMS[arm]


def setup_of(case: Case, arm: str) -> Setup:
    """The jobs of schedules.py."""
    lengths = workload.CASES[case.lengths]
    trainers = 1 if apart(arm) else 2
    sizes = Arithmetic(
        lengths.prompts, lengths.members, lengths.samples, 1, lengths.micro_batch, trainers, trainers, 100, 1 << 20
    )
    return Setup(
        sizes,
        "async" if apart(arm) else arm,
        graders=case.workers,
        order="strict" if arm == "one-step-off" else "free",
        inflight="drain" if arm == "drain" else "keep",
        prompt_tokens=lengths.prompt,
    )


def responses_of(case: Case) -> Responses:
    """Their lengths and what their graders sleep."""
    lengths = workload.CASES[case.lengths]
    least, most = case.sleep or (0.0, 0.0)
    return Responses(recorded(workload.lengths(lengths)), lambda rng: rng.uniform(least, most), rows=lengths.prompts)


def units(name: str, arm: str, **cost: float) -> float:
    """What the model counts of a cost in a rollout."""
    return simulate(setup_of(CASES[name], arm), Costs(**cost), responses_of(CASES[name]), ROLLOUTS).rollout


def fitted(measured: Measured) -> Callable[[str, str], Costs]:
    """(case, arm) -> costs, from the rows of `FITTED` alone."""
    sync, alone = ({name: measured[name, arm] for name in ("short", "long-tailed")} for arm in ("sync", "async"))
    rows = [
        (units(name, "sync", step=1.0), units(name, "sync", sequence=1.0), row["generate"])
        for name, row in sync.items()
    ]
    (s1, q1, t1), (s2, q2, t2) = rows
    determinant = s1 * q2 - s2 * q1
    decode = {"step": (t1 * q2 - t2 * q1) / determinant, "sequence": (s1 * t2 - s2 * t1) / determinant}
    token = {name: row["update"] / units(name, "sync", token=1.0) for name, row in sync.items()}
    base = {name: Costs(**decode, token=token[name], notice=NOTICE) for name in token}
    rest = {
        name: max(row["iteration"] - simulate(setup_of(CASES[name], "sync"), base[name], responses_of(CASES[name]),
                                              ROLLOUTS).rollout, 0.0)
        for name, row in sync.items()
    }  # fmt: skip
    # All that one trainer does with a token, beside an engine.
    token_alone = {
        name: (row["iteration"] - row["generate"]) / units(name, "async", token=1.0) for name, row in alone.items()
    }
    # One engine beside a trainer decodes slower than two engines, and training waits for it.
    tailed, lengths = "long-tailed", CASES["long-tailed"]

    def decode_alone(slower: float) -> dict[str, float]:
        return {name: slower * seconds for name, seconds in decode.items()}

    def late(slower: float) -> float:
        costs = replace(base[tailed], token=token_alone[tailed], **decode_alone(slower))
        outcome = simulate(setup_of(lengths, "async"), costs, responses_of(lengths), ROLLOUTS)
        return outcome.iteration - alone[tailed]["iteration"]

    slower = bisect(late, 1.0, MOST_SLOWER)

    def costs(name: str, arm: str) -> Costs:
        lengths = CASES[name].lengths
        if not apart(arm):
            return replace(base[lengths], rollout=rest[lengths])
        return replace(base[lengths], token=token_alone[lengths], **decode_alone(slower))

    return costs


def beside_measured(measured: Measured) -> list[dict[str, Any]]:
    """Of each case and arm: seconds predicted and measured, and the gain over sync."""
    if missing := [row for row in FITTED if row not in measured]:
        raise SystemExit(f"the measured file lacks {missing}, to which costs are fitted; run schedules.py with these")
    costs = fitted(measured)
    rows: list[dict[str, Any]] = []
    for name, arm in measured:
        outcome = simulate(setup_of(CASES[name], arm), costs(name, arm), responses_of(CASES[name]), ROLLOUTS)
        seconds = measured[name, arm]["iteration"]
        row = {"case": name, "arm": arm, "fitted": (name, arm) in FITTED, "model": outcome.iteration}
        rows.append({**row, "measured": seconds, "error": outcome.iteration / seconds - 1})
    by = {(row["case"], row["arm"]): row for row in rows}
    for row in rows:
        sync = by.get((row["case"], "sync"))
        if sync is not None and row is not sync:
            row["gain"], row["gain_measured"] = sync["model"] / row["model"], sync["measured"] / row["measured"]
            row["gain_error"] = row["gain"] / row["gain_measured"] - 1
    print("## Measured on two cores\n")
    for name in ("short", "long-tailed"):
        print(f"fitted, {name}: {shown(costs(name, 'sync'))}; apart: {shown(costs(name, 'async'))}")
    print("\n| case | arm | | model s | measured s | error | gain, model | gain, measured | error of the gain |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        gain = f"{row['gain']:.2f} | {row['gain_measured']:.2f} | {row['gain_error']:+.1%}" if "gain" in row else "| | "
        kind = "fitted" if row["fitted"] else "predicted"
        cells = f"{row['model']:.2f} | {row['measured']:.2f} | {row['error']:+.1%}"
        print(f"| {row['case']} | {row['arm']} | {kind} | {cells} | {gain} |")
    judged = [row for row in rows if "gain" in row and not row["fitted"]]
    within = sum(abs(row["gain_error"]) <= ASKED for row in judged)
    print(f"\n{within} of {len(judged)} gains to which nothing was fitted are within {ASKED:.0%}\n")
    return rows


def shown(costs: Costs) -> str:
    """The costs that are not 0."""
    texts = []
    for name, value in vars(costs).items():
        if value:
            texts.append(f"{name} {1e3 * value:.3g} ms")
    return ", ".join(texts)


# what others published


def simulated(
    devices: tuple[int, int], apart: bool, chain: float, work: float, train: float, more: float, **flags: Any
) -> Outcome:
    """A run of 32 x 16 responses. chain: seconds of the longest response alone; work: of all decoding on one device,
    whatever the batch; train: seconds of a rollout's training; more: of what is neither (weights, rewards)."""
    everything, generating = devices
    engines = generating if apart else everything
    setup = Setup(
        Arithmetic(32, 16, 512, 1, 1, 1, engines, 100), "async" if apart else "sync", slots=10**6, graders=512, **flags
    )
    responses = Responses(lognormal(1000, 0.8, 8000), seed=1)
    # The model's own count of steps and sequences on one device of `everything`.
    sync = replace(setup, schedule="sync", sizes=replace(setup.sizes, engines=everything))
    steps, sequences = (simulate(sync, Costs(**{name: 1.0}), responses, RUNS).rollout for name in ("step", "sequence"))
    costs = Costs(step=chain / steps, sequence=work / everything / sequences, rollout=train)
    costs = replace(costs, publish=more) if apart else replace(costs, reshard=more)
    return simulate(setup, costs, responses, RUNS)


def published() -> list[dict[str, Any]]:
    """Rows of verl and AsyncFlow. Fits, so consistency and no prediction."""
    print("## Published by others: consistency, no prediction\n")
    rows = []
    for name, row in ONE_STEP_OFF.items():
        (everything, generating), sync, apart = row["devices"], row["sync"], row["apart"]
        # chain + work / devices is the generation, of all devices and of few: two equations.
        spread = (apart["generate"] - sync["generate"]) / (1 / generating - 1 / everything)
        chain = sync["generate"] - spread / everything
        more = sync["step"] - sync["generate"] - sync["old"] - sync["update"]
        rest = apart["step"] - apart["old"] - apart["update"] - apart["wait"]
        first = simulated(row["devices"], False, chain, spread, sync["old"] + sync["update"], more)
        then = simulated(row["devices"], True, chain, spread, apart["old"] + apart["update"], rest, order="strict")
        print(f"{name}: {everything} devices, {generating} of them generate.")
        print(f"  inputs: sync {sync}; apart {apart}")
        print(f"  fitted: longest response {chain:.0f} s, all decoding {spread:.0f} device s; rest {more} and {rest} s")
        rows.append(published_row(name, sync["step"], apart["step"], first, then))
    for name, (devices, (step, generate, old, update), (step_apart, wait, update_apart)) in FULLY.items():
        more, rest = step - generate - old - update, max(step_apart - wait - update_apart, 0.0)

        def gap(share: float, devices=devices, generate=generate, train=update_apart, rest=rest, goal=step_apart):
            chain = share * generate
            work = (generate - chain) * devices[0]
            return simulated(devices, True, chain, work, train, rest, staleness=AHEAD).rollout - goal

        share = bisect(gap, 0.02, 0.98)
        chain, work = share * generate, (1 - share) * generate * devices[0]
        first = simulated(devices, False, chain, work, old + update, more)
        then = simulated(devices, True, chain, work, update_apart, rest, staleness=AHEAD)
        print(f"{name}: {devices[0]} devices, {devices[1]} of them generate.")
        print(f"  inputs: sync step {step}, generation {generate}, old log-probs {old}, update {update}; "
              f"apart update {update_apart}, rest {rest:.1f}")  # fmt: skip
        print(f"  fitted to the step of {step_apart}: the longest response alone is {share:.0%} of the generation")
        rows.append(published_row(name, step, step_apart, first, then))
    print("\n| row | sync, model | published | apart, model | published | error | gain, model | published |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['row']} | {row['sync']:.0f} | {row['sync_published']:.0f} | {row['apart']:.0f} | "
              f"{row['apart_published']:.0f} | {row['error']:+.1%} | {row['gain']:.2f} | "
              f"{row['gain_published']:.2f} |")  # fmt: skip
    return rows + asyncflow()


def published_row(name: str, step: float, apart: float, first: Outcome, then: Outcome) -> dict[str, Any]:
    """One row of the table."""
    return {
        **{"row": name, "sync": first.rollout, "sync_published": step, "apart": then.rollout, "apart_published": apart},
        **{"error": then.rollout / apart - 1, "gain": first.rollout / then.rollout, "gain_published": step / apart},
    }


def asyncflow() -> list[dict[str, Any]]:
    """The tail factors that AsyncFlow's gains imply: in closed form, and the lengths that give them in the model."""
    g, u, old, rest = PARTS.values()
    print(
        f"\nAsyncFlow, gain = (tau g + L + u + X + R) / (g + u + L) with g = {g}, u = {u}, L = {old}, X + R = {rest}:"
    )
    rows = []
    for gain in ASYNCFLOW:
        tau = (gain * (g + u + old) - old - u - rest) / g
        rows.append({"row": f"AsyncFlow {gain}", "tau": tau})
        print(f"  {gain}x: tau {tau:.2f} in closed form")
        for ahead in (1, 2, 4):
            sigma = bisect(lambda s, gain=gain, ahead=ahead: tailed(s, ahead)[0] - gain, 0.01, MOST_SIGMA)
            of_model, tau_model, outcome = tailed(sigma, ahead)
            starved, held = outcome.trainers["starved"], outcome.engines["back-pressure"]
            reached = abs(of_model / gain - 1) < 0.02
            print(f"    the model, k = {ahead}: " + ("" if reached else "NOT reached, ") + f"{of_model:.2f}x with "
                  f"lognormal lengths of sigma {sigma:.2f}, tau {tau_model:.2f} (trainers starved "
                  f"{starved:.0%}, back-pressure {held:.0%})")  # fmt: skip
            rows[-1][f"k={ahead}"] = {"sigma": sigma, "tau": tau_model, "gain": of_model}
    return rows


def tailed(sigma: float, ahead: int) -> tuple[float, float, Outcome]:
    """Of 24 devices with `PARTS`: gain of async (k = `ahead`) over sync, tail factor of sync, outcome of async."""
    responses, slots, engines = Responses(lognormal(1000, sigma, 40000), seed=2), 16, 24
    sizes = Arithmetic(96, 16, 1536, 1, 1, 1, engines, 100)  # 4 x the slots of all engines
    ideal = sizes.samples * 1000 / (engines * slots)  # steps, all slots full
    costs = Costs(step=PARTS["g"] / ideal, rollout=PARTS["u"] + PARTS["L"], reshard=PARTS["XR"])
    sync = simulate(Setup(sizes, "sync", slots=slots), costs, responses, RUNS)
    generate = sync.rollout - PARTS["u"] - PARTS["L"] - PARTS["XR"]
    train = PARTS["u"] + PARTS["L"]
    apart = round(engines * PARTS["g"] / (PARTS["g"] + train))  # devices that generate, the others train
    costs = replace(costs, rollout=train * engines / (engines - apart), reshard=0.0)
    setup = Setup(replace(sizes, engines=apart), "async", slots=slots, staleness=ahead)
    outcome = simulate(setup, costs, responses, RUNS)
    return sync.rollout / outcome.rollout, generate / PARTS["g"], outcome


def bisect(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f is 0, or the end that is nearer."""
    rises = f(high) > f(low)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if (f(middle) > 0) == rises else (middle, high)
    return (low + high) / 2


# scale


def scale(sizes: Sequence[int], row_ms: float) -> list[dict[str, Any]]:
    """Tokens a second and rank, relative to the fewest ranks, with as much work for each rank."""
    print("\n## Scale: the same work for each rank, a model\n")
    print(
        f"Assumed: {A_RANK} responses a rank, lognormal of mean 1,000 and sigma 0.8, at most 4,000 tokens; engines of "
        f"2, trainers of 8 ranks; decode step 20 ms + 0.05 ms a sequence, 4,000 trained tokens/s a trainer, weights 5 "
        f"s (colocated), 1 + 3 + 0.5 s (apart); {row_ms:g} ms of the control plane for each row, one after the other."
    )
    base = {"step": 0.02, "sequence": 5e-5, "token": 1 / 4000, "old_token": 1 / 12000, "reshard": 5.0}
    apart = {"publish": 1.0, "pull": 3.0, "apply": 0.5, "notice": NOTICE}
    rows: list[dict[str, Any]] = []
    for ranks in sizes:
        for name, ahead in (("sync", 0), ("streamed", 0), ("async, k = 1", 1), ("async, k = 2", 2)):
            schedule = name.partition(",")[0]
            generating = ranks // 2 if ahead else ranks
            trainers = (ranks - generating if ahead else ranks) // 8
            groups = ranks * A_RANK // 8
            arithmetic = Arithmetic(groups, 8, groups * 8, 1, 1, trainers, generating // 2, 100, 1 << 20)
            setup = Setup(arithmetic, schedule, graders=ranks * 2, staleness=ahead, trainer_ranks=8, engine_ranks=2)
            costs = Costs(**base, **apart, rollout=1e-3 * row_ms * arithmetic.samples)
            responses = Responses(lognormal(1000, 0.8, 4000), lambda rng: 0.2)
            outcome = simulate(setup, costs, responses, 4)
            rows.append({"ranks": ranks, "schedule": name, "seconds": outcome.rollout,
                         "tokens": outcome.tokens / ranks})  # fmt: skip
    first = {row["schedule"]: row["tokens"] for row in rows if row["ranks"] == sizes[0]}
    print("\n| ranks | " + " | ".join(f"{s}, s | linearity" for s in first) + " |\n|---|" + "---|---|" * len(first))
    for ranks in sizes:
        cells = []
        for row in (r for r in rows if r["ranks"] == ranks):
            row["linearity"] = row["tokens"] / first[row["schedule"]]
            cells.append(f"{row['seconds']:.1f} | {row['linearity']:.1%}")
        print(f"| {ranks} | {' | '.join(cells)} |")
    print(f"\nThe paper (MindSpeed RL, Fig. 9, measured): {PAPER[0]:.1%} at {PAPER[1]} NPUs.")
    return rows


def read(path: Path) -> Measured:
    """(case, arm) -> medians of a file of schedules.py."""
    measured: dict[tuple[str, str], dict[str, float]] = {}
    for row in json.loads(path.read_text()):
        if row["arm"] in MODELLED:
            measured.setdefault((row["case"], row["arm"]), {})[row["metric"]] = row["value"]
    return measured


def main() -> None:
    """Print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measured", type=Path, help="JSON of schedules.py; default: what README.md has")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--only", default="measured,published,scale", help="which of %(default)s")
    parser.add_argument("--ranks", default="16,64,192,512,1024", help="of `scale`, default %(default)s")
    parser.add_argument(
        "--row-ms", type=float, default=0.2, help="of the control plane, see control_plane.py; %(default)s"
    )
    args = parser.parse_args()
    wanted, result = args.only.split(","), {}
    if "measured" in wanted:
        result["measured"] = beside_measured(read(args.measured) if args.measured else IN_README)
    if "published" in wanted:
        result["published"] = published()
    if "scale" in wanted:
        result["scale"] = scale([int(n) for n in args.ranks.split(",")], args.row_ms)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
