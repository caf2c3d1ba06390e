"""Run by test_export_processes.py under torchrun: an imported model in Megatron, trained, its log-probs kept.

Runs examples/pretrain_gpt.py as it is, with the arguments given after a file: log-probs of fixed rows go there, before
and after training.
"""

import runpy
import sys

from mindspeed_rl_plugin.host import activate_if_needed

activate_if_needed()

import torch  # noqa: E402
from megatron.training import get_args, training  # noqa: E402

from mindspeed_rl_plugin.forward import ForwardSettings  # noqa: E402
from mindspeed_rl_plugin.forward.pipeline import compute_logps  # noqa: E402
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId  # noqa: E402


def rows(vocab: int, length: int) -> Rows:
    """Two rows of tokens, the same everywhere."""
    make = torch.Generator().manual_seed(7)
    tokens = [torch.randint(0, vocab, (length - 5 * i,), generator=make, dtype=torch.int32) for i in range(2)]
    return Rows(tuple(SampleId(0, i, 0) for i in range(2)), {"tokens": Ragged.from_rows(tokens)})


def main() -> None:
    out, script, *argv = sys.argv[1:]
    sys.argv = [script, *argv]
    train = training.train

    kept = []

    def trained(*positional, **named):
        model = named["model"] if "model" in named else next(a for a in positional if isinstance(a, list))
        args = get_args()
        settings = ForwardSettings.from_args(args, vocab_size=args.vocab_size, temperature=1.0)

        def keep():
            scored = compute_logps(model, [rows(args.vocab_size, args.seq_length)], settings)
            if scored is not None:
                kept.append([scored[0].row(i) for i in range(2)])

        keep()
        done = train(*positional, **named)
        keep()
        return done

    training.train = trained
    runpy.run_path(script, run_name="__main__")
    if kept:
        torch.save(kept, out)


if __name__ == "__main__":
    main()
