"""Run in a process of its own: take arguments through the real parsers and validation, and no further.

    python -m mindspeed_rl_plugin.tools.rehearse.accept [--any-flag] SCRIPT.py ARGS

Runs the entry script through the runner as rank 0 of the world that WORLD_SIZE names. When Megatron is about to connect
the ranks, its arguments are parsed and validated, by Megatron, MindSpeed and the plugin; it then only builds the
model's config, whose own checks are part of the validation. --any-flag: name flags that the parser does not have, and
go on without them.
"""

from __future__ import annotations

import argparse
import runpy
import sys

from mindspeed_rl_plugin import host
from mindspeed_rl_plugin.engine import engine_sizes
from mindspeed_rl_plugin.tools.rehearse import absent_modules

ACCEPTED = "rehearse: arguments accepted"
UNKNOWN = "rehearse: no flags here: "


def main(argv: list[str]) -> None:
    host.activate_if_needed(announce=False)
    import torch.distributed as dist

    dist.init_process_group = _accept
    engine_sizes.host_total = lambda: sys.maxsize  # the script's machine is another one
    if argv[0] == "--any-flag":
        argparse.ArgumentParser.parse_args = _parse_known
    absent_modules.install()
    sys.argv = ["mindspeed_rl_plugin", *argv[argv[0] == "--any-flag" :]]
    runpy.run_module("mindspeed_rl_plugin", run_name="__main__", alter_sys=True)


def _accept(*args: object, **kwargs: object) -> None:
    """In place of `init_process_group`: build the config of the model, say so, and end."""
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    core_transformer_config_from_args(get_args())
    print(ACCEPTED, flush=True)
    sys.exit(0)


def _parse_known(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> argparse.Namespace:
    parsed, rest = parser.parse_known_args(*args, **kwargs)
    print(UNKNOWN + " ".join(word for word in rest if word.startswith("--")), flush=True)
    return parsed


if __name__ == "__main__":
    main(sys.argv[1:])
