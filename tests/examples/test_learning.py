"""Every preset learns: what `examples/learning.py` runs and writes down, three seeds, and the file that it writes."""

import json
import re
import statistics
from pathlib import Path

import pytest
from commands import imported

from mindspeed_rl_plugin.algorithms.presets import ALGORITHMS

ROOT = Path(__file__).parents[2]
learning = imported(ROOT / "examples" / "learning.py")
TABLE = ROOT / "docs" / "learning-results.md"
QUICKSTART = ROOT / "examples" / "quickstart.sh"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("learning")


SEEDS = [0, 1, 2]
LAGGED = [f"async {k}" for k in (0, 1, 2, 4)]


def results():
    """The runs of the table in the docs."""
    return [learning.Outcome(**json.loads(line)) for line in TABLE.with_suffix(".jsonl").read_text().splitlines()]


def as_the_quickstart(row: "learning.Outcome") -> bool:
    """Whether a run comes from where the quickstart says to where it says."""
    before, after = re.search(r"--before-at-most ([\d.]+) --after-at-least ([\d.]+)", QUICKSTART.read_text()).groups()
    return row.before <= float(before) and row.after >= float(after)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("preset", "schedule"), [*((preset, "sync") for preset in learning.PRESETS), *(("grpo", k) for k in LAGGED)]
)
def test_a_preset_learns(out, preset, schedule, seed):
    """The first run of a seed pretrains, the others take the same checkpoint."""
    base = learning.pretrained(out, seed)
    place = out / f"seed{seed}" / preset / schedule
    row = learning.run(preset, seed, base, place, learning.ITERATIONS, schedule)
    assert row.iterations == learning.ITERATIONS and row.learned, row
    assert schedule not in LAGGED or as_the_quickstart(row), row
    assert abs(row.before) < 1e-4 if preset == "dpo" else 0.4 < row.before < 0.6, "the start is the careless pupil"


def test_every_preset_has_its_run():
    assert list(learning.PRESETS) == list(ALGORITHMS)


def test_rows_go_into_the_table_in_the_place_of_older_ones(tmp_path):
    table = tmp_path / "results.md"
    table.write_text(f"above\n{learning.BEGIN}\n{learning.END}\nbelow\n")
    first = [learning.Outcome("grpo", 1, "accuracy", 0.5, 0.75, 16), learning.Outcome("dpo", 0, "margin", 0.0, 2.0, 16)]
    learning.record(first, table)
    learning.record([learning.Outcome("grpo", 1, "accuracy", 0.5, 0.8, 16)], table)
    learning.record([learning.Outcome("ppo", 0, "accuracy", 0.5, 0.55, 16)], table)
    rows = [line for line in table.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| ppo | sync | 0 | accuracy | 0.500 | 0.550 | 16 |",
        "| grpo | sync | 1 | accuracy | 0.500 | 0.800 | 16 |",
        "| dpo | sync | 0 | margin | 0.000 | 2.000 | 16 |",
    ]
    assert table.read_text().startswith("above\n") and table.read_text().endswith("\nbelow\n")
    assert first[1].learned and not learning.Outcome("ppo", 0, "accuracy", 0.5, 0.55, 16).learned
    (tmp_path / "plain.md").write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        learning.record(first, tmp_path / "plain.md")


def test_the_table_in_the_docs_is_made_of_its_rows_and_each_has_learned():
    rows, text = results(), TABLE.read_text()
    assert text.split(learning.BEGIN)[1].split(learning.END)[0].strip() == learning.render(rows).strip()
    assert rows and all(row.learned for row in rows), "what has not been run or has not learned is not a result"


def test_runs_on_older_weights_learn_what_synchronous_ones_do():
    """From the same number of responses: means within two standard errors of the synchronous one, which is that of its
    three seeds; and each run comes from where the quickstart says to where it says."""
    accuracy = {}
    for schedule in ("sync", *LAGGED):
        runs = [row for row in results() if (row.preset, row.schedule) == ("grpo", schedule)]
        assert [row.seed for row in runs] == SEEDS and {row.iterations for row in runs} == {learning.ITERATIONS}
        assert all(map(as_the_quickstart, runs)), runs
        accuracy[schedule] = [row.after for row in runs]
    sync, *lagged = means = [statistics.fmean(runs) for runs in accuracy.values()]
    error = statistics.stdev(accuracy["sync"]) / len(SEEDS) ** 0.5
    assert all(abs(mean - sync) <= 2 * error for mean in lagged), (means, error)
    said = "{:.3f} with `sync`, {:.3f}, {:.3f}, {:.3f} and {:.3f} with K = 0, 1, 2 and 4".format(*means)
    assert said in TABLE.read_text()


def test_pairs_are_the_numbers_that_carry(tmp_path):
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text("".join(json.dumps({"prompt": f"{n}*2=", "answer": str(2 * n)}) + "\n" for n in (1234, 1235)))
    learning.write_pairs(numbers, tmp_path / "pairs.jsonl")
    assert [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()] == [
        {"prompt": "1235*2=", "chosen": "2470", "rejected": "2460"}
    ]
