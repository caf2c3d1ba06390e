"""The bookkeeping of agents, over a process that follows a script (stub_rollouts.py). Over agents it is tested in
tests/gateway, over verifiers in test_verifiers.py."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.episodes import agents
from mindspeed_rl_plugin.episodes.agents import AgentEnvironments
from mindspeed_rl_plugin.episodes.environments import AgentRequest, EpisodeError, Reply, Turn
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
from mindspeed_rl_plugin.episodes.verifiers_bridge import interpreter, verifiers_program
from mindspeed_rl_plugin.rows import SampleId

ONE, TWO, THREE = (SampleId(0, 0, member) for member in range(3))
EVALUATED = SampleId(-1, 0, 0)
MESSAGES = [{"role": "user", "content": "?"}]
ASKS, DONE, ENDED = {"request": {"calls": [0], "messages": MESSAGES}}, {"done": True, "reward": 0.5}, {"ended": True}
SPOKEN, ASKED = Turn((7, 8), "ab", before=3), AgentRequest([0], MESSAGES)


@pytest.fixture
def made(monkeypatch):
    """Makes the environments; closes them."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    program = replace(verifiers_program(None), main="stub_rollouts:main", patience=3.0)
    all_made = []

    def make(setup="any", timeout=30.0, together=64, workers=1, **more):
        all_made.append(AgentEnvironments(program, setup, "it", workers, timeout, 600.0, together, **more))
        return all_made[-1]

    yield make
    for environments in all_made:
        environments.close()


def begin(environments, **scripts):
    """Episodes by name, each with its script."""
    for name, script in scripts.items():
        environments.begin(globals()[name], {"prompt": "", "answer": "", "record": {"script": script}}, 0)


def replies(environments, count, seconds=20.0):
    """So many, by episode."""
    found, end = {}, time.monotonic() + seconds
    while len(found) < count:
        assert time.monotonic() < end, f"{found} after {seconds} s"
        found |= {reply.id: reply for reply in environments.poll(0.5)}
    return found


def test_a_rollout_asks_is_answered_and_is_over(made):
    environments = made()
    begin(environments, ONE=[ASKS, DONE])
    assert environments.pending
    assert replies(environments, 1) == {ONE: Reply(ONE, request=ASKED, seconds=0.25)}
    assert not environments.pending and environments.answered == 2, "it has loaded, and asked"
    environments.act(ONE, SPOKEN)
    assert environments.pending
    assert replies(environments, 1) == {ONE: Reply(ONE, reward=0.5, done=True, seconds=0.25)}
    assert not environments.pending and environments.poll(0.0) == []


def test_a_turn_reaches_the_rollout_as_it_is(made):
    environments = made()
    begin(environments, ONE=[ASKS, "echo"])
    replies(environments, 1)
    environments.act(ONE, SPOKEN)
    echo = replies(environments, 1)[ONE].request.messages[0]["content"]
    assert echo == "['answer', 'speak', 0, 'ab', [], (3, 2, False)]"


def test_several_requests_wait_and_the_agents_time_begins_when_all_are_answered(made):
    environments = made(timeout=0.5)
    begin(environments, ONE=[{"request": {"calls": [0, 1], "messages": MESSAGES}}, "silence", "silence"])
    replies(environments, 1)
    environments.act(ONE, SPOKEN)
    assert environments.poll(0.8) == [] and not environments.pending
    environments.refuse(ONE, [1], "no", "code")
    assert environments.pending and replies(environments, 1)[ONE].finish == "time"


def test_a_rollout_that_takes_too_long_fails_and_holds_its_place_until_it_has_stopped(made):
    environments = made(timeout=0.5, together=1)
    begin(environments, ONE=["silence"], TWO=[ASKS])
    found = replies(environments, 2)
    assert found[ONE].failure == "made no request within 0.5 s (--rl-environment-timeout)"
    assert found[TWO].request == ASKED


@pytest.mark.parametrize("failure", [None, "was stopped"])
def test_a_late_rollout_that_had_a_turn_is_graded_or_fails(made, failure):
    environments = made(timeout=0.5)
    begin(environments, ONE=[ASKS, "silence", {**ENDED, "heard": [0], "failure": failure}])
    replies(environments, 1)
    environments.act(ONE, SPOKEN)
    reply = replies(environments, 1)[ONE]
    assert (reply.done, reply.finish) == ((False, None) if failure else (True, "time"))
    assert (reply.failure is None) == (failure is None)


def test_the_time_of_the_engine_is_not_the_environments(made):
    environments = made(timeout=0.5)
    begin(environments, ONE=[ASKS, DONE])
    replies(environments, 1)
    time.sleep(0.8)
    assert environments.poll(0.0) == []
    environments.act(ONE, SPOKEN)
    assert replies(environments, 1)[ONE].done


