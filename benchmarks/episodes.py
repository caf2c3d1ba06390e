"""Episodes beside TRL's tools and environments: episodes a second of a GRPO iteration, and what a rollout's time is.

    python benchmarks/episodes.py --json OUT.json [--cases tool,slow] [--arms ours,trl] [--repeats 2]

All arms: two processes with one thread each, the same small model, which was trained to make calls (see
training/episode_task.py), the same tasks and the same file with tools and environments. Nothing is imposed: each arm
samples, parses calls and renders by its own code. In the arms `...-agent` an agent makes the calls. The cases
`rollout-...` are of one engine apart from training; `gateway-latency` is of the gateway beside vLLM's own server.
"""

from __future__ import annotations

import argparse
import datetime
import json
import operator
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "training")]

import end_to_end  # noqa: E402
import episode_task  # noqa: E402
from end_to_end import DRIFT, WARM_UP  # noqa: E402


@dataclass(frozen=True)
class Case:
    """who: function or class of training/episode_tools.py; prompts, members: tasks of an iteration and episodes of
    each; workers: processes of each engine of this project in which the user's code runs; model: of which turns."""

    who: str
    prompts: int
    workers: int
    model: str = "."
    members: int = episode_task.MEMBERS

    @property
    def episodes(self) -> int:
        """Of an iteration."""
        return self.prompts * self.members


CASES = {
    "tool": Case("work", 12, 2),
    "environment": Case("Work", 12, 2),
    "slow": Case("SlowWork", 16, 8, "short"),
    "slow-async": Case("SlowWorkAsync", 16, 8, "short"),  # TRL awaits the calls of one turn together
    "slow-words": Case("SlowWork", 8, 8),
}


@dataclass(frozen=True)
class Rollout:
    """Of an engine apart from training. See `Case`."""

    who: str
    workers: int
    model: str = "long"


ROLLOUTS = {
    "rollout-at-once": Rollout("Work", 2),
    "rollout-slow": Rollout("SlowWork", 4),
    "rollout-slow-agent": Rollout("play_SlowWork", 1),
    "rollout-short-turns": Rollout("Work", 2, "."),
}
ROLLOUT_EPISODES = 64  # and clients at the gateway
GATEWAY = "gateway-latency"
DEFAULT = ("tool", "environment", "slow", *ROLLOUTS, GATEWAY)
OURS = {"ours": (), "ours-shared": ("--rl-share-prompts",)}  # this project's arms -> their flags
AGENTS = {f"{arm}-agent": flags for arm, flags in OURS.items()}
TRLS = ("trl", "trl-vllm")
ARMS = (*OURS, *AGENTS, *TRLS)
APART = {"engine": "over_busy", "gateway": "over_vllm"}  # arms of the cases apart from training -> what is shown first
SPEED = "episodes_per_second"
UNITS = {SPEED: "episodes/s", "rollout_" + SPEED: "episodes/s", "turns": "an episode", "calls": "an episode"}
UNITS |= {"tokens": "an episode"} | dict.fromkeys(
    ("over_busy", "over_single_turns", "over_sampled", "over_vllm"), "ratio"
)
# (case, metric) -> bound: of this project's faster arm over TRL's faster one; of an arm apart the value
TARGETS = {
    **{(case, SPEED): (">=", 1.3) for case in ("tool", "environment")},
    **{(case, "over_busy"): ("<=", 1.15) for case in ("rollout-at-once", "rollout-slow", "rollout-slow-agent")},
    ("slow", SPEED): (">=", 3.0),
    ("rollout-at-once", "over_single_turns"): ("<=", 1.15),
    (GATEWAY, "over_vllm"): ("<=", 1.1),
    (GATEWAY, "step"): (">=", 0.02),  # seconds, so that a small model does not make it a target of Python
}
AGENT_TARGETS = {("environment", SPEED): (">=", 1.0)}  # of the faster of these arms over TRL's faster one
HOLDS = {">=": operator.ge, "<=": operator.le}
# Most differences between arms, relative, for what is sampled is random; three times as much from the script, of
# which the model writes some calls that cannot be read.
COUNTED = {"turns": 0.05, "calls": 0.08, "tokens": 0.1}


def prepare(folder: Path) -> None:
    """Model and tokenizer; see `episode_task`."""
    templates = end_to_end.interpreter().parents[1].glob("lib/python*/site-packages/trl/chat_templates/qwen2_5.jinja")
    command = [sys.executable, str(HERE / "training" / "episode_task.py"), str(folder), str(next(templates))]
    end_to_end.run_job(command, folder / "train.log", memory=False)


