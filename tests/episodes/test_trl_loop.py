"""Ids, masks and calls of episodes equal those of TRL's own tool loop, under the templates that TRL trains with."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rl_plugin.episodes.chat import make_format
from mindspeed_rl_plugin.episodes.live import Unfinished
from mindspeed_rl_plugin.episodes.parsers import make_parser
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
from end_to_end import interpreter  # noqa: E402
from families import TOOLS, make_tokenizer, template  # noqa: E402

sys.path[:2] = []
SAMPLE = SampleId(0, 0, 0)
# What TRL renders with where a tokenizer has the stock template: its training template, unless that can be appended to.
TRAINS_WITH = {"qwen2_5": "qwen2_5", "qwen3": "qwen3_training", "llama3_1": "llama3_1", "llama3_2": "llama3_2"}
RESULTS = ["12", "", "\n\n 3\n", "a\tb  ", "é e\u0301 😀", '{"x": [1, "2"]}', "x = 3\n\n\ny", "|> <|", "<b>"]


def script(name, tokenizer, seed):
    """Turns and results of an episode: some rounds of calls, and an answer."""
    draw, llama = random.Random(seed), name.startswith("llama")
    turns, results = [], []
    for _ in range(draw.randint(1, 3)):
        tools = draw.choices(["add", "multiply"], k=1 if llama else draw.randint(1, 2))
        written = [json.dumps({"name": t, "arguments": {"a": draw.randint(0, 99), "b": 7}}) for t in tools]
        if llama:
            text = written[0].replace("arguments", "parameters")
        else:
            text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
            text = draw.choice(["", "<think>\nI use a tool.\n</think>\n\n" * (name == "qwen3") or "I add.\n"]) + text
        turns.append(sampled(tokenizer, text, draw))
        results += [draw.choice(RESULTS) for _ in tools]
    turns.append(sampled(tokenizer, "It is 12.", draw))
    return {"messages": [{"role": "user", "content": "What is 3 * 4?"}], "turns": turns, "results": results}


def sampled(tokenizer, text, draw):
    """Ids of a turn, cut into other tokens in one place than the tokenizer would cut it."""
    cut = max(text.find("{"), 0) + draw.randint(1, 8)
    parts = (tokenizer.encode(part, add_special_tokens=False) for part in (text[:cut], text[cut:]))
    return [*itertools.chain(*parts), tokenizer.eos_token_id]


def ours(episode, form, parse):
    """The same row by appending: prompt, ids behind it, mask, prompts of the turns, calls."""
    results, calls = iter(episode["results"]), []
    prompt = form.prompt(episode["messages"])
    live = Unfinished(GenerateRequest(SAMPLE, tuple(prompt), Sampling(10**6), 0), tuple(prompt), False)
    prompts = []
    for turn in episode["turns"]:
        prompts.append([*live.prompt, *live.tokens])
        live.spoke(Completion(SAMPLE, tuple(turn), (0.0,) * len(turn), "stop", ((0, 0),)))
        made = parse(form.raw_text(turn))
        calls += [{"name": call.name, "arguments": call.arguments} for call in made]
        if made:
            live.sees(form.behind(turn[-1], [{"role": "tool", "name": c.name, "content": next(results)} for c in made]))
    mask = [int(any(start <= i < end for start, end in live.turns)) for i in range(len(live.tokens))]
    return {"prompt": prompt, "ids": live.tokens, "mask": mask, "prompts": prompts, "calls": calls}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Template -> (episodes, TRL's rows of them)."""
    place, episodes = tmp_path_factory.mktemp("trl"), {}
    for name in TRAINS_WITH:
        stock = make_tokenizer(name)
        stock.save_pretrained(place / name / "tokenizer")
        episodes[name] = [script(name, stock, seed) for seed in range(30)]
        (place / name / "episodes.json").write_text(json.dumps({"tools": TOOLS, "episodes": episodes[name]}))
    command = [str(interpreter()), str(HERE / "trl_loop.py"), *(str(place / name) for name in TRAINS_WITH)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (episodes[name], json.loads((place / name / "rows.json").read_text())) for name in TRAINS_WITH}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRAINS_WITH)
def test_an_episode_is_that_of_trls_loop(name, theirs):
    tokenizer = make_tokenizer(name, template(TRAINS_WITH[name]))
    form, parse = make_format(tokenizer, "chat", TOOLS), make_parser("auto", tokenizer)
    for episode, row in zip(*theirs[name], strict=True):
        assert ours(episode, form, parse) == row
