"""Rehearse the launch scripts that upstream ships, unchanged, with RL flags added: the table of docs/launch-scripts.md.

    python tests/tools/launch_scripts.py                                  # those that the table does not have
    python tests/tools/launch_scripts.py --only 'qwen3/pretrain_*' --again

MEGATRON_LM_PATH, MINDSPEED_PATH and MINDSPEED_LLM_PATH name the checkouts, whose folders' names stand in the rows. The
scripts are MindSpeed-LLM's that pretrain, fine-tune or train adapters, and those in three folders of Megatron 0.19.0.
Each row is written as its script ends: it trained, or it was refused by the name of its model family in under a minute.
Any other end is no row: its output is kept under --out, and the script is rehearsed again by the next call. Exits 1
where there was one.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_rl_plugin.tools.rehearse.outcome import REFUSAL, Facts

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "launch-scripts.md"
BEGIN, END = "<!-- rows: written by tests/tools/launch_scripts.py -->", "<!-- end of rows -->"
CHECKOUTS = ("MEGATRON_LM_PATH", "MINDSPEED_PATH", "MINDSPEED_LLM_PATH")
SCRIPTS = {
    "MINDSPEED_LLM_PATH": (
        "examples/mcore/*/pretrain_*.sh",
        "examples/mcore/*/tune_*_full*.sh",
        "examples/mcore/*/tune_*_lora*.sh",
    ),
    "MEGATRON_LM_PATH": ("examples/gpt3/*.sh", "examples/llama/*.sh", "examples/mixtral/*.sh"),
}
MEGATRON = "core_v0.19.0"  # whose own scripts are rehearsed
CLUSTER = {"SLURM_NNODES": "4"}  # what Mixtral's asks for the number of nodes; it splits over 32 ranks
# The rollout is a multiple of every global batch size among the scripts.
RL_FLAGS = "--rl-algorithm grpo --rl-reward exact --rl-prompt-data prompts.jsonl --rl-rollout-prompts 3840"
# What --warm imports once: third-party libraries that ranks import. Megatron, MindSpeed and vLLM are each rank's own.
LIBRARIES = """
    mindspeed_rl_plugin.adaptor torch.distributed.run torch._dynamo torch._inductor.compile_fx torch.distributed.tensor
    transformers.modeling_utils transformers.processing_utils transformers.generation datasets pandas networkx openai
    opentelemetry.sdk.trace.export opentelemetry.exporter.otlp.proto.grpc.trace_exporter ray fastapi xgrammar cv2 peft
