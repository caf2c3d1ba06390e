"""Ids, masks and results of episodes equal those of TRL's own tool loop, under the templates that TRL trains with.

On this side only sampling is scripted: the tools run in a pool, and its turns go through `EpisodeEngine` and `Lead`.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.rollout_engine import generate, response_request
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
from mindspeed_rl_plugin.rows import Completion, SampleId, Sampling

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
from end_to_end import interpreter  # noqa: E402
from engine_parts import FIELDS, Engine, told  # noqa: E402
from families import FAMILIES, make_tokenizer, template  # noqa: E402

sys.path[:2] = []
# What TRL renders with where a tokenizer has the stock template: its training template, unless that can be appended to.
TRAINS_WITH = {"qwen2_5": "qwen2_5", "qwen3": "qwen3_training", "llama3_1": "llama3_1", "llama3_2": "llama3_2"}
TOOLS = tuple(f"{HERE / 'user_code.py'}:{name}" for name in ("say", "repeat"))
SETUP = EpisodeSetup(EpisodeConfig(tools=TOOLS, max_turns=9, environment_timeout=30), "chat", "", 10**6, 10**6, 60)
TIMEOUT = 600  # seconds of TRL's answer, its start included

CONTROL = tuple(text for family in FAMILIES.values() for text in (*family.special, *family.added))
AWKWARD = ["", "\n\n 3\n", "a\tb  ", "é e\u0301 😀", '{"x": [1, "2"]}', "\\n", "|> <|", "<b>", "'", "\r\n"]
# Of control tokens TRL makes such, this project text: test_chat.py has those.
TEXT = st.lists(st.sampled_from(AWKWARD) | st.text(st.characters(codec="utf-8"), max_size=8), max_size=4).map("".join)
TEXT = TEXT.filter(lambda text: not any(token in text for token in CONTROL))


@st.composite
def episodes(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """A question; ids of turns: of some with calls, and an answer."""
    llama, turns = name.startswith("llama"), []
    for _ in range(draw(st.integers(1, 3))):
        tools = draw(st.lists(st.sampled_from(["say", "repeat"]), min_size=1, max_size=1 if llama else 2))
        calls = [{"name": tool, "parameters" if llama else "arguments": {"text": draw(TEXT)}} for tool in tools]
        written = [json.dumps(call, ensure_ascii=draw(st.booleans())) for call in calls]
        text = written[0] if llama else "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
        if not llama and draw(st.booleans()):
            text = ("<think>\nI use a tool.\n</think>\n\n" if name == "qwen3" else "I say.\n") + text
        turns.append(sampled(name, text, draw(st.integers(1, 8))))
    turns.append(sampled(name, "It is 12.", 3))
    return {"messages": [{"role": "user", "content": "What? " + draw(TEXT)}], "turns": turns}


def sampled(name: str, text: str, place: int) -> list[int]:
    """Ids of a turn, cut into other tokens in one place than the tokenizer would cut it."""
    tokenizer = tokenizer_of(name)
    cut = max(text.find("{"), 0) + place
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in (text[:cut], text[cut:])]
    return [*parts[0], *parts[1], tokenizer.eos_token_id]


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """With the template that TRL trains with."""
    return make_tokenizer(name, template(TRAINS_WITH[name]))


class Scripted(Engine):
    """Samples the turns of a script."""

    def __init__(self, turns: Sequence[list[int]]) -> None:
        super().__init__()
        self.turns = iter(turns)

    def step_along(self, steps: int) -> list[Completion]:
        waiting, self.queue = [*self.queue], {}
        return [self.made(sample, tuple(next(self.turns))) for sample in waiting]

    def made(self, sample: SampleId, tokens: tuple[int, ...]) -> Completion:
        return Completion(sample, tokens, (-1.0,) * len(tokens), "stop", ((0, 0),))


@pytest.fixture(scope="module")
def environments() -> Iterator[Any]:
    with contextlib.closing(SETUP.environments()) as environments:
        yield environments


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory, environments: Any) -> Iterator[Any]:
    """Asks TRL for the row of an episode."""
    place = tmp_path_factory.mktemp("trl")
    (place / "tools.json").write_text(json.dumps(environments.tools))
    for name in TRAINS_WITH:
        make_tokenizer(name).save_pretrained(place / name)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = ["timeout", str(TIMEOUT), str(interpreter()), str(HERE / "trl_loop.py"), str(place)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with (place / "log").open("w") as log, subprocess.Popen(command, env=env, stderr=log, **pipes) as process:

        def ask(name: str, episode: dict[str, Any]) -> dict[str, Any]:
            process.stdin.write(json.dumps({"tokenizer": name, **episode}) + "\n")
            answer = process.stdout.readline()
            assert answer, (place / "log").read_text()[-3000:]
            return json.loads(answer)

        yield ask
        process.stdin.close()


def ours(name: str, episode: dict[str, Any], environments: Any) -> dict[str, Any]:
    """The row of an episode: ids of the prompt and behind it, mask, prompts of all turns, results of the calls."""
    tokenizer, scripted = tokenizer_of(name), Scripted(episode["turns"])
    prompt = tuple(SETUP.format(tokenizer, environments).prompt(episode["messages"]))
    engine = SETUP.over(scripted, tokenizer, environments, Peers())
    request = response_request(Sampling(10**6), 0, SampleId(0, 0, 0), prompt, fields=FIELDS)
    (made,) = generate(engine, [request], deadline=60)
    return {
        "prompt": list(made.prompt),
        "ids": list(made.tokens),
        "mask": [int(any(start <= i < end for start, end in made.turns)) for i in range(len(made.tokens))],
        "prompts": [list(asked.prompt_tokens) for asked in scripted.seen],
        "results": [[m["name"], m["content"]] for m in told(made).conversation if m["role"] == "tool"],
    }


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 60)
@pytest.mark.parametrize("name", TRAINS_WITH)
def test_an_episode_is_that_of_trls_loop(name: str, trl: Any, environments: Any) -> None:
    longest = 0

    @settings(max_examples=60, deadline=None)
    @given(episodes(name))
    def check(episode: dict[str, Any]) -> None:
        nonlocal longest
        row = ours(name, episode, environments)
        assert row == trl(name, episode)
        longest = max(longest, len(row["results"]))

    check()
    assert longest > 2, "episodes with several rounds of calls were compared"
