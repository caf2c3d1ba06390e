"""`plan --dock` explains its letters, and whose table it prints."""

import pytest
import torch

from mindspeed_rl_plugin.dock import ColumnSpec, StateSpec
from mindspeed_rl_plugin.tools.plan import plan
from mindspeed_rl_plugin.tools.plan.dock_volume import Load, packed_gib, padded_gib

pytestmark = pytest.mark.quick

# Table 1 of the paper as printed: G, N, PL, n, SL, M, then TCV in GB and seconds at 100 MB/s and 1 GB/s.
TABLE_1 = """
256 8 2K 5 8K 3 0.96 9.92 0.97
256 16 2K 5 16K 3 3.81 39.0 3.81
1K 16 2K 5 16K 3 15.2 156.1 15.2
1K 32 4K 8 32K 5 97.0 993.3 97.0
4K 32 4K 8 32K 5 388.0 3.9K 388.0
8K 64 4K 8 64K 5 3.1K 31K 3.1K
"""


def number(word: str) -> float:
    """3.9K as 3900: the paper's thousands of seconds and gigabytes."""
    return float(word.removesuffix("K")) * (1000 if word.endswith("K") else 1)


def test_table_1_of_the_paper_comes_out(capsys):
    """Its sizes word for word, its figures as it rounds them, every letter explained; and for this dock less between
    machines than Eq. 4."""
    assert plan.main(["--dock", "--nodes", "16"]) == 0
    out = capsys.readouterr().out
    assert "MindSpeed RL (arXiv 2507.19017)" in out
    assert all(f" {letter} " in out[out.index("Per rollout:") :] for letter in ("G", "N", "PL", "SL", "n", "M"))
    rows = [line.split() for line in out.splitlines()[2:8]]
    for row, printed in zip(rows, TABLE_1.split("\n")[1:-1], strict=True):
        wanted = printed.split()
        assert row[:6] == wanted[:6]
        assert [number(w) for w in row[6:9]] == [pytest.approx(number(w), rel=0.025) for w in wanted[6:]]
        eq4, here, between, records, seconds = (float(w) for w in row[9:])
        assert eq4 == pytest.approx(number(row[6]) / 16, rel=0.02, abs=1e-3)
        assert between < eq4 / 20 and here < 3 * number(row[6])
        assert records > between and seconds == pytest.approx(between + records, abs=2e-4)


def test_a_load_of_ones_own(capsys):
    """`--dock G N PL SL n M`: Eq. 2 and 4 as the paper writes them."""
    assert plan.main(["--dock", "64", "4", "100", "900", "6", "2", "--nodes", "4"]) == 0
    row = capsys.readouterr().out.splitlines()[2].split()
    assert row[:6] == ["64", "4", "100", "6", "900", "2"]
    entries = 2 * 100 + 3 * 6 * 900
    eq2, eq4 = (64 * 4 * 4 * (entries + 8 * n * 2) / 1024**3 for n in (1, 7))
    assert padded_gib(Load(64, 4, 100, 900, 6, 2)) == pytest.approx(eq2)
    assert (float(row[6]), float(row[9])) == (pytest.approx(eq2, abs=0.005), pytest.approx(eq4 / 4, abs=5e-4))


def test_one_machine_tells_no_other(capsys):
    """Records between machines need machines; more ranks than states on each gather the controllers on fewer."""
    records = []
    for how in (["--nodes", "1"], ["--nodes", "2", "--ranks", "1"], ["--nodes", "8", "--ranks", "1"]):
        assert plan.main(["--dock", "1024", "8", "100", "900", *how]) == 0
        records.append(float(capsys.readouterr().out.splitlines()[2].split()[-2]))
    assert records[0] == 0 < records[1] < records[2]
    with pytest.raises(SystemExit):
        plan.main(["--dock", "--ranks", "0"])
    assert "--nodes and --ranks must be at least 1" in capsys.readouterr().err


def test_the_docks_own_volume_is_what_its_columns_hold() -> None:
    columns = [ColumnSpec(name, torch.int32, "token", ragged=True) for name in ("tokens", "unused")]
    columns.append(ColumnSpec("prompt", torch.int32, "group", ragged=True))
    columns.append(ColumnSpec("score", torch.float32, "sample", ragged=False))
    states = [StateSpec("work", ("prompt", "tokens"), ("score",)), StateSpec("log", ("score",), ())]
    written, read, between = packed_gib(Load(4, 2, 100, 300, fill=0.5), 4, columns, states, anywhere="log")
    tokens, score, prompt = 8 * 4 * 200, 8 * 4, 4 * 4 * 50
    assert written * 2**30 == pytest.approx(tokens + score + prompt)
    assert read * 2**30 == pytest.approx(tokens + prompt + score)
    assert between * 2**30 == pytest.approx(0.75 * (prompt + score))
