"""How old the tokens of a rollout are, counted over a real dock; what is older than the bound ends the run. And who
generates apart, as the job's log says it."""

import pytest
import torch

from mindspeed_rl_plugin.dock import make_docks
from mindspeed_rl_plugin.loop.schedules.admission import Admission
from mindspeed_rl_plugin.loop.schedules.lags import Engines, lags
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages import generate, prompts
from mindspeed_rl_plugin.stages.stage import columns_of, states_of

TABLE = [prompts.SPEC, generate.SPEC]
ONE, TWO = "outside generator rank 1 0a1b", "outside joined engine, process 7 on b 2c3d"
# Of responses behind prompts of two tokens: length of the row, and (first token, version) of each part.
PARTS = [(6, [(2, 4)]), (8, [(2, 2), (5, 4)]), (5, [(2, 0), (3, 2), (4, 4)])]


def test_lags_count_publications_and_no_response_may_exceed_the_bound():
    (dock,) = make_docks(columns_of(TABLE), states_of(TABLE), [(0, 1)])
    dock.open(0, 1, 3)
    ids = [SampleId(0, 0, member) for member in range(3)]
    columns = {
        "version": torch.tensor([parts[0][1] for _, parts in PARTS]),
        "length": torch.tensor([length for length, _ in PARTS]),
        "segments": Ragged.from_rows([torch.tensor(parts) for _, parts in PARTS]),
    }
    dock.put(Rows(tuple(ids), columns))
    # Two optimizer steps a publication; the newest one has the weights after four.
    admission = Admission(1, 2, 9, published=2, versions={0: 0, 1: 2, 2: 4})
    got = lags(dock, ids, admission.lag, 2)
    # By token: 4 of lag 0; 3 of lag 1, 3 of lag 0; one each of lag 2, 1 and 0.
    assert got == pytest.approx({"lag/mean": 1.0, "lag/max": 2.0, "lag/token_mean": 6 / 13, "segments/mean": 2.0})
    with pytest.raises(RuntimeError, match="a response is 2 publications old, but --rl-max-staleness is 1"):
        lags(dock, ids, admission.lag, 1)
    assert lags(dock, ids[:2], admission.lag, 1)["lag/max"] == 1.0


def test_who_joins_and_who_leaves_is_said_once(capsys) -> None:
    here: dict[str, dict[str, float]] = {}
    engines = Engines(lambda: here, print, 90.0)

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
    waits = "the job waits for one to join, at most 90 s (--rl-wait-timeout)"
    assert said()[0].endswith(f"; engines at work: 0: {waits}")
    here |= {ONE: {}, TWO: {}}
    assert said()[0].startswith("[rl] engines joined: generator rank 1, joined engine, process 7 on b; ")


def test_their_number_is_there_in_each_rollout_and_shares_where_they_have_reported(capsys) -> None:
    here: dict[str, dict[str, float]] = {}
    engines = Engines(lambda: here, print, 90.0)
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


def test_who_hangs_is_named_once_and_in_the_error_and_others_get_its_rows(capsys) -> None:
    here, now, reclaimed = {ONE: {"seconds": 1.0}, TWO: {"seconds": 1.0}}, [0.0], []
    engines = Engines(lambda: here, lambda name: reclaimed.append((name, now[0])), 200.0, lambda: now[0])
    engines.look()
    for second in range(200):
        now[0] = float(second)
        here[ONE] = {"seconds": float(second)}
        engines.look()
    named, given = [line for line in capsys.readouterr().out.splitlines() if "no report" in line]
    assert named == "[rl] warning: no report for 60 s from joined engine, process 7 on b"
    assert given.startswith("[rl] warning: no report for 100 s (half of --rl-wait-timeout) from joined engine, proc")
    assert reclaimed == [(TWO, 101.0)]
    assert engines.text() == "engines at work: 2, of which silent: joined engine, process 7 on b"
    here[TWO] = {"seconds": 2.0}
    engines.look()
    assert engines.text() == "engines at work: 2"
    now[0] = 400.0
    here["outside client, process 9 on c 4d5e"] = {}
    engines.look()
    assert reclaimed[1:] == [(ONE, 400.0), (TWO, 400.0)], "it hangs again"
    now[0] = 900.0
    engines.look()
    assert "client" not in engines.text(), "a program that never reports its seconds is not expected to"


def test_rows_that_only_one_engine_may_sample_stay_with_it(capsys) -> None:
    now = [0.0]
    engines = Engines(lambda: {ONE: {"seconds": 1.0}}, None, 40.0, lambda: now[0])
    engines.look()
    now[0] = 21.0
    engines.look()
    assert "warning: no report for 20 s from generator rank 1" in capsys.readouterr().out.splitlines()[-1]
    assert engines.text() == "engines at work: 1, of which silent: generator rank 1"
