"""`replay` without a job: what it refuses before any rank starts, the command that it starts, and what it compares."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindspeed_rl_plugin.monitor.dump import DUMP_FIELDS
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
        pq.write_table(pa.table(dict.fromkeys(DUMP_FIELDS, [done])), folder / "dump" / f"rollout-00000{done}.parquet")
    (folder / "dump" / "dumps-of.json").write_text('{"id": "abc"}')
    launch = {"words": WORDS, "directory": "/", "ranks": 2}
    about(folder, id="abc", launch=launch, dump_dir=str(folder / "dump"), reference="/gone/iter_0000009")
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
    assert rows == [dict.fromkeys(DUMP_FIELDS, 2)], "of the rollout that began after 2 iterations"


@pytest.mark.parametrize(
    ("iteration", "broken", "message"),
    [
        (4, lambda save: (save / "rl" / "run.json").unlink(), "has no run.json: give the --save of a job"),
        (4, lambda save: about(save, launch=None), "run.json has no `launch`.*an older version wrote it"),
        (9, lambda save: None, "the job has no update in iteration 9: it has iterations 1 to 4"),
        (2, lambda save: None, "no checkpoint before iteration 2, and /gone/iter_0000009, .* is gone: put it back"),
        (4, lambda save: about(save, dump_dir=None), "wrote no dumps.*: give it --rl-dump-dir DIR"),
        (4, lambda save: about(save, id="other"), "holds the rollouts of another run"),
        (
            3,
            lambda save: (save / "dump" / "rollout-000002.parquet").unlink(),
            "2.parquet, .* cannot be read: .*No such file",
        ),
        (
            3,
            lambda save: (save / "dump" / "rollout-000002.parquet").write_text("x"),
            "be read.*; put it back, or give --dumps",
        ),
        (
            3,
            lambda save: dump_of(save, *DUMP_FIELDS[:-3]),
            "no column length, valid, weights_digest; an older",
        ),
        (3, lambda save: dump_of(save, "turns", *DUMP_FIELDS), "has no column environment_failed; an older version"),
    ],
)
def test_what_cannot_be_replayed_is_said_before_a_rank_starts(save, capsys, iteration, broken, message):
    broken(save)
    assert repeat.main([str(save), "--iteration", str(iteration)]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_dumps_of_an_earlier_start_are_found(save):
    (save / "dump").rename(save / "older")
    about(save, dump_dir=str(save / "newer"))
    assert repeat.recorded(save, save / "rl", 4, str(save / "older"))[2] == 3


def words_of(nearest: int, flags: list[str], *more: str, reference: str | None = None) -> list[str]:
    """Script and flags of a replay of iteration 7 on three ranks."""
    described = {"launch": {"words": [*WORDS, *more]}, "reference": reference}
    given = repeat.command(described, nearest, 3, 7, flags, "/view")
    assert "--nproc-per-node=3" in given
    return given[given.index("mindspeed_rl_plugin") + 1 :]


def test_the_command_writes_to_no_place_of_the_job(capsys):
    words = words_of(4, ["--rl-clip-high", "0.3"])
    assert words[:6] == ["train.py", "--save", "S", "--rl-reward", "math", "exact"]
    assert words[6:12] == ["--save", "/view", "--rl-run-dir", "/view/rl", "--exit-interval", "7"]
    assert words[-2:] == ["--rl-clip-high", "0.3"] and not capsys.readouterr().err, "the last one counts"
    flags = ["--rl-reward", "exact", "--no-rl-ignore-eos", "--rl-overlong-buffer", "9", "--rl-temperature", "0.5"]
    words_of(4, [*flags, "--rl-kl-reward-coef", "1", "--lr-warmup-iters", "3"])
    said = capsys.readouterr().err
    assert "recorded one: --rl-reward, --no-rl-ignore-eos, --rl-overlong-buffer\n" in said


@pytest.mark.parametrize(
    ("reference", "flags"),
    [
        (None, []),
        ("/there/release", ["--load", "/there"]),
        ("/there/iter_0000500", ["--load", "/there", "--ckpt-step", "500"]),
    ],
)
def test_without_a_checkpoint_it_starts_from_what_the_job_began_with(reference, flags):
    words = words_of(0, [], "--load", "S", "--ckpt-step=3", reference=reference)
    assert words[words.index("exact") + 1 : words.index("/view") - 1] == flags
    assert words_of(4, [], "--load", "S")[6:8] == ["--load", "S"]


def test_a_schedule_of_the_user_has_an_effect(capsys):
    words = words_of(4, ["--lr", "1e-5"], repeat.SAVED_SCHEDULE)
    assert repeat.NEW_SCHEDULE in words and repeat.SAVED_SCHEDULE not in words
    assert capsys.readouterr().err == f"with {repeat.NEW_SCHEDULE}: without it --lr is refused or has no effect\n"
    assert repeat.NEW_SCHEDULE not in words_of(4, ["--lr", "1e-5", repeat.SAVED_SCHEDULE]), "as the user asked"


def test_numbers_that_differ_come_first():
    before = {"iteration": 3, "loss": 1.0, "reward/mean": 0.5, "lr": 1e-3, "seconds/update": 1.0, "kl/ref": None}
    again = {**before, "loss": 1.00005, "reward/mean": 0.6, "seconds/update": 2.0}
    head, _, *lines = compared.numbers(before, again, 0.0)
    assert head == "2 of 4 numbers are equal; the first that differs is reward/mean"
    assert [line.split()[0] for line in lines] == ["reward/mean", "loss", "kl/ref", "lr"]
    assert next(compared.numbers(before, {**before, "lr": None}, 0.0)).endswith("the first that differs is lr"), "NaN"
    assert next(compared.numbers(before, before, 0.0)) == "4 of 4 numbers are equal bit for bit"
    assert next(compared.numbers(before, {**before, "loss": 1.00005}, 1e-4)).endswith("equal within 0.0001")


@pytest.mark.parametrize(
    ("name", "before", "now", "same"),
    [
        ("lr", 1e-6, 1e-5, False),
        ("critic/lr", 1e-6, 1.00001e-6, False),
        ("trained/tokens", 20000.0, 20001.0, False),
        ("response/length_mean", 20000.0, 20000.0 * (1 + 1e-15), True),
        ("kl/ref", 1e-5, 2e-5, False),
        ("kl/ref", 1e-9, 2e-7, True),
        ("loss", 0.5, 0.50004, True),
        ("grad_norm", 0.01, 0.0101, False),
    ],
)
def test_numbers_of_another_layout_differ_by_rounding_alone(name, before, now, same):
    assert compared.differ_by_name(name, before, now, 1e-4) != same
    assert compared.differ_by_name(name, before, now, 0.0)


def test_the_wrong_token_is_named_not_the_larger_gaps_behind_it():
    """Nor tokens that older weights sampled. A row with another advantage comes before it, and one whose log-probs are
    not those of the dump."""
    noise, wrong, stale = [1e-7, -1e-7, 2e-7, 0.0], [0.0, 0.1, 3.0, 0.2], [0.5, -0.5, 0.4, 0.6]

    def named(*rows: tuple[list[float], int, float, float]) -> tuple[list[str], list[str]]:
        tokens, dump = [], []
        for member, (old, version, advantage, off) in enumerate(rows):
            row = {"epoch": 1, "group": 1, "member": member, "reward": 1.0, "reward_parts": [0.5, 0.5]}
            logps = {
                "logp_old": [9.0] * 4 + [off if logp is None else logp + off for logp in old],
                "advantages": [0.0] * 8,
            }
            dump.append({**row, **logps, "segments": [[0, 2], [4, version]]})
            token = {"id": [1, 1, member], "text": "a", "engine": 0.0, "advantage": advantage}
            tokens += [{**token, "old": logp, "now": logp, "place": 4 + i} for i, logp in enumerate(old)]
        lines = compared.report({}, {}, tokens, dump, 0.0, None).split("\n")
        at = next(i for i, line in enumerate(lines) if line.startswith("row "))
        return [line.split()[0] for line in lines[at - 3 : at]], [",".join(lines[at + 1].split()[:4:3])]

    usual = (noise, 7, 0.0, 0.0), (wrong, 7, 0.0, 0.0), (stale, 6, 0.0, 0.0)
    assert named(*usual) == (["3", "12", "3"], ["1,1,1,5"])
    assert named(*usual, (noise, 7, 0.0, 1e-3)) == (["4", "12", "3"], ["1,1,3,4"])
    assert named(*usual, (noise, 7, 0.1, 0.0)) == (["3", "16", "3"], ["1,1,3,6"])
    assert named(*usual, ([None, *noise[1:]], 7, 0.0, 0.0)) == (["4", "15", "4"], ["1,1,3,4"]), "NaN"
