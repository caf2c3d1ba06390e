"""`python -m mindspeed_rl_plugin patch`: check, apply or revert the import line in an upstream checkout."""

from __future__ import annotations

import argparse
import sys

from mindspeed_rl_plugin.tools.patch_trees import apply_to, inspect, revert_in

EXIT = {"applied": 0, "not applied": 1, "does not match": 2}


def main(argv: list[str]) -> int:
    """Returns 0 when the tree ends as asked (for --check: when applied), 1 not applied, 2 does not match."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_rl_plugin patch",
        description="One added line in pretrain_gpt.py of Megatron-LM or MindSpeed-LLM. DIR need not be under git.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", metavar="DIR", help="say whether the line is there; exit 0 applied, 1 not, 2 no match")
    what.add_argument("--apply", metavar="DIR", help="add the line")
    what.add_argument("--revert", metavar="DIR", help="take the line out")
    options = parser.parse_args(argv)
    try:
        if options.check:
            state = inspect(options.check)
            print(state.text)
            return EXIT[state.state]
        state = apply_to(options.apply) if options.apply else revert_in(options.revert)
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT["does not match"]
    print(state.text)
    return 0
