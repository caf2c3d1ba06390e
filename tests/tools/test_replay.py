"""`replay` without a job: what it refuses before any rank starts, the command that it starts, and what it compares."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindspeed_rl_plugin.tools.replay import compared, repeat

pytestmark = pytest.mark.quick
WORDS = ["train.py", "--save", "S", "--rl-dump-dir", "D", "--wandb-project=x", "--rl-reward", "math", "exact"]


@pytest.fixture
def save(tmp_path, monkeypatch):
    """A job of four iterations in rollouts of two, with checkpoints after 2 and 3; nothing may be started."""
    monkeypatch.setattr(repeat, "run", lambda *_, **__: pytest.fail("a rank was started"))
    folder = tmp_path / "save"
    for name in ("rl", "dump", "iter_0000002", "iter_0000003"):
        (folder / name).mkdir(parents=True)
    for number in (2, 3):
        (folder / f"iter_000000{number}" / "rl_state.pt").touch()
    lines = [{"iteration": n, "loss": 0.5, **({"groups/dropped": 0.0} if n % 2 else {})} for n in range(1, 5)]
    (folder / "rl" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for done in (0, 2):
        pq.write_table(
            pa.table(dict.fromkeys(repeat.REPLAYED, [done])), folder / "dump" / f"rollout-00000{done}.parquet"
        )
    (folder / "dump" / "dumps-of.json").write_text('{"id": "abc"}')
    launch = {"words": WORDS, "directory": "/", "ranks": 2}
    about(folder, id="abc", launch=launch, dump_dir=str(folder / "dump"))
    return folder


def about(save: Path, **changed: object) -> None:
    path = save / "rl" / "run.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in {**old, **changed}.items() if v is not None}))


def dump_of(save: Path, *columns: str) -> None:
    pq.write_table(pa.table(dict.fromkeys(columns, [1])), save / "dump" / "rollout-000002.parquet")


def test_the_nearest_checkpoint_and_the_dump_of_the_rollout(save):
    described, line, checkpoint, rows = repeat.recorded(save, save / "rl", 4)
    assert (described["id"], line["iteration"], checkpoint) == ("abc", 4, 3)
    assert rows == [dict.fromkeys(repeat.REPLAYED, 2)], "of the rollout that began after 2 iterations"


@pytest.mark.parametrize(
    ("iteration", "broken", "message"),
    [
        (4, lambda save: (save / "rl" / "run.json").unlink(), "has no run.json: give the --save of a job"),
        (4, lambda save: about(save, launch=None), "run.json has no `launch`.*an older version wrote it"),
        (9, lambda save: None, "the job has no update in iteration 9: its metrics end at 4"),
        (2, lambda save: None, r"has no checkpoint before iteration 2, only \[2, 3\]: give a later iteration"),
        (4, lambda save: [*map(shutil.rmtree, save.glob("iter_*"))], r"no checkpoint before iteration 4, only \[\]"),
        (4, lambda save: about(save, dump_dir=None), "wrote no dumps.*: give it --rl-dump-dir DIR"),
        (4, lambda save: about(save, id="other"), "holds the rollouts of another run"),
        (3, lambda save: (save / "dump" / "rollout-000002.parquet").unlink(), "rollout-000002.parquet.* is missing"),
        (3, lambda save: dump_of(save, "valid", "length"), "has no column graded, weights_digest; an older version"),
        (3, lambda save: dump_of(save, "turns", *repeat.REPLAYED), "has responses of several turns"),
    ],
)
def test_what_cannot_be_replayed_is_said_before_a_rank_starts(save, capsys, iteration, broken, message):
    broken(save)
    assert repeat.main([str(save), "--iteration", str(iteration)]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_the_command_writes_to_no_place_of_the_job():
    given = repeat.command(WORDS, "/view", 3, 7, ["--rl-clip-high", "0.3"])
    words = given[given.index("mindspeed_rl_plugin") + 1 :]
    assert given[given.index("--nproc-per-node") + 1] == "3"
    assert words[:6] == ["train.py", "--save", "S", "--rl-reward", "math", "exact"]
    assert words[6:12] == ["--save", "/view", "--rl-run-dir", "/view/rl", "--exit-interval", "7"]
    assert words[-2:] == ["--rl-clip-high", "0.3"], "the last one counts"


def test_numbers_that_differ_come_first():
    before = {"iteration": 3, "loss": 1.0, "reward/mean": 0.5, "lr": 1e-3, "seconds/update": 1.0, "kl/ref": None}
    again = {**before, "loss": 1.00005, "reward/mean": 0.6, "seconds/update": 2.0}
    head, _, *lines = compared.numbers(before, again, 0.0)
    assert head == "2 of 4 numbers are the recorded ones, the first other one is reward/mean"
    assert [line.split()[0] for line in lines] == ["reward/mean", "loss", "kl/ref", "lr"]
    assert next(compared.numbers(before, {**before, "lr": None}, 0.0)).endswith("the first other one is lr"), "NaN"
    assert next(compared.numbers(before, before, 0.0)) == "4 of 4 numbers are the recorded ones, bit for bit"
    assert next(compared.numbers(before, {**before, "loss": 1.00005}, 1e-4)).endswith("ones, within 0.0001")


def test_the_wrong_token_is_named_not_the_larger_gaps_behind_it():
    noise, wrong = [1e-7, -1e-7, 2e-7, 0.0], [0.0, 0.1, 3.0, 0.2]
    same = {"engine": noise, "text": "abcd", "place": range(4), "advantage": noise}
    olds = enumerate(([0.0] * 4, wrong, noise))
    rows = [{**same, "id": [1, 0, m], "old": old, "now": old, "dumped": {"logp_old": old}} for m, old in olds]
    head, _, *lines = compared.tokens(rows)
    assert head == "worst tokens: 3 of 12 have a gap above 1e-06 nats"
    assert [line.split()[:3] for line in lines[:2]] == [["1,0,1", "1", "'b'"], ["1,0,0", "2", "'c'"]]
