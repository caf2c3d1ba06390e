"""The command `doctor`. So far: the story of a job that hangs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mindspeed_rl_plugin.tools.doctor.hang import story


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mindspeed_rl_plugin doctor --job SAVE [--stacks]`. Returns 1, with a message, if SAVE has no job."""
    parser = argparse.ArgumentParser(prog="mindspeed_rl_plugin doctor", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--job", metavar="SAVE", required=True, help="the --save of a job: where each of its processes is"
    )
    parser.add_argument("--stacks", action="store_true", help="with the Python stacks of its processes on this machine")
    args = parser.parse_args(argv)
    try:
        print(story(args.job, args.stacks))
    except (ValueError, OSError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 1
    return 0
