"""`OpenEnv` against servers of OpenEnv's own package, installed apart (slow), and without a server."""

import contextlib
import socket
import time

import pytest
from openenv_serving import serving

from mindspeed_rl_plugin.episodes import openenv
from mindspeed_rl_plugin.episodes.openenv import ActionError, action_of, environment_at

ONE_TEXT = {"properties": {"message": {"type": "string"}}, "required": ["message"]}
ONE_NUMBER = {"properties": {"move": {"type": "integer"}}, "required": ["move"]}
TWO = {"properties": {"row": {"type": "integer"}, "column": {"type": "integer"}}, "required": ["row", "column"]}


@pytest.fixture(scope="module")
def serve(apart):
    """Starts a server; returns its URL."""
    with contextlib.ExitStack() as servers:
        yield lambda name: servers.enter_context(serving(apart("openenv==0.10.0"), name))


@pytest.fixture(scope="module")
def echo(serve):
    return environment_at(f"openenv:{serve('echo')}/")


@pytest.fixture
def episode(echo):
    made = echo()
    yield made
    made.close()


@pytest.mark.slow
def test_an_episode(episode):
    assert episode.reset(3, reset={"greeting": "good evening"}) == "good evening 3", "a row has arguments for it"
    assert episode.reset(7) == "hello 7"
    assert episode.step("hi") == ("1 hi", 2.0, False)
    assert episode.step('{"message": "you"}') == ("2 you", 3.0, False)
    assert episode.step("bye") == ("3 bye", 3.0, True)


@pytest.mark.slow
def test_sessions_are_apart_and_no_more_than_the_server_has(echo):
    one, two, three = echo(), echo(), echo()
    assert one.reset(1) == "hello 1" and two.reset(2) == "hello 2"
    assert one.step("a") == ("1 a", 1.0, False)
    assert one.step("b") == ("2 b", 1.0, False) and two.step("c") == ("1 c", 1.0, False)
    with pytest.raises(RuntimeError, match="CAPACITY_REACHED.*raise max_concurrent_envs of the server"):
        three.reset(3)
    one.close()
    time.sleep(0.5)
    four = echo()
    assert four.reset(4) == "hello 4"
    for other in (two, three, four):
        other.close()


@pytest.mark.slow
def test_what_the_server_raises_is_an_error_and_a_wrong_action_an_observation(episode):
    episode.reset(1)
    text, reward, over = episode.step('{"words": "hi"}')
    assert text.startswith("error: the action is not valid: message: Field required; words: Extra inputs are not")
    assert reward == 0.0 and not over
    with pytest.raises(RuntimeError, match="answered step with EXECUTION_ERROR: the wall fell"):
        episode.step("fail")


@pytest.mark.slow
def test_actions_of_several_fields_are_explained(serve):
    episode = environment_at(serve("board"))()
    text = episode.reset(1)
    assert text.startswith('{"board": [[0, 0], [0, 0]]}\n\nAnswer with a JSON object of this schema: {')
    assert '"row"' in text and "metadata" not in text
    assert episode.step("north")[0].startswith("error: answer with a JSON object of this schema")
    assert episode.step('```json\n{"row": 1, "column": 0}\n```') == ('{"board": [[0, 0], [1, 0]]}', 0.5, True)
    episode.close()


@pytest.mark.slow
def test_actions_that_are_calls_of_tools(serve):
    episode = environment_at(serve("adder"))()
    text = episode.reset(1)
    assert "Add two numbers." in text and '"tool_name"' in text
    text, reward, over = episode.step('{"type": "call_tool", "tool_name": "add", "arguments": {"a": 40, "b": 2}}')
    assert "42" in text and reward == 0.0 and not over
    assert "multiply" in episode.step('{"type": "call_tool", "tool_name": "multiply", "arguments": {}}')[0]
    episode.close()


def test_no_url_and_no_server_are_refused():
    with pytest.raises(ValueError, match="openenv:localhost:8000: give the server's address as http://HOST:PORT"):
        environment_at("openenv:localhost:8000")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"{url} does not answer as an OpenEnv server .* correct the URL"):
            openenv.schema(url)


@pytest.mark.parametrize(
    "text, schema, action",
    [
        (" left \n", ONE_TEXT, {"message": "left"}),
        ("12", ONE_TEXT, {"message": "12"}),
        ("12", ONE_NUMBER, {"move": 12}),
        ("left", ONE_NUMBER, {"move": "left"}),
        ('{"row": 1}', TWO, {"row": 1}),
        ('```json\n{"row": 1, "column": 2}\n```', TWO, {"row": 1, "column": 2}),
        ("```\nprint(1)\n```", ONE_TEXT, {"message": "print(1)"}),
    ],
)
def test_a_turn_is_an_action(text, schema, action):
    assert action_of(text, schema) == action


@pytest.mark.parametrize("text", ["left", "[1, 2]", "12", ""])
def test_a_turn_that_is_none(text):
    with pytest.raises(ActionError, match="answer with a JSON object of this schema"):
        action_of(text, TWO)
