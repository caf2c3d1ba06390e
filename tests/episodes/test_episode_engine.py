"""`EpisodeEngine` with its `Lead` over a scripted engine and scripted environments: what the model sees, what comes
back, and that interruptions, limits and failures leave each episode as it must be."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_parts import (
    CLOSE,
    COUNTED,
    FIELDS,
    LIMITS,
    PROMPT,
    SAYS,
    Engine,
    World,
    echo,
    over,
    requests_of,
    told,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from mindspeed_rl_plugin.engine.rollout_engine import generate
from mindspeed_rl_plugin.engine.routes import continued, routes_of
from mindspeed_rl_plugin.episodes.environments import EpisodeError, MalformedCall, Reply, ToolCall, Turn, Unread
from mindspeed_rl_plugin.episodes.episode_state import turn_seed
from mindspeed_rl_plugin.rows import Completion, Ragged, SampleId

pytestmark = pytest.mark.quick


def test_each_prompt_is_the_one_before_with_what_was_sampled_and_seen() -> None:
    world = World(echo, slow=3)
    engine = over(world)
    requests = requests_of(4)
    for request, completion in zip(requests, generate(engine, requests, deadline=5), strict=True):
        asked = [r for r in engine._engine.seen if r.id.sample == request.id]
        turns, row = completion.turns, whole(completion)
        assert len(asked) == len(turns) <= 2 and request.id == completion.id
        for part, (first, end) in zip(asked, turns, strict=True):
            assert part.prompt_tokens == row[: len(PROMPT) + first]
            assert part.sampling.max_tokens == min(10, 40 - first)
            assert part.seed == turn_seed(request.seed, turns.index((first, end)))
        assert turns[-1][1] == len(completion.tokens)
        told = [turn for _, sample, turn in world.named("act") if sample == request.id]
        assert [turn.tokens for turn in told] == [completion.tokens[first:end] for first, end in turns][: len(told)]
        sampled = {place for first, end in turns for place in range(first, end)}
        assert all((logp == 0) == (place not in sampled) for place, logp in enumerate(completion.logps))
        seen = [completion.tokens[place] for place in range(len(completion.tokens)) if place not in sampled]
        assert seen == ([ord(letter) for letter in "xyz"] if len(turns) == 2 else [])


def test_routes_are_those_of_the_pass_that_first_read_a_token() -> None:
    """An observation has those of the next turn's pass, and so has the last token before it; interrupted turns keep
    theirs."""
    passes: dict[SampleId, list[int]] = {}  # length of a row after each pass of the model

    class Routed(Engine):
        """The expert of a token is the number of the pass that computed it."""

        def _take(self, sample: SampleId, finish: str) -> Completion:
            request = self.queue[sample][0]
            turn, mine = super()._take(sample, finish), passes.setdefault(sample.sample, [])
            if not turn.tokens:
                return turn
            mine.append(len(request.prompt_tokens) + len(turn.tokens))
            routes = continued(routes_of(request.begun), torch.full((mine[-1], 1, 1), len(mine)))
            return replace(turn, columns={"routes": Ragged.from_rows([routes])})

    def on(episode: SampleId, turn: Turn, number: int) -> Reply:
        return Reply(episode, [{"role": "user", "content": "xyz"}], done=number == 3)

    engine, requests, done = over(World(on)), requests_of(4, most=60), []
    engine._engine = Routed()
    engine.submit(requests)
    for _ in range(6):  # also in the middle of a turn
        done += engine.step_along(2)
        stopped = {part.id for part in engine.abort()}
        engine.submit([r for r in requests if r.id in stopped])
    while len(done) < len(requests):
        done += engine.poll(1)
    for completion in done:
        mine, got = passes[completion.id], completion.columns["routes"].row(0).flatten().tolist()
        expected = [1 + sum(length <= place for length in mine) for place in range(len(whole(completion)))]
        assert got == expected and set(got) >= {1, 2}
    assert any(len(passes[c.id]) > len(c.turns) > 1 for c in done), "a turn was interrupted"


def test_rewards_counts_and_conversation_are_those_of_the_turns() -> None:
    world = World(echo)
    for completion in generate(over(world, longest=40), requests_of(3, most=400), deadline=5):
        episode = told(completion)
        assert completion.finish == "stop" and episode.rewards == [0.5, 1.0] and not episode.failed
        roles = [message["role"] for message in episode.conversation]
        assert roles == ["user", "assistant", "user", "assistant"]
        assert [m["reward"] for m in episode.conversation if m["role"] == "assistant"] == [0.5, 1.0]
        assert [m["turn"] for m in episode.conversation if "turn" in m] == [list(turn) for turn in completion.turns]
        assert {name: episode.counts[name] for name in COUNTED} == dict.fromkeys(COUNTED, 1)
        assert episode.counts["observation_tokens"] == 3


def test_a_turn_cut_at_its_limit_is_not_answered() -> None:
    world = World(echo)
    completions = generate(over(world, longest=1), requests_of(8), deadline=5)
    cut = [c for c in completions if c.finish == "length"]
    assert cut and all(c.tokens[-1] != CLOSE for c in cut)
    acted = {sample for _, sample, _ in world.named("act")}
    assert all((c.id in acted) == (len(c.turns) > 1 or c.finish == "stop") for c in completions)
    assert all(told(c).rewards[-1] == 0.25 for c in cut), "the rest of the reward comes"
    ends = {sample: turn.tokens for _, sample, turn in world.named("finish")}
    assert ends == {c.id: c.tokens[-1:] for c in cut}


def test_the_limit_of_turns_and_of_the_whole_episode_end_it() -> None:
    def on(episode: SampleId, turn: Turn, number: int) -> Reply:
        return Reply(episode, [{"role": "user", "content": "ab"}], reward=1.0)

    for completion in generate(over(World(on), longest=200), requests_of(3, most=1000), deadline=5):
        assert completion.finish == "turns" and told(completion).rewards == [1.0, 1.0, 1.0, 1.25]
        assert completion.tokens[-1] == CLOSE, "what is seen after the last turn is not in the row"
    for completion in generate(over(World(on), longest=200), requests_of(6, most=12), deadline=5):
        assert len(completion.tokens) <= 12
        last = len(completion.turns) == 4 and completion.tokens[-1] == CLOSE
        assert completion.finish == ("turns" if last else "length")
        assert completion.turns[-1][1] == len(completion.tokens), "no observation without a turn behind it"


def test_an_environment_that_begins_makes_the_prompt_longer() -> None:
    for completion in generate(over(World(echo, opening=SAYS, slow=2)), requests_of(2), deadline=5):
        assert completion.prompt == (ord("p"), ord("!")) and told(completion).conversation[0] == {
            "role": "user",
            "content": "p!",
        }
    long = World(echo, opening=replace(SAYS, messages=[{"role": "user", "content": "123456"}]))
    with pytest.raises(EpisodeError, match=r"7 tokens long .* --rl-max-prompt-length is 5: shorten the"):
        generate(over(long), requests_of(1), deadline=5)
    long.opening = replace(SAYS, messages=[{"role": "user", "content": "123456789"}])
    for completion in generate(over(long, replace(LIMITS, prompt=20)), requests_of(1), deadline=5):
        assert completion.prompt == tuple(map(ord, "p123456789")), "longer than an observation may be"


@pytest.mark.parametrize("rule", ["stop", "zero", "drop"])
def test_a_failed_environment(rule: str, capsys) -> None:
    def fails(episode: SampleId, turn: Turn, number: int) -> Reply:
        if number == 2:
            return Reply(episode, failure="raised ZeroDivisionError")
        return Reply(episode, [{"role": "user", "content": "x"}], reward=1.0)

    world = World(fails)
    engine, requests = over(world, replace(LIMITS, on_error=rule), longest=100), requests_of(2, most=1000)
    if rule == "stop":
        with pytest.raises(EpisodeError, match=r"rollout 0, prompt \d, response \d raised ZeroDivisionError"):
            generate(engine, requests, deadline=5)
        return
    for completion in generate(engine, requests, deadline=5):
        assert told(completion).failed and told(completion).rewards == [0.0, 0.0]
        assert [m["reward"] for m in told(completion).conversation if "turn" in m] == [0.0, 0.0]
    said = capsys.readouterr().out
    assert said.count("an environment failed, for the first time") == said.count("it raised ZeroDivisionError") == 1
    assert len(world.named("end")) == 4


def test_one_that_cannot_begin_has_one_turn_that_nobody_answers() -> None:
    opening = Reply(SampleId(0, 0, 0), failure="raised OSError")
    world = World(echo, opening=opening)
    for completion in generate(over(world, replace(LIMITS, on_error="zero")), requests_of(2), deadline=5):
        assert len(completion.turns) == 1 and told(completion).failed
        assert completion.tokens and completion.prompt == PROMPT
    assert not world.named("act")
    cut = generate(over(world, replace(LIMITS, on_error="zero"), longest=1), requests_of(4), deadline=5)
    assert {c.finish for c in cut} == {"stop", "length"}, "as the engine said"
    assert all((c.finish == "stop") == (c.tokens[-1] == CLOSE) for c in cut)


def test_calls_are_counted_by_tool_and_more_than_a_template_takes_are_none() -> None:
    def answers(episode: SampleId, turn: Turn, number: int) -> Reply:
        return Reply(episode, done=True, calls={"b": (2, 1)}, raised={"b": "OSError: no"})

    calls = [ToolCall("b", {}), ToolCall("b", {}), ToolCall("c", {})]
    world = World(answers, tools=("a", "b"))
    engine = over(world, longest=100, parse=lambda text: calls)
    (completion,) = generate(engine, requests_of(1, 1, most=400), deadline=5)
    assert told(completion).tools == [[0, 0], [2, 1]] and world.named("act")[0][2].attempts == tuple(calls)
    engine._lead.format.most_calls = 1
    generate(engine, requests_of(1, 1, most=400), deadline=5)
    assert world.named("act")[1][2].attempts == (MalformedCall("at most 1 call in a turn"),)
    engine._lead.parse = None
    generate(engine, requests_of(1, 1, most=400), deadline=5)
    turn = world.named("act")[2][2]
    assert turn.attempts == Unread(engine._lead.format.raw_text(turn.tokens), 1), "a user's parser finds them elsewhere"


def test_in_lockstep_turns_are_submitted_together_in_the_order_of_ids() -> None:
    world, waits = World(echo, slow=4), list[float]()
    engine = over(world, replace(LIMITS, lockstep=True), longest=30)

    def poll(seconds: float) -> list[Reply]:
        if world.pending and not engine._sampling:
            waits.append(seconds)
        return World.poll(world, seconds)

    world.poll = poll
    generate(engine, requests_of(5, most=400), deadline=5)
    assert waits and min(waits) > 0, "the engine waits for the slowest one, and does not ask again and again"
    seconds = [r.id.sample for r in engine._engine.seen if len(r.prompt_tokens) > len(PROMPT)]
    assert seconds == sorted(seconds) and len(seconds) == 10
    order = [len(r.prompt_tokens) > len(PROMPT) for r in engine._engine.seen]
    assert order == sorted(order)


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), max_size=5), slow=st.integers(0, 3), seed=st.integers(0, 9))
def test_interrupted_episodes_go_on_where_they_were(cuts: list[int], slow: int, seed: int) -> None:
    """Wherever it is interrupted, an episode keeps its environment, its tokens and what it has seen."""
    world = World(echo, slow=slow)
    engine = over(world, longest=20)
    requests = [replace(r, seed=r.seed + seed) for r in requests_of(3, most=60)]
    done: dict[SampleId, Completion] = {}
    held: dict[SampleId, tuple[int, ...]] = {}
    engine.submit(requests)
    for steps in cuts:
        done |= {c.id: c for c in engine.step_along(steps)}
        begun = {c.id: c for c in engine.abort()}
        assert all(c.finish == "abort" and len(c.tokens) == len(c.logps) for c in begun.values())
        engine._engine.version += 1
        engine.submit(
            [replace(r, begun=begun[r.id] if begun[r.id].tokens else None) for r in requests if r.id in begun]
        )
        held |= {c.id: c.tokens for c in begun.values()}
    while engine._live:
        done |= {c.id: c for c in engine.poll(5)}
    assert done.keys() == {r.id for r in requests} and len(world.named("begin")) == len(requests)
    for completion in done.values():
        before = held.get(completion.id, ())
        assert completion.turns[-1][1] == len(completion.tokens) and completion.tokens[: len(before)] == before
        sampled = {place for first, end in completion.turns for place in range(first, end)}
        assert completion.logps == tuple(-t / 100 if i in sampled else 0.0 for i, t in enumerate(completion.tokens))
        versions = [version for _, version in completion.segments]
        firsts = [first for first, _ in completion.segments]
        assert firsts[0] == 0 and firsts == sorted(set(firsts)) and versions == sorted(set(versions))
        assert len(versions) <= len(cuts) + 1


def test_what_does_not_go_on_is_over_but_an_evaluation_comes_between() -> None:
    world = World(echo, slow=50)
    engine = over(world, longest=20)
    requests = requests_of(2)
    engine.submit(requests)
    engine.step_along(30)
    engine.abort()
    held_out = [replace(requests[0], id=SampleId(-1, 0, 0))]
    generate(engine, held_out, deadline=5)
    assert not world.named("end")
    engine.submit(requests[:1])
    assert {entry[1] for entry in world.named("end")} == {r.id for r in requests[1:]}
    engine.shutdown()
    assert world.closed


def test_a_call_that_is_answered_is_progress_though_its_reply_is_not_due_yet() -> None:
    world = World(echo, opening=Reply(SampleId(0, 0, 0)), slow=0)
    engine = over(world)
    engine.submit(requests_of(1, 1))
    world.due = [(1000, reply) for _, reply in world.due]
    engine.step_along(1)
    before = engine.progress
    engine.step_along(1)
    assert engine.progress == before
    world.answered += 1
    engine.step_along(1)
    assert engine.progress > before


def test_seeds_of_turns() -> None:
    """The first turn has the response's own; others differ from it and from each other."""
    seeds = [turn_seed(5, turn) for turn in range(50)]
    assert seeds[0] == 5 and len(set(seeds)) == 50 and all(0 <= seed < 2**63 for seed in seeds)


