"""Episodes whose requests fork, without processes: what is trained is what was sampled, once."""

import asyncio
import dataclasses
import random

import msgspec
import pytest
import torch
from engine_parts import FIELDS, Engine, told
from families import make_tokenizer, template
from fork_oracle import check, logps_of, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.rollout_engine import response_request
from mindspeed_rl_plugin.episodes.agent_lead import AgentLead, ForkLimits
from mindspeed_rl_plugin.episodes.agents import AgentEnvironments, RolloutReport
from mindspeed_rl_plugin.episodes.chat import AgentFormats, make_format
from mindspeed_rl_plugin.episodes.environments import Reply
from mindspeed_rl_plugin.episodes.episode_engine import EpisodeEngine
from mindspeed_rl_plugin.episodes.lead import EpisodeLimits
from mindspeed_rl_plugin.forward.fragments import row_sizes
from mindspeed_rl_plugin.gateway.agent_messages import HeldTurn, History, RefusedRequest, SpokenTurn, TurnRequest
from mindspeed_rl_plugin.gateway.conversation import Conversation
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId, Sampling

TOKENIZER = make_tokenizer("qwen2_5", template("qwen2_5"))
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
SAMPLE = SampleId(0, 0, 0)
LIMITS, FREE = EpisodeLimits(turns=64, observation=64, prompt=256), ForkLimits()


class Sampler(Engine):
    """Samples letters by seed and place, and the end of a turn."""

    def _take(self, sample, finish):
        done = super()._take(sample, finish)
        letters = [TOKENIZER.encode(chr(97 + token % 26))[0] for token in done.tokens]
        tokens = tuple(END if token == 99 else letter for token, letter in zip(done.tokens, letters, strict=True))
        return dataclasses.replace(done, tokens=tokens, logps=logps_of(sample.call, tokens))


class Here(AgentEnvironments):
    """The conversation of one agent, in this process."""

    pending = False

    def __init__(self):
        self.replies = []
        self.conversation = Conversation(0, self._report)

    def _report(self, report):
        report = msgspec.convert(msgspec.to_builtins(report), RolloutReport)
        given = {"reward": report.reward, "done": report.done, "heard": report.heard, "failure": report.failure}
        self.replies.append(Reply(SAMPLE, request=report.request, seconds=report.seconds, **given))

    def begin(self, *_): ...

    def end(self, *_): ...

    def _answer(self, episode, turns, method, *what):
        getattr(self.conversation, method)(*what)

    def poll(self, seconds):
        replies, self.replies = self.replies, []
        return replies


class Episode:
    """An episode that a test plays."""

    def __init__(self, forks=FREE, limits=LIMITS, most=400, last=False):
        self.here, self.engine = Here(), Sampler()
        formats = AgentFormats(TOKENIZER, lambda: lambda text: ())
        lead = AgentLead(limits, make_format(TOKENIZER, "chat", ()), formats, self.here, forks)
        self.over = EpisodeEngine(self.engine, 12, True, lead, Peers(), agents=True, last=last)
        self.request = response_request(Sampling(most), 3, SAMPLE, (1, 2, 3), fields=FIELDS)
        self.over.submit([self.request])
        self.sampled, self.done, self.bodies = {}, [], 0

    async def ask(self, messages, steps=300, heard=True, cut=None, **more):
        """The turns of a request. cut: steps after which the episode is interrupted."""
        self.bodies += 1
        call = await self.here.conversation.ask(TurnRequest(tuple(messages), **more), str(self.bodies).encode(), False)
        await asyncio.sleep(0)  # others ask, too
        for step in range(steps):
            if call.turns.done():
                break
            if step == cut:
                self.over.abort()
                self.engine.version += 1
                self.over.submit([self.request])
            self.done += self.over.step_along(1)
        call.heard = heard
        return call.turns.result()

    def ends(self, reward=1.0):
        conversation = self.here.conversation
        conversation.tell(done=True, reward=reward, heard=conversation.heard)
        while not self.done:
            self.done += self.over.step_along(1)
        return self.done[0]


def said(role, content):
    return {"role": role, "content": content}


def noting(episode):
    spoke = episode.engine._take

    def take(sample, finish):
        done = spoke(sample, finish)
        if finish != "abort":
            episode.sampled[sample.call] = done
        return done

    episode.engine._take = take
    return episode


EDITS = [
    *["continue"] * 3,
    *["sibling", "edit", "drop", "system", "strip"],
    *["twice", "unheard", "untrained", "pause"],
]


