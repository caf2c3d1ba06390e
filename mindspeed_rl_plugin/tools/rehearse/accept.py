"""Run in a process of its own: take arguments through the real parsers and validation, and no further.

    python -m mindspeed_rl_plugin.tools.rehearse.accept SCRIPT.py ARGS    stops where ranks would connect
    python -m mindspeed_rl_plugin.tools.rehearse.accept --list-flags [mindspeed]      prints what the parser knows

The first runs the entry script through the runner as rank 0 of the world that WORLD_SIZE names. When Megatron is about
to connect the ranks, its arguments are parsed and validated, by Megatron, MindSpeed and the plugin; it then only builds
the model's config, whose own checks are part of the validation.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys

from mindspeed_rl_plugin import host

ACCEPTED = "rehearse: arguments accepted"


def main(argv: list[str]) -> None:
    """See the module's docstring."""
    host.activate_if_needed(announce=False)
    if argv[0] == "--list-flags":
        sys.argv = sys.argv[:1]
        if "mindspeed" in argv:
            import mindspeed.megatron_adaptor  # noqa: F401
        from megatron.training.arguments import parse_args

        argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = _print_flags
        parse_args()
    import torch.distributed as dist

    dist.init_process_group = _accept
    sys.argv = ["mindspeed_rl_plugin", *argv]
    runpy.run_module("mindspeed_rl_plugin", run_name="__main__", alter_sys=True)


def _accept(*args: object, **kwargs: object) -> None:
    """In place of `init_process_group`: build the config of the model, say so, and end."""
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    core_transformer_config_from_args(get_args())
    print(ACCEPTED, flush=True)
    sys.exit(0)


def _print_flags(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
    print(json.dumps([option for action in parser._actions for option in action.option_strings]))
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