def test_fields_of_the_data_are_not_taken_for_our_own() -> None:
    """The chat template sees them."""
    engine = over(World(echo, opening=SAYS))
    engine._lead.format.prompt = lambda messages, said: [messages[0]["turn"]]
    (request,) = requests_of(1, 1)
    message = {"role": "user", "content": "p", "turn": 3, "reward": 1, "seconds": "9", "name": "n"}
    asked = [replace(request, task=replace(request.task, fields=FIELDS | {"messages": [message]}))]
    (completion,) = generate(engine, asked, deadline=5)
    assert completion.prompt == (3,)
    assert told(completion).conversation[0] == {"role": "user", "content": "p!", "name": "n"}


def heard(completion: Completion) -> list[tuple]:
    said = told(completion).conversation
    return [(m["role"][0], m["content"] * ("turn" not in m), m.get("seconds")) for m in said]


@pytest.mark.parametrize(("limit", "finish"), [("none", "stop"), ("turns", "turns"), ("room", "length")])
def test_all_that_an_environment_says_is_in_the_conversation_and_its_time_once(limit: str, finish: str) -> None:
    """With its last word, though there are no tokens of that."""

    def tells(episode: SampleId, turn: Turn, number: int) -> Reply:
        messages = [{"role": "user", "content": text} for text in ("ab", "c")]
        return Reply(episode, messages, seconds=0.5, done=number == 2)

    def played(turns: int, most: int) -> Completion:
        world = World(tells, opening=replace(SAYS, seconds=0.125))
        limits = replace(LIMITS, turns=turns)
        return generate(over(world, limits, longest=200), requests_of(1, members=1, most=most), deadline=5)[0]

    one = played(turns=1, most=1000)
    completion = {"none": played(2, 1000), "turns": one, "room": played(2, len(one.tokens) + 3)}[limit]
    assert completion.finish == finish and completion.tokens[-1] == CLOSE
    turn = [("a", "", None), ("u", "ab", 0.5), ("u", "c", None)]
    assert heard(completion) == [("u", "p!", 0.125), *turn * (2 if limit == "none" else 1)]