@settings(max_examples=80, deadline=None)
@given(edits=st.lists(st.sampled_from(EDITS), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_histories_that_agents_edit_train_what_was_sampled_once(edits, seed):
    chance, episode, heard, number = random.Random(seed), noting(Episode()), [], 0

    async def play():
        nonlocal number
        histories = [[said("user", "Hi")]]
        for edit in ["continue", *edits]:
            history = list(histories[-1] if edit != "sibling" else chance.choice(histories))
            spoken = [i for i, m in enumerate(history) if m["role"] == "assistant"]
            if edit == "edit" and spoken:
                at = chance.choice(spoken)
                history[at] = {**history[at], "content": history[at]["content"] + " edited"}
            elif edit == "drop" and len(history) > 2:
                del history[chance.randrange(len(history) - 1)]
            elif edit == "system":
                history = [said("system", f"Be {number}."), *history]
            elif edit == "strip":
                history = [{**m, "content": f"  {m['content']}\n"} for m in history]
            n = 3 if edit == "twice" else 1
            kept, trained = edit != "unheard", edit != "untrained"
            turns = await episode.ask(
                history, heard=kept, n=n, trained=trained, cut=chance.randint(0, 3) if edit == "pause" else None
            )
            heard.extend(range(number, number + n) if kept and trained else ())
            number += n
            if kept:
                turn = chance.choice(turns).message
                histories.append([*history, turn, said(chance.choice(["user", "tool"]), f"and {number}")])
        return episode.ends()

    row = asyncio.run(play())
    check(episode, row, heard)
    assert sum(told(row).rewards) == 1.0 and told(row).rewards[-1] == 1.0


def test_requests_at_once_are_paths_and_end_in_the_order_of_their_turns():
    episode = noting(Episode())

    async def play():
        opening = [said("user", "Hi")]
        (turn,) = await episode.ask(opening)
        asked = [[*opening, turn.message, said("user", text)] for text in ("one", "two", "three")]
        answers = await asyncio.gather(*(episode.ask(messages) for messages in asked))
        assert len({answer.mark for (answer,) in answers}) == 3
        return episode.ends()

    row = asyncio.run(play())
    check(episode, row, range(4))
    assert len(paths_of(row)) == 3 and told(row).counts["forks"] == 2 and told(row).counts["roots"] == 1
    seeds = {request.id.call: request.seed for request in episode.engine.seen}
    assert len({*seeds.values()}) == 4


def refused(episode, *requests, at_once=1):
    """The errors of requests, None for those that get turns."""

    async def ask(messages, more):
        try:
            await episode.ask(messages, **more)
        except RefusedRequest as error:
            return error.code, str(error)

    async def play():
        errors = []
        for n in range(0, len(requests), at_once):
            errors += await asyncio.gather(*(ask(*request) for request in requests[n : n + at_once]))
        return errors, episode.ends()

    return asyncio.run(play())


HI, OTHER = [said("user", "Hi")], [said("user", "Other")]


def test_forks_that_a_job_cannot_train_are_refused_and_the_episode_goes_on(capsys):
    episode = noting(Episode(ForkLimits("needs one conversation")))
    untrained = (OTHER, {"trained": False})
    errors, row = refused(episode, untrained, (HI, {}), (OTHER, {}), untrained, (HI, {"n": 2}))
    assert [error and error[0] for error in errors] == [None, None, "history_differs", None, "history_differs"]
    assert "needs one conversation" in errors[2][1] and "message 0 (user) has another content" in errors[2][1]
    check(episode, row, [1])
    assert row.finish == "stop" and capsys.readouterr().out.count("a request was refused, for the first time") == 1


def test_limits_are_the_clients_errors_and_the_rows_finish():
    long = [said("user", "word " * 300)]
    errors, row = refused(
        noting(Episode(limits=dataclasses.replace(LIMITS, turns=2))), (long, {}), (HI, {}), (HI, {}), (HI, {})
    )
    codes = [error and error[0] for error in errors]
    assert codes == ["context_length_exceeded", None, None, "context_length_exceeded"] and row.finish == "turns"
    assert "--rl-max-prompt-length 256" in errors[0][1] and "--rl-max-turns 2" in errors[3][1]


@pytest.mark.parametrize("shared", [False, True])
def test_a_row_that_forks_keeps_to_the_tokens_of_a_micro_batch(shared):
    prompt = len(make_format(TOKENIZER, "chat", ()).written(HI))
    limit = 3 * (prompt + 12) + prompt
    episode = noting(Episode(ForkLimits("", limit, shared), most=12))
    errors, row = refused(episode, *[(HI, {})] * 60, at_once=4)
    first = [len(r.prompt_tokens) + r.sampling.max_tokens for r in episode.engine.seen[: errors[:4].count(None)]]
    assert sum(first) - (len(first) - 1) * prompt * shared <= limit, (
        "also if all turns at once are as long as they may be"
    )
    assert errors[:3] == [None] * 3 and len(paths_of(row)) == errors.count(None) >= (12 if shared else 3)
    assert "--rl-max-tokens-per-microbatch" in errors[-1][1] and row.finish == "length"
    rows = Rows((SAMPLE,), {"length": torch.tensor([len(row.prompt) + len(row.tokens)]), "paths": row.columns["paths"]})
    rows = rows.with_columns(tokens=Ragged.from_rows([torch.tensor([*row.prompt, *row.tokens])]))
    assert row_sizes(rows, shared)[0] <= limit


def test_the_tokens_of_a_prompt_are_counted_without_a_turn():
    episode = noting(Episode())

    async def play():
        conversation = episode.here.conversation
        counting = asyncio.create_task(conversation.count(TurnRequest(tuple(HI))))
        while not counting.done():
            await asyncio.sleep(0)
            episode.over.step_along(1)
        (turn,) = await episode.ask(HI)
        return counting.result(), turn.prompt_tokens

    counted, prompt = asyncio.run(play())
    assert counted == prompt == len(episode.engine.seen[0].prompt_tokens) and len(episode.engine.seen) == 1


def test_other_tools_are_another_conversation_and_what_comes_back_was_heard():
    episode, tool = noting(Episode()), {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    async def play():
        (turn,) = await episode.ask(HI, heard=False, tools=(tool,))
        await episode.ask([*HI, turn.message, said("user", "more")], tools=(tool,))
        await episode.ask([*HI, turn.message, said("user", "more")])
        return episode.ends()

    row = asyncio.run(play())
    check(episode, row, [0, 1, 2])
    assert (told(row).counts["roots"], told(row).counts["differ_tools"], len(paths_of(row))) == (2, 1, 2)


def test_the_last_branch_has_all_turns_of_its_conversation():
    episode = noting(Episode(last=True))

    async def play():
        (turn,) = await episode.ask(HI)
        behind = [*HI, turn.message]
        await episode.ask([*behind, said("user", "more")])
        await episode.ask(OTHER)
        await episode.ask([*behind, said("user", "else")])
        return episode.ends()

    row = asyncio.run(play())
    check(episode, row, [0, 3])
    assert told(row).rewards == [0.0, 1.0] and len(paths_of(row)) == 1


@pytest.mark.parametrize("last", [False, True])
def test_an_unheard_turn_changes_neither_the_order_nor_the_reward(last):
    episode = noting(Episode(last=last))

    async def play():
        (turn,) = await episode.ask(HI)
        await episode.ask(OTHER)
        await episode.ask([*HI, turn.message, said("user", "more")], heard=False)
        return episode.ends()

    row = asyncio.run(play())
    check(episode, row, [1] if last else [0, 1])
    assert told(row).rewards == ([1.0] if last else [0.0, 1.0])
    assert told(row).conversation[-2]["content"] == "Other"


def test_an_agent_that_ends_while_its_request_waits_leaves_no_token_of_it():
    episode = noting(Episode())

    async def play():
        (turn,) = await episode.ask(HI)
        again = TurnRequest((*HI, turn.message, said("user", "more")))
        await episode.here.conversation.ask(again, b"again", False)
        return episode.ends(), turn

    row, turn = asyncio.run(play())
    check(episode, row, [0])
    assert len(row.tokens) == turn.completion_tokens == row.turns[0][1]


def test_of_equal_turns_the_one_with_the_longest_conversation_is_continued():
    def turn(call, text):
        return SpokenTurn(text, "", (), "stop", 1, 1, f"{call}-x")

    history, more = History(), said("user", "more")
    first = HeldTurn(0, None, tuple(HI), (), turn(0, "yes"))
    behind = HeldTurn(1, first, (more,), (), turn(1, "no"))
    for held in (first, behind, HeldTurn(2, None, tuple(HI), (), turn(2, "yes"))):
        history.add(held)
    yes, no = said("assistant", "yes"), said("assistant", "no")
    assert history.match(TurnRequest((*HI, yes, more, no, more))).turn is behind
    assert history.match(TurnRequest((*HI, yes, more))).turn.call == 2, "the latest"
    assert history.match(TurnRequest((*HI, {**yes, "mark": "0-x"}, more))).turn is first
    differs = history.match(TurnRequest((*HI, yes, more, said("assistant", "maybe"), more)))
    assert (differs.turn, differs.differs) == (None, "content") and "message 3 (assistant)" in differs.why
