"""A script for the runner: parses argument lists with Megatron's real parser and validation, and prints JSON.

argv: a JSON list of argument lists. Output: the help text, the flags and attributes of the parser, and for
each list its error ("ValueError: ..."), or null. Validation ends before global state is set, so it repeats.
"""

import contextlib
import io
import json
import sys

from megatron.training import arguments

lists = json.loads(sys.argv[1])

parsers = []
original = arguments.add_megatron_arguments


def keep(parser):
    parsers.append(original(parser))
    return parsers[-1]


arguments.add_megatron_arguments = keep
sys.argv = ["driver"]
arguments.parse_args(ignore_unknown_args=True)
arguments.add_megatron_arguments = original

errors = []
for words in lists:
    sys.argv = ["driver", *words]
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            arguments.validate_args(arguments.parse_args(), {})
    except ValueError as error:
        errors.append(f"ValueError: {error}")
    except SystemExit:
        errors.append(f"usage: {out.getvalue()[-500:]}")
    else:
        errors.append(None)

mine = [a for a in parsers[0]._actions if getattr(a, "mindspeed_rl", False)]
result = {
    "help": parsers[0].format_help(),
    "flags": [s for a in mine for s in a.option_strings],
    "dests": [a.dest for a in mine],
    "actions": [
        [a.option_strings, a.dest, getattr(a.container, "title", None)] for a in parsers[0]._actions if a not in mine
    ],
    "other_dests": [a.dest for a in parsers[0]._actions if a not in mine],
    "errors": errors,
}
print("\nRESULT " + json.dumps(result))