def test_no_rollout_answers_for_time_in_which_nobody_listened(made):
    environments = made(timeout=3.0)
    begin(environments, ONE=[ASKS, {"sleep": 3.5, **ASKS}])
    assert replies(environments, 1)[ONE].failure is None, "its process has started"
    environments.act(ONE, SPOKEN)
    assert environments.poll(0.3) == []
    time.sleep(3.0)
    assert replies(environments, 1)[ONE].failure is None


def test_an_evaluation_between_two_parts_of_a_rollout_has_places_of_its_own(made):
    environments = made(together=1)
    begin(environments, ONE=[ASKS, DONE], TWO=[ASKS], EVALUATED=[ASKS])
    assert {*replies(environments, 2)} == {ONE, EVALUATED}, "the place of the second is held by the first"
    environments.act(ONE, SPOKEN)
    assert {*replies(environments, 2)} == {ONE, TWO}


def test_where_a_rollout_cannot_be_stopped_its_process_is_killed_and_the_next_one_begins_in_another(made, monkeypatch):
    monkeypatch.setattr(agents, "STOP_SECONDS", 0.3)
    environments = made(timeout=0.5, together=2)
    begin(environments, ONE=["stuck"], TWO=[ASKS, DONE], THREE=[ASKS, DONE])
    found = replies(environments, 3)
    assert "within 0.5 s" in found[ONE].failure and found[THREE].request == ASKED
    assert found[TWO].failure == "was in a verifiers process that was killed, because one of its rollouts did not stop"
    environments.act(THREE, SPOKEN)
    assert replies(environments, 1)[THREE].done


def test_a_process_that_dies_takes_the_rollouts_that_have_begun_with_it_and_no_others(made):
    environments = made(together=2)
    begin(environments, ONE=[ASKS, "die"], TWO=[ASKS], THREE=[ASKS, DONE])
    assert set(replies(environments, 2)) == {ONE, TWO}
    environments.act(ONE, SPOKEN)
    found = replies(environments, 3)
    assert found[ONE].failure == "was in a verifiers process whose code ended its process, which exited with code 3"
    assert found[THREE].request == ASKED
    assert found[TWO].failure == found[ONE].failure


def test_of_an_episode_that_is_given_up_nothing_more_is_heard(made):
    environments = made(together=1)
    begin(environments, ONE=[ASKS, DONE], TWO=[ASKS], THREE=[ASKS])
    replies(environments, 1)
    environments.act(ONE, SPOKEN)
    environments.end(ONE)
    environments.end(TWO)  # which has not begun
    environments.end(TWO)
    assert set(replies(environments, 1)) == {THREE}
    environments.act(ONE, SPOKEN)
    assert not environments.pending


@pytest.mark.parametrize("script", [[ENDED], [ASKS, ENDED], [[ASKS, ENDED]]])
def test_a_rollout_that_is_cancelled_and_was_not_given_up_has_failed(made, script):
    """As it begins, upon a turn, and while the model speaks."""
    environments = made()
    begin(environments, ONE=script)
    reply = replies(environments, 1)[ONE]
    if reply.request and script[0] is ASKS:
        environments.act(ONE, SPOKEN)
    while reply.request:
        reply = replies(environments, 1)[ONE]
    assert reply.failure == "was cancelled by its own code"
    assert not environments.pending


def test_a_row_without_verifiers_own_field_is_refused(monkeypatch):
    monkeypatch.setattr(agents, "Worker", lambda *_: None)
    environments = EpisodeSetup(EpisodeConfig(environment="verifiers:x"), "chat", "", 1, 1, 1.0).environments()
    environments.check_fields({"a.jsonl line 1": {"verifiers", "other"}})
    with pytest.raises(ValueError, match="b.jsonl line 2 has no field 'verifiers'; make the data with `python -m"):
        environments.check_fields({"a.jsonl line 1": {"verifiers"}, "b.jsonl line 2": {"other"}})


def test_an_environment_that_cannot_be_loaded_stops_the_run(made):
    environments = made("unknown")
    begin(environments, ONE=[ASKS])
    with pytest.raises(EpisodeError, match="there is no such environment"):
        replies(environments, 1)


@pytest.mark.parametrize("kind", ["agent_process", "external_agents", "verifiers_agents", "verifiers_load"])
def test_the_modules_of_the_processes_can_be_imported_and_need_no_torch(kind):
    code = f"import sys, mindspeed_rl_plugin.gateway.{kind}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_nothing_is_left_when_it_is_closed(made):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    environments = made(workers=2)
    begin(environments, ONE=[ASKS, DONE])
    replies(environments, 1)
    environments.close()
    environments.close()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_an_interpreter_that_is_none_is_refused(tmp_path):
    old = tmp_path / "python3.8"
    old.write_text("#!/bin/sh\necho 3.8\n")
    old.chmod(0o755)
    with pytest.raises(ValueError, match="there is no such program here; give an interpreter of Python 3.11"):
        interpreter("/nowhere/python")
    with pytest.raises(ValueError, match="is Python 3.8; give an interpreter of Python 3.11 or later"):
        interpreter(str(old))
    assert interpreter(None) is None and os.path.isabs(interpreter("python3"))
