"""The real parser of one platform, as a JSON list of [flags, attribute, title of the group].

    parser_walk.py [ADAPTOR]     ADAPTOR: module of MindSpeed that is imported first
"""

import argparse
import importlib
import json
import os
import sys

from mindspeed_rl_plugin import host

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
host.activate_if_needed(announce=False)
adaptor = sys.argv[1:]
sys.argv[1:] = []
for name in adaptor:
    importlib.import_module(name)

from megatron.training import arguments  # noqa: E402


def show(parser, *args, **kwargs):
    rows = [[a.option_strings, a.dest, getattr(a.container, "title", None)] for a in parser._actions]
    print("\nRESULT " + json.dumps(rows), flush=True)
    os._exit(0)


argparse.ArgumentParser.parse_args = show
arguments.parse_args()
