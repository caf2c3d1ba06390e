"""Who generates apart, as the job's log says it, and their metrics."""

from __future__ import annotations

from mindspeed_rl_plugin.loop.schedules.lags import Engines

ONE, TWO = "outside generator rank 1 0a1b", "outside joined engine, process 7 on b 2c3d"


def test_who_joins_and_who_leaves_is_said_once(capsys) -> None:
    here: dict[str, dict[str, float]] = {}
    engines = Engines(lambda: here)

    def said() -> list[str]:
        engines.look()
        return capsys.readouterr().out.splitlines()

    assert said() == []
    here |= {ONE: {}}
    assert said() == ["[rl] engine joined: generator rank 1; engines at work: 1"] and said() == []
    here |= {TWO: {}}
    assert said() == ["[rl] engine joined: joined engine, process 7 on b; engines at work: 2"]
    del here[ONE]
    left = "[rl] engine left: generator rank 1; unfinished rows are given out again; engines at work: 1"
    assert said() == [left]
    here.clear()
    assert said()[0].endswith("; engines at work: 0: the job waits for one to join")
    here |= {ONE: {}, TWO: {}}
    assert said()[0].startswith("[rl] engines joined: generator rank 1, joined engine, process 7 on b; ")


def test_their_number_is_there_in_each_rollout_and_shares_where_they_have_reported(capsys) -> None:
    here: dict[str, dict[str, float]] = {}
    engines = Engines(lambda: here)
    assert engines.metrics() == {"engines": 0.0}
    here[ONE] = {"seconds": 4.0, "back-pressure": 1.0, "tokens": 40.0, "responses": 4.0}
    here[TWO] = {}
    assert engines.metrics() == {
        "engines": 2.0,
        "idle/engines_back_pressure": 0.25,
        "idle/engines_version": 0.0,
        "engines/tokens_per_second": 10.0,
        "engines/length_mean": 10.0,
    }
    assert engines.metrics() == {"engines": 2.0}, "nothing is reported since"
    here[ONE] = {"seconds": 6.0, "back-pressure": 1.0, "tokens": 60.0, "responses": 6.0}
    assert engines.metrics()["engines/tokens_per_second"] == 10.0, "the time since the last report counts"
    del here[TWO]
    assert engines.metrics() == {"engines": 1.0} and "engine left: joined engine, process 7" in capsys.readouterr().out
