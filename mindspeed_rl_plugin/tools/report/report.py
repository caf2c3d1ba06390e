"""Report: one self-contained HTML file of a run, for a browser without network.

The page is report.html.in (frame), report.css, report.js (helpers and curves), report_stages.js, report_samples.js.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from mindspeed_rl_plugin.monitor.run_files import write_text
from mindspeed_rl_plugin.tools.report.report_data import collect


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mindspeed_rl_plugin report RUN_DIR [--out FILE]`: write the report. Returns 0, or 1 after an error."""
    parser = argparse.ArgumentParser(prog="mindspeed_rl_plugin report", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", help="the run's --rl-run-dir (default of a run: SAVE/rl)")
    parser.add_argument("--out", help="file to write (default: RUN_DIR/report.html)")
    parser.add_argument("--dump-dir", help="the run's --rl-dump-dir (default: as in run.json)")
    parser.add_argument("--samples", type=int, default=1000, help="largest number of samples shown (default: 1000)")
    args = parser.parse_args(argv)
    out = Path(args.out) if args.out else Path(args.run_dir) / "report.html"
    try:
        data = collect(args.run_dir, dump_dir=args.dump_dir, samples=args.samples)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, render(data))
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    rows, ranks = len(data["samples"]["rows"]), data["timeline"]["ranks_total"]
    trained = sum(i > 0 for i in data["metrics"]["iterations"])  # iteration 0 has only an evaluation
    total = data["samples"]["total"]
    shown = f"{rows} of the {total} responses" if total else "no responses (--rl-dump-dir writes them): no dumps"
    places = ", ".join(data["samples"]["places"]) + (f"; --samples {total} shows all" if rows < total else "")
    print(f"report: {out} shows {trained} iterations of {ranks} rank{'s' * (ranks != 1)}, and {shown} in {places}")
    return 0


def render(data: dict[str, Any]) -> str:
    folder = resources.files(__package__)
    parts = {"title": html.escape(data["title"]), "data": embed(data)}

    def part(marker: re.Match[str]) -> str:
        return parts.get(marker[1]) or folder.joinpath(marker[1]).read_text(encoding="utf-8")

    # One pass, so that a marker inside the data or a script is not replaced.
    return re.sub(r"\{\{([\w.]+)\}\}", part, folder.joinpath("report.html.in").read_text(encoding="utf-8"))


def embed(data: Any) -> str:
    """JSON that is safe inside a script element: no text of a sample can close the element or open a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
