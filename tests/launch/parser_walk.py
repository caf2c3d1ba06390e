"""The real parser of one platform, as a JSON list of [flags, attribute, title of the group].

Its argument, where it has one, is the adaptor of MindSpeed that is imported first.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types

from mindspeed_rl_plugin import host

# What MindSpeed-LLM imports for features that no parser needs, and this environment may lack.
ABSENT = {"accelerate", "bitsandbytes", "deepspeed", "evaluate", "nltk", "peft", "sklearn", "sqlalchemy", "trl"}


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def show(parser, *args, **kwargs):
    rows = [[a.option_strings, a.dest, getattr(a.container, "title", None)] for a in parser._actions]
    print("\nRESULT " + json.dumps(rows), flush=True)
    os._exit(0)


os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
host.activate_if_needed(announce=False)
sys.meta_path.append(StandIn())
adaptor = sys.argv[1:]
sys.argv[1:] = []
for name in adaptor:
    importlib.import_module(name)

from megatron.training import arguments  # noqa: E402

argparse.ArgumentParser.parse_args = show
arguments.parse_args()
