"""A process that runs a Megatron script through the runner, with a loop that only watches.

    torchrun ... fake_loop.py EVENTS.jsonl SCRIPT ARGS

The loop's data are pseudo-random sequences from a cursor that is its whole RL state; the script's own
forward step trains on them. Rank 0 writes what it hears to EVENTS.jsonl. SCRIPT may be preceded by
`--host-only`: run it with the CPU stand-ins and without any patch; or by `--alone`: run it without the
runner, because it attaches by itself.
"""

import json
import os
import runpy
import sys
import types

import torch

EVENTS = sys.argv[1]


def record(event, **values):
    if os.environ["RANK"] == "0":
        with open(EVENTS, "a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")


def checksum(model):
    return sum(p.detach().double().abs().sum().item() for chunk in model for p in chunk.parameters())


def moments_of(optimizer):
    return [state for state in optimizer.optimizer.state.values() if "exp_avg" in state]


class Loop:
    def __init__(self):
        self.cursor = 0

    def before_model(self, args):
        record("before_model")

    def on_reference_loaded(self, model):
        record("reference", weights=checksum(model))

    def check_state(self, state, iteration):
        """Any state will do."""

    def load_state_dict(self, state):
        self.cursor = state["cursor"]
        record("state", cursor=self.cursor)

    def on_checkpoint_loaded(self, model, optimizer, start):
        states = (state for part in getattr(optimizer, "chained_optimizers", [optimizer]) for state in moments_of(part))
        moments = sum(state["exp_avg"].double().abs().sum().item() for state in states)
        values = dict(weights=checksum(model), kind=start.kind, iteration=start.iteration, moments=moments)
        record("start", **values, lr=optimizer.param_groups[0]["lr"])

    def state_dict(self):
        return {"cursor": self.cursor, "rows": torch.arange(3)}

    def train_iterator(self):
        """Micro-batches are numbered from 0 in each step, so that a resumed run sees the same ones."""
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.training import get_args

        args = get_args()
        shape = (args.micro_batch_size, args.seq_length + 1)

        def batches():
            step, micro = None, 0
            while True:
                step, micro = self.cursor, micro + 1 if step == self.cursor else 0
                generator = torch.Generator().manual_seed(1000 * step + micro)
                tokens = torch.randint(0, args.vocab_size, shape, generator=generator)
                yield {
                    "tokens": tokens[:, :-1].contiguous(),
                    "labels": tokens[:, 1:].contiguous(),
                    "loss_mask": torch.ones(shape[0], shape[1] - 1),
                    "position_ids": torch.arange(shape[1] - 1).expand(shape[0], -1).contiguous(),
                }

        return RerunDataIterator(batches())

    def train_step(self, original, args, kwargs):
        self.cursor += 1
        result = original(*args, **kwargs)
        losses = {name: value.flatten().tolist() for name, value in (result[0] or {}).items()}
        record("step", cursor=self.cursor, losses=losses, weights=checksum(args[2]), grad_norm=float(result[4] or 0))
        return result


def install():
    loop = Loop()
    module = types.ModuleType("mindspeed_rl_plugin.loop.run")
    module.current = lambda: loop
    sys.modules[module.__name__] = module
    import mindspeed_rl_plugin.loop

    mindspeed_rl_plugin.loop.run = module
    from mindspeed_rl_plugin.config import RLConfig

    inputs = types.ModuleType("mindspeed_rl_plugin.launch.read_inputs")
    inputs.read_inputs = lambda args: types.SimpleNamespace(vocab=1, config=RLConfig.from_args(args))
    sys.modules[inputs.__name__] = inputs


def main():
    argv = sys.argv[2:]
    if argv[0] in ("--host-only", "--alone"):
        if argv[0] == "--host-only":
            from mindspeed_rl_plugin import host

            host.activate_if_needed()
        else:
            install()
        sys.argv = argv[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(argv[1]))
        runpy.run_path(argv[1], run_name="__main__")
        return
    install()
    from mindspeed_rl_plugin.tools.rehearse import absent_modules

    absent_modules.install()
    from mindspeed_rl_plugin.__main__ import main as run

    sys.exit(run(argv))


if __name__ == "__main__":
    main()
