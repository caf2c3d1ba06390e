"""What a start refuses of episodes once it has asked the user's code, before it builds a model or an engine."""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from bytes_tokenizer import TEMPLATE, byte_tokenizer
from pool_parts import FILE, schemas
from refusals import check_golden

from mindspeed_rl_plugin.episodes import setup
from mindspeed_rl_plugin.episodes.environment_pool import EnvironmentPool
from mindspeed_rl_plugin.launch import launch, read_inputs

EPISODES = Path(__file__).parents[1] / "episodes"
IGNORES_TOOLS = TEMPLATE.replace("{% if tools %}", "{% if false %}")
READ = dict(create_attention_mask_in_dataloader=True, seed=1, padded_vocab_size=272, norm_epsilon=1e-5, rotary_base=1e4)
STEPS = {"--rl-reward": "environment"}  # an environment whose reward counts
GUESS = STEPS | {"--rl-environment": "verifiers:guess"}
# flags, template of the tokenizer; their messages: refusals.txt
BAD = {
    "a tool without hints": ({"--rl-tools": f"{FILE}:no_hint"}, TEMPLATE),
    "a tool with *args": ({"--rl-tools": f"{FILE}:stars"}, TEMPLATE),
    "two tools of one name": ({"--rl-tools": f"{FILE}:multiply {FILE}:multiply"}, TEMPLATE),
    "a class without tools and step": (STEPS | {"--rl-environment": f"{FILE}:Nothing"}, TEMPLATE),
    "one turn with a class of tools": (STEPS | {"--rl-environment": f"{FILE}:Shop", "--rl-max-turns": "1"}, TEMPLATE),
    "a parser that is none": ({"--rl-tools": f"{FILE}:multiply", "--rl-tool-parser": f"{FILE}:multiply"}, TEMPLATE),
    "a template without room for tools": ({"--rl-tools": f"{FILE}:multiply"}, IGNORES_TOOLS),
    "an interpreter that is none": (GUESS | {"--rl-environment-python": "/bin/echo"}, TEMPLATE),
    "verifiers that is not installed": (GUESS, TEMPLATE),
    "a URL without a server": (STEPS | {"--rl-environment": "openenv:http://127.0.0.1:1"}, TEMPLATE),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def made(monkeypatch):
    """What has processes. It is closed, and the job's variables are forgotten."""
    made, before = [], dict(os.environ)
    for module, name in ((setup, "EnvironmentPool"), (setup, "AgentEnvironments"), (read_inputs, "RewardPool")):
        make = getattr(module, name)
        noted = lambda *words, make=make, **named: made.append(make(*words, **named)) or made[-1]  # noqa: E731
        monkeypatch.setattr(module, name, noted)
    yield made
    for one in made:
        one.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def start(build, tokenizer, tmp_path, monkeypatch, made):
    """`start(flags, template)` is that of a job, up to its model or engine."""

    def built(*_, **__):
        raise AssertionError("a model or an engine is built")

    def run(flags, template):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2", "verifiers": {}}))
        args = build(
            {
                "--rl-apply-chat-template": "",
                "--rl-max-prompt-length": "48",
                "--rl-max-response-length": "16",
                "save": str(tmp_path / "out"),
                **flags,
            }
        )
        args = argparse.Namespace(**vars(args) | READ)
        launch.setup_model_and_optimizer(args, built, (), {})

    monkeypatch.setattr(EnvironmentPool, "_describe", schemas)  # else in a process that imports transformers first
    monkeypatch.setattr(launch.patching, "assert_in_force", lambda: None)
    monkeypatch.setattr(launch.run, "current", lambda: SimpleNamespace(before_model=built))
    return run


@pytest.mark.parametrize("case", BAD)
def test_refused_before_a_model_or_an_engine_is_built(start, tmp_path, case):
    flags, template = BAD[case]
    with pytest.raises(ValueError) as error:
        start(flags, template)
    head, *lines = str(error.value).splitlines()
    assert head == "RL cannot run:"
    lines = [line.removeprefix("  - ") for line in lines]
    check_golden(f"episodes: {case}", lines, FILE=FILE, FOLDER=tmp_path, PYTHON=sys.executable)