"""
ALL = ["iteration", "evaluation", "dump", "save", "resume"]
REFUSAL_SECONDS = 60.0


@dataclass(frozen=True)
class Row:
    """A script's rehearsal. script: its path in its checkout; platform: folders of the checkouts; end: `trained`,
    `refused` or `failed`; shown, removed, modules: as in `Facts`; seconds: of the whole; said: why it did not train."""

    script: str
    platform: str
    end: str
    shown: list[str]
    removed: list[str]
    modules: list[str]
    seconds: float
    said: list[str]

    @property
    def good(self) -> bool:
        """Whether it is what this page claims: all parts ran, or the family was refused in time."""
        return self.end == end(self.shown, self.said, self.seconds) != "failed"


def end(shown: Sequence[str], said: Sequence[str], seconds: float) -> str:
    """How a rehearsal ended, by what it showed and said."""
    if not said and set(ALL) <= set(shown):
        return "trained"
    refused = said[:1] and said[0].startswith(REFUSAL) and any("is no family that RL knows" in line for line in said)
    return "refused" if refused and not shown and seconds < REFUSAL_SECONDS else "failed"


def checkouts() -> Iterator[tuple[dict[str, Path], str]]:
    """What goes together, by variable, and the one of them whose scripts are rehearsed."""
    megatrons, mindspeeds, llms = ([Path(p) for p in os.environ.get(n, "").split(os.pathsep) if p] for n in CHECKOUTS)
    for mindspeed, llm in zip(mindspeeds, llms, strict=True):
        yield dict(zip(CHECKOUTS, (megatrons[0], mindspeed, llm), strict=True)), CHECKOUTS[2]
    for megatron in megatrons:
        if megatron.name.endswith(MEGATRON):
            yield {CHECKOUTS[0]: megatron}, CHECKOUTS[0]


def rehearse(script: Path, together: dict[str, Path], home: Path, out: Path) -> Row:
    """Rehearse one script, in the root of its checkout; `out` keeps what was said where that is no row."""
    name, began = str(script.relative_to(home)), time.monotonic()
    env = {k: v for k, v in os.environ.items() if k not in CHECKOUTS} | {k: str(v) for k, v in together.items()}
    env |= CLUSTER
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as scratch:
        facts_file = Path(scratch) / "facts.json"
        words = [str(script), "--timeout", "600", "--json", str(facts_file), "--", *RL_FLAGS.split()]
        python = os.environ.get("PYTHON_EXEC", sys.executable)
        command = [python, "-m", "mindspeed_rl_plugin", "rehearse", *words]
        done = subprocess.run(command, env=env, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        facts = Facts(**json.loads(facts_file.read_text())) if facts_file.exists() else Facts(failed=["it crashed"])
    seconds = round(time.monotonic() - began)
    platform = ", ".join(each.name for each in reversed(together.values()))
    ended = end(facts.shown, facts.failed, seconds)
    row = Row(name, platform, ended, facts.shown, facts.removed, facts.modules, seconds, facts.failed)
    log = out / (name.replace("/", "_") + ".log")
    log.unlink(missing_ok=True)
    if not row.good:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stdout)
    return row


def known(table: Path) -> list[Row]:
    """The rows beside a table, as JSON lines."""
    file = table.with_suffix(".jsonl")
    return [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def record(row: Row, table: Path) -> None:
    """Put a row into a table, in the place of an older one; one that is not good only takes the older one away. Raises
    ValueError for a file without the two marks."""
    text = table.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{table} lacks the marks {BEGIN} and {END}; put them where the rows belong")
    merged = {(r.platform, r.script): r for r in known(table)} | {(row.platform, row.script): row}
    rows = [merged[key] for key in sorted(merged) if merged[key].good]
    table.with_suffix(".jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
    table.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n{render(rows)}{END}{text.split(END)[1]}")


def render(rows: Sequence[Row]) -> str:
    """The rows as tables in Markdown, one for each platform and end."""
    head = {"trained": ("also shown", "not shown", "stand-ins for"), "refused": ("refusal",)}
    text = ""
    for platform in dict.fromkeys(row.platform for row in rows):
        for ended, columns in head.items():
            chosen = [row for row in rows if (row.platform, row.end) == (platform, ended)]
            if chosen:
                text += f"\n### {ended.capitalize()} ({len(chosen)}): {platform}\n\n"
                text += "| script | seconds | " + " | ".join(columns) + " |\n" + "|---" * (2 + len(columns)) + "|\n"
                text += "".join(f"| {_short(row.script)} | {row.seconds:.0f} | {_cells(row)} |\n" for row in chosen)
    return text + "\n"


def _short(script: str) -> str:
    return script.removeprefix("examples/").removeprefix("mcore/")


def _cells(row: Row) -> str:
    if row.end == "refused":
        return " ".join(line.removeprefix("  - ") for line in row.said[1:]).replace("|", "\\|")
    flags = " ".join(f"`{flag}`" for flag in row.removed)
    return " | ".join((", ".join(each for each in row.shown if each not in ALL), flags, " ".join(row.modules)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="scripts whose path ends so (* ?)")
    parser.add_argument("--again", action="store_true", help="those of finished rows, too")
    parser.add_argument("--warm", action="store_true", help="import libraries once: half the time")
    parser.add_argument("--table", type=Path, default=TABLE, help="Markdown file; its rows stand beside it")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "launch-scripts", help="for outputs of failures")
    args = parser.parse_args()
    if not any(checkouts()):
        parser.error(f"no checkouts: set {' and '.join(CHECKOUTS)}, or MEGATRON_LM_PATH to a Megatron-LM-{MEGATRON}")
    with warm() if args.warm else contextlib.nullcontext():
        return _run(args)


@contextlib.contextmanager
def warm() -> Iterator[None]:
    """Inside, processes of rehearsals are forks of one with `LIBRARIES` imported."""
    sys.path.append(str(ROOT / "tests" / "warm"))
    from warm_start import started

    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), LIBRARIES.split()) as python:
        os.environ["PYTHON_EXEC"] = python
        yield


def _run(args: argparse.Namespace) -> int:
    failed = 0
    for together, whose in checkouts():
        home, platform = together[whose], ", ".join(each.name for each in reversed(together.values()))
        for script in (script for pattern in SCRIPTS[whose] for script in sorted(home.glob(pattern))):
            name = str(script.relative_to(home))
            finished = not args.again and any((r.platform, r.script) == (platform, name) for r in known(args.table))
            if not finished and any(fnmatch.fnmatch(name, f"*{pattern}") for pattern in args.only):
                row = rehearse(script, together, home, args.out)
                record(row, args.table)
                failed += not row.good
                print(f"{row.end} {row.seconds:.0f} s {name} {' '.join(row.said[-1:])}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