def place_of(folder: Path, turns: str) -> Path:
    """The folder of the model of such turns, made from what `prepare` made where it is not there."""
    place = folder / turns
    if not (place / "model").exists():
        place.mkdir()
        command = [sys.executable, str(HERE / "training" / "episode_task.py"), str(place), "--from", str(folder), turns]
        end_to_end.run_job(command, place / "train.log", memory=False)
    return place


def run_ours(case: Case, folder: Path, iterations: int, *more: str, agent: bool = False) -> dict[str, float]:
    """This project: metric -> value. more: flags; agent: whether an agent makes the calls. Raises
    CalledProcessError when the job fails."""
    checkpoint, model = end_to_end.imported(folder)
    save = Path(tempfile.mkdtemp(dir=folder))
    prompt = json.loads((folder / "sizes.json").read_text())["prompt"]
    longest = prompt + episode_task.LIMIT
    user, agents = (f"{HERE / 'training' / name}.py" for name in ("episode_tools", "episode_agents"))
    who = ["--rl-environment" if case.who[0].isupper() else "--rl-tools", f"{user}:{case.who}"]
    who = ["--rl-agent", f"{agents}:play_{case.who}"] if agent else who
    command = [
        *end_to_end.torchrun(sys.executable),
        *("-m", "mindspeed_rl_plugin", str(HERE.parent / "examples" / "pretrain_gpt.py"), *model),
        *end_to_end.MODEL_FLAGS.split(),
        *end_to_end.RL_FLAGS.replace("--rl-ignore-eos ", "").split(),
        *("--seq-length", str(longest), "--micro-batch-size", str(episode_task.MICRO_BATCH)),
        *("--global-batch-size", str(case.episodes), "--train-iters", str(iterations), "--load", str(checkpoint)),
        *("--save", str(save), "--tokenizer-model", str(folder / "tokenizer"), "--rl-apply-chat-template"),
        # As many tokens as TRL's micro-batch has where a row is as long as any.
        *("--rl-max-tokens-per-microbatch", str(episode_task.MICRO_BATCH * longest)),
        *("--rl-prompt-data", str(folder / "prompts.jsonl"), "--rl-reward", f"{user}:grade"),
        *("--rl-samples-per-prompt", str(case.members), "--rl-max-prompt-length", str(prompt)),
        *("--rl-max-response-length", str(episode_task.LIMIT), "--rl-max-turns", str(episode_task.TURNS)),
        *(*who, "--rl-environment-workers", str(1 if agent else case.workers), *more),
    ]
    end_to_end.run_job(command, folder / "ours.log", memory=False)
    lines = [json.loads(line) for line in (save / "rl" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train"][WARM_UP:]
    names = {"turns": "episode/turns_mean", "calls": "tools/calls", "tokens": "response/length_mean"}
    counts = {name: statistics.mean(line[of] for line in lines) for name, of in names.items()}
    steps = [(line["seconds/iteration"], line["seconds/reshard"] + line["seconds/generate"]) for line in lines]
    return measured(case, steps, counts)


def run_trl(case: Case, folder: Path, iterations: int, *engine: str) -> dict[str, float]:
    """TRL: metric -> value. engine: "vllm", or transformers generates. Raises CalledProcessError when it cannot be
    installed or fails, RuntimeError when its engine lags behind."""
    out = folder / "trl.json"
    command = [*end_to_end.torchrun(str(end_to_end.interpreter())), str(HERE / "training" / "trl_episodes.py")]
    end_to_end.run_job([*command, str(folder), str(iterations), str(out), *engine], folder / "trl.log", memory=False)
    result = json.loads(out.read_text())
    if not result["drift"] <= DRIFT:
        raise RuntimeError(f"log-probs of TRL's engine differ by {result['drift']} from its trainer's, bound {DRIFT}")
    made, *totals = map(sum, zip(*result["counts"][WARM_UP:], strict=True))
    counts = {name: total / made for name, total in zip(COUNTED, totals, strict=True)}
    return measured(case, [(step["iteration"], step["rollout"]) for step in result["steps"][WARM_UP:]], counts)


def measured(case: Case, steps: Sequence[tuple[float, float]], counts: dict[str, float]) -> dict[str, float]:
    """Medians of the iterations that count. steps: seconds of each and of its rollout; counts: an episode."""
    iteration, rollout = (statistics.median(column) for column in zip(*steps, strict=True))
    speeds = {SPEED: case.episodes / iteration, f"rollout_{SPEED}": case.episodes / rollout}
    return {**speeds, "iteration": iteration, "rollout": rollout, **counts}


def check_work(counts: dict[str, float], others: Sequence[dict[str, float]]) -> None:
    """Raises RuntimeError where an arm did other work than the script has, or than the other arms."""
    rounds = (1 + episode_task.MOST_ROUNDS) / 2
    script = {"turns": rounds + 1, "calls": rounds}
    for other, share in ((script, 3), *((other, 1) for other in others)):
        for name, bound in COUNTED.items():
            if name in other and abs(counts[name] / other[name] - 1) > share * bound:
                raise RuntimeError(f"an arm made {counts[name]:.3g} {name} an episode, not {other[name]:.3g}")


def run_rollouts(cases: Sequence[str], folder: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """An engine apart from training: case -> metrics of each rollout."""
    made: dict[str, list[dict[str, float]]] = {}
    for model in dict.fromkeys(ROLLOUTS[case].model for case in cases):
        place = place_of(folder, model)
        out, asked = place / "rollouts.json", [case for case in cases if ROLLOUTS[case].model == model]
        command = [sys.executable, str(HERE / "training" / "rollouts.py"), str(place), str(out), str(ROLLOUT_EPISODES)]
        command += [str(repeats), *(f"{case}={ROLLOUTS[case].who}:{ROLLOUTS[case].workers}" for case in asked)]
        end_to_end.run_job(command, place / "rollouts.log", memory=False)
        made |= json.loads(out.read_text())
    for row in (row for rows in made.values() for row in rows):
        row["over_busy"] = row["wall"] / max(row["engine"], row["environments"])
        row["over_single_turns"] = row["wall"] / row["single_turns"]
        row["over_sampled"] = row["wall"] / row["single_turns_sampled"]
    return made


def run_gateway(folder: Path, repeats: int) -> list[dict[str, float]]:
    """The gateway beside vLLM's own server: metrics of each pair of measurements."""
    out = folder / "gateway.json"
    command = [sys.executable, str(HERE / "training" / "gateway_latency.py"), str(folder), str(out)]
    end_to_end.run_job([*command, str(ROLLOUT_EPISODES), str(repeats)], folder / "gateway.log", memory=False)
    return json.loads(out.read_text())


def run(arms: Sequence[str], cases: Sequence[str], iterations: int, repeats: int) -> Iterator[list[dict[str, Any]]]:
    """Rows of the result after each job: medians over the repeats so far."""
    seen: dict[tuple[str, str, str], list[float]] = {}

    def keep(arm: str, case: str, metrics: dict[str, float]) -> list[dict[str, Any]]:
        for metric, value in metrics.items():
            seen.setdefault((arm, case, metric), []).append(value)
        return [
            {"arm": a, "case": c, "metric": m, "unit": UNITS.get(m, "s")}
            | {"value": statistics.median(v), "range": [min(v), max(v)]}
            for (a, c, m), v in seen.items()
        ]

    runner = {arm: lambda *case, flags=flags: run_ours(*case, *flags) for arm, flags in OURS.items()}
    runner |= {arm: lambda *case, flags=flags: run_ours(*case, *flags, agent=True) for arm, flags in AGENTS.items()}
    runner |= {
        "trl": run_trl,
        "trl-vllm": lambda *case: run_trl(*case, "vllm"),
    }
    with tempfile.TemporaryDirectory(prefix="episodes-") as directory:
        folder = Path(directory)
        prepare(folder)
        if rollouts := [case for case in cases if case in ROLLOUTS]:
            for case, made in run_rollouts(rollouts, folder, 2 * repeats + 1).items():
                for row in made:
                    rows = keep("engine", case, row)
            yield rows
        if GATEWAY in cases:
            for row in run_gateway(folder, 2 * repeats + 3):
                rows = keep("gateway", GATEWAY, row)
            yield rows
        for turn in range(repeats):
            for name in (case for case in cases if case in CASES):
                case = CASES[name]
                place = place_of(folder, case.model)
                (place / "case.json").write_text(json.dumps(asdict(case)))
                tasks = map(json.dumps, episode_task.tasks(case.prompts))
                (place / "prompts.jsonl").write_text("\n".join(tasks) + "\n")
                works: list[dict[str, float]] = []
                for arm in (*arms[turn % len(arms) :], *arms[: turn % len(arms)]):
                    begin = time.monotonic()
                    metrics = runner[arm](case, place, iterations)
                    shown = {k: round(v, 3) for k, v in metrics.items()}
                    took = f"{time.monotonic() - begin:.0f} s"
                    print(f"{turn + 1}/{repeats} {name} {arm} {took} {shown}", file=sys.stderr, flush=True)
                    check_work(metrics, works)
                    works.append(metrics)
                    yield keep(arm, name, metrics)


def targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios of this project's faster arm to each arm of TRL, and of each target of the issue that the rows can tell of
    whether it was reached: beside the faster arm of TRL."""
    value = {(r["arm"], r["case"], r["metric"]): r["value"] for r in rows}
    result = []
    asked = [(OURS, *target) for target in TARGETS.items()] + [(AGENTS, *target) for target in AGENT_TARGETS.items()]
    for mine, (case, metric), (sign, bound) in asked:
        ratios = {arm: value[arm, case, metric] for arm in APART if (arm, case, metric) in value}
        if not ratios:
            ours, trls = ([arm for arm in arms if (arm, case, metric) in value] for arms in (mine, TRLS))
            best = max(ours, key=lambda arm: value[arm, case, metric], default=None)
            ratios = {f"{best}/{arm}": value[best, case, metric] / value[arm, case, metric] for arm in trls if best}
        for arm, ratio in ratios.items():
            row = {"arm": arm, "case": case, "metric": metric, "value": ratio, "unit": "ratio"}
            judged = ratio == min(ratios.values())
            result.append(
                row | ({"target": f"{sign} {bound:g}", "reached": HOLDS[sign](ratio, bound)} if judged else {})
            )
    return result


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line an arm and case, one table for the jobs and one for each arm apart."""
    value = {(r["case"], r["arm"], r["metric"]): r for r in rows}
    lines = []
    for arms, first in ((ARMS, SPEED), *(((arm,), first) for arm, first in APART.items())):
        kept = [r for r in rows if r["arm"] in arms]
        metrics = list(dict.fromkeys(r["metric"] for r in kept))
        if kept:
            lines += [f"| case | arm | {' | '.join(metrics)} | {first}, least to most |"]
            lines += [f"|---|---|{'---|' * len(metrics)}---|"]
        for case, arm in dict.fromkeys((r["case"], r["arm"]) for r in kept):
            cells = [f"{value[case, arm, metric]['value']:.4g}" for metric in metrics]
            least, most = value[case, arm, first]["range"]
            lines.append(f"| {case} | {arm} | {' | '.join(cells)} | {least:.4g} to {most:.4g} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the rows {arm, case, metric, value, unit}")
    parser.add_argument("--arms", default=",".join(ARMS), help="which of %(default)s")
    known = (*CASES, *ROLLOUTS, GATEWAY)
    parser.add_argument("--cases", default=",".join(DEFAULT), help=f"which of {', '.join(known)}; default %(default)s")
    parser.add_argument("--iterations", type=int, default=5, help=f"of each job, {WARM_UP} not counted; %(default)s")
    parser.add_argument("--repeats", type=int, default=1, help="jobs of each arm and case, default %(default)s")
    args = parser.parse_args()
    arms, cases = args.arms.split(","), args.cases.split(",")
    for given, names in ((arms, ARMS), (cases, known)):
        if unknown := set(given) - set(names):
            parser.error(f"{sorted(unknown)} unknown; known: {', '.join(names)}")
    if args.iterations <= WARM_UP:
        parser.error(f"--iterations {args.iterations}: the first {WARM_UP} are not counted; give more")
    before, begin, rows = os.getloadavg()[0], time.monotonic(), []
    for rows in run(arms, cases, args.iterations, args.repeats):
        args.json.write_text(json.dumps(rows + targets(rows), indent=1) + "\n")
    print(table(rows))
    for row in targets(rows):
        asked = f", asked {row['target']}: {'reached' if row['reached'] else 'NOT reached'}" if "target" in row else ""
        print(f"{row['case']} {row['metric']}: {row['arm']} {row['value']:.2f}{asked}")
    load = f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after, {(time.monotonic() - begin) / 60:.0f} minutes"
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    print(f"{now}, {os.cpu_count()} cores, {load}, median of {args.repeats} x {args.iterations - WARM_UP} iterations")


if __name__ == "__main__":
    main()