def test_the_time_of_an_environment_that_says_nothing_stands_at_what_was_said_before() -> None:
    quiet = Reply(SampleId(0, 0, 0), seconds=0.25)
    ends = lambda episode, turn, number: replace(quiet, done=True)  # noqa: E731
    (completion,) = generate(over(World(ends, opening=quiet), longest=200), requests_of(1, 1, most=400), deadline=5)
    assert heard(completion) == [("u", "p", 0.25), ("a", "", 0.25)]


@pytest.mark.parametrize("at", ["prompt", "behind"])
def test_a_template_that_refuses_what_is_said_stops_all_ranks(at: str) -> None:
    def refuses(*arguments: Any) -> list[int]:
        raise TemplateError("roles must alternate")

    engine, plans = over(World(echo, opening=SAYS), longest=100), []
    setattr(engine._lead.format, at, refuses)
    engine._peers.share = lambda plan: plans.append(plan) or plan
    with pytest.raises(EpisodeError, match=r"(?s)TemplateError: roles must alternate.* rollout 0, prompt 0, resp"):
        generate(engine, requests_of(1, 1, most=400), deadline=5)
    assert "roles must alternate" in plans[-1].error, "no rank waits for a plan that never comes"


def test_without_an_environment_a_turn_that_waits_in_lockstep_is_submitted_once() -> None:
    """Also if it is interrupted between its own reply and those of others."""
    world = World(echo, slow=6)
    engine, requests, done = over(world, replace(LIMITS, lockstep=True), longest=40), requests_of(3, most=400), []
    engine.submit(requests)
    while len(done) < len(requests):
        done += engine.step_along(1)
        stopped = {part.id for part in engine.abort()}
        engine.submit([r for r in requests if r.id in stopped])
    assert all(len(completion.turns) == 2 for completion in done)
