"""What golden runs compare, and that they see a change of the last bit."""

import golden
import pytest

from mindspeed_rl_plugin.monitor.names import METRICS

FORMER = (
    '{"kind": "eval", "iteration": 0, "time": 1.5, "eval/accuracy": 0.25}\n'
    '{"kind": "train", "iteration": 1, "loss": 0.1, "weights/digest": "e86f", "seconds/update": 0.5, "version": 0}\n'
)


def test_all_but_times_rates_and_the_dock_is_compared():
    ignored = {name for name in METRICS if golden.IGNORED.fullmatch(name)}
    rates = {"tokens_per_second", "tokens_per_second_total"}
    others = {name for name in ignored - rates if not name.startswith(("dock/", "idle/"))}
    times = {"seconds/iteration", "reward/call_seconds", "reward/worker_seconds", "episode/seconds"}
    times |= {"reshard/transfer_seconds", "weights/pull_seconds", "weights/pause_seconds"}
    reported = {"engines/tokens_per_second", "engines/length_mean", "weights/bytes_pulled"}
    assert others == times | reported | {"reshard/temporary_bytes"}


@pytest.mark.parametrize(
    ("was", "now", "lines", "added"),
    [
        ('"seconds/update": 0.5', '"seconds/update": 0.7', [], []),
        ('"time": 1.5', '"time": 2.5', [], []),
        ('"loss": 0.1', '"loss": 0.10000000000000002', ["train 1 loss: 0.1 -> 0.10000000000000002"], []),
        ('"weights/digest": "e86f"', '"weights/digest": "e86e"', ["train 1 weights/digest: e86f -> e86e"], []),
        ('"version": 0', '"version": 0.0', ["train 1 version: 0 -> 0.0"], []),
        ('"loss": 0.1, ', "", ["train 1 loss: 0.1 -> not there"], []),
        ('"eval/accuracy": 0.25', '"eval/accuracy": 0.25, "eval/reward_mean": 0.5', [], ["eval/reward_mean"]),
        ('"eval/accuracy": 0.25', '"eval/accuracy": 0.25, "loss": 0.5', ["eval 0 loss: not there -> 0.5"], []),
    ],
)
def test_a_difference_is_any_other_number(tmp_path, was, now, lines, added):
    for name, text in (("former", FORMER), ("current", FORMER.replace(was, now))):
        (tmp_path / name).write_text(text)
    result = golden.Differences.of(golden.read(tmp_path / "former"), golden.read(tmp_path / "current"))
    assert (result.lines, result.added) == (lines, added)
    assert (result.values, result.iterations) == (4, 1)
