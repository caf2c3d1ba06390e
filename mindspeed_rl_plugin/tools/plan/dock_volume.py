"""`python -m mindspeed_rl_plugin plan --dock`: what the sample flow of a rollout moves, without any machine.

Without `--dock` it plans a reshard (planning/command.py).
"""

from __future__ import annotations

import argparse

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.dock.volume import Load, central_gib, packed_gib, told_elsewhere, warehouse_gib
from mindspeed_rl_plugin.stages import columns
from mindspeed_rl_plugin.tools.plan import command

# Table 1 of the paper: G, N, PL, n, SL, M, with B = 4.
TABLE_1 = (
    (256, 8, 2048, 5, 8192, 3),
    (256, 16, 2048, 5, 16384, 3),
    (1024, 16, 2048, 5, 16384, 3),
    (1024, 32, 4096, 8, 32768, 5),
    (4096, 32, 4096, 8, 32768, 5),
    (8192, 64, 4096, 8, 65536, 5),
)
SIZES = ("G", "N", "PL", "n", "SL", "M")
LEGEND = """\
Per rollout: G prompts, N responses of each, PL and SL tokens of the longest prompt and response, n items of SL tokens
and M single numbers that a sample carries from stage to stage. Equations, Table 1: MindSpeed RL (arXiv 2507.19017)."""
HEAD = (*SIZES, "Eq. 2 GiB", "100 MB/s", "1 GB/s", "Eq. 4 GiB", "here GiB", "between GiB", "records GiB", "1 GB/s")


def main(argv: list[str]) -> int:
    """Print the table; returns the exit status. Without `--dock` the plan is that of a reshard."""
    if not any(word.startswith("--dock") for word in argv):
        return command.main(argv)
    parser = argparse.ArgumentParser(prog="python -m mindspeed_rl_plugin plan", description=__doc__)
    parser.add_argument(
        "--dock",
        nargs="*",
        type=int,
        metavar="N",
        required=True,
        help="G N PL SL, and n M if they differ from 5 3; without numbers: the rows of the paper's Table 1",
    )
    parser.add_argument("--nodes", type=int, default=16, help="machines S, one warehouse each (default 16)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks a machine, among which controllers lie (default 8)")
    parser.add_argument("--controllers", type=int, default=6, help="worker states C of Eq. 4 (default 6)")
    parser.add_argument("--fill", type=float, default=1.0, help="mean length over the longest (default 1: no padding)")
    args = parser.parse_args(argv)
    if args.dock and len(args.dock) not in (4, 6):
        parser.error(f"--dock takes G N PL SL [n M], got {len(args.dock)} numbers")
    if args.dock and min(args.dock) < 1:
        parser.error(f"--dock: every number is at least 1, got {min(args.dock)}")
    if min(args.nodes, args.ranks) < 1 or not 0 < args.fill <= 1:
        got = f"{args.nodes}, {args.ranks} and {args.fill}"
        parser.error(f"--nodes and --ranks are at least 1 and --fill in (0, 1], got {got}")
    loads = [Load(g, n, p, s, i, m, args.fill) for g, n, p, i, s, m in TABLE_1]
    if args.dock:
        g, n, p, s, *rest = args.dock
        loads = [Load(g, n, p, s, *(rest or (5, 3)), args.fill)]
    rows = [_row(load, args.nodes, args.ranks, args.controllers) for load in loads]
    widths = [max(len(r[i]) for r in [HEAD, *rows]) for i in range(len(HEAD))]
    print(f"S = {args.nodes} machines, C = {args.controllers} controllers; seconds at the rate between two machines")
    for row in [HEAD, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(LEGEND)
    print("Eq. 2: everything through one buffer. Eq. 4: each of S warehouses. Both padded, and read 3 times.")
    print("here: GRPO with a reference, unpadded, of all machines: written once, read by every state that declares it,")
    print("more often than the equations' three times, in the memory of the machine where a row is drawn and trained.")
    print("between: prompts, which one rank puts, and the numbers that one rank logs, where pipelines lie within")
    print("machines and batches are not chosen or balanced by tokens (docs/dock.md, Homes, says what those add).")
    print("records: what controllers on other machines are told of every cell and of every row that is done,")
    print(f"with {args.ranks} ranks a machine; the seconds are of both,")
    print("over all machines. Not counted: heads of messages, and the places in the answer to a lease (28 bytes a row")
    print("and 16 a cell).")
    return 0


def _row(load: Load, nodes: int, ranks: int, controllers: int) -> tuple[str, ...]:
    central, each = central_gib(load), warehouse_gib(load, nodes, controllers)
    states = columns.grpo_states(resolve(AlgorithmConfig(algorithm="grpo")))
    told = told_elsewhere(len(states), [rank // ranks for rank in range(nodes * ranks)])
    how = {"anywhere": ("measure",), "version_column": "version", "told": told}
    moved = packed_gib(load, nodes, columns.grpo_columns(1), states, **how)
    sizes = (load.groups, load.members, load.prompt, load.items, load.response, load.scalars)
    return (
        *(_short(n) for n in sizes),
        f"{central:.2f}",
        f"{central * 1024 / 100:.1f}",
        f"{central:.2f}",
        f"{each:.3f}",
        f"{moved.written + moved.read:.2f}",
        f"{moved.remote:.4f}",
        f"{moved.records:.4f}",
        f"{moved.remote + moved.records:.4f}",
    )


def _short(number: int) -> str:
    return f"{number // 1024}K" if number >= 1024 and number % 1024 == 0 else str(number)
