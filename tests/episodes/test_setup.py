"""What an engine is told of episodes: files by their absolute paths, and the tokens that end a turn."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.episodes.pool import EnvironmentPool
from mindspeed_rl_plugin.episodes.protocol import EpisodeError
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def setup_of(chat: bool = True, **flags) -> EpisodeSetup:
    config = RLConfig(episodes=EpisodeConfig(**flags))
    data = dataclasses.replace(config.data, apply_chat_template=chat)
    return EpisodeSetup.of(dataclasses.replace(config, data=data), "tokenizer")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("my/a.py:A", "{here}/my/a.py:A"),
        ("verifiers:gsm8k", "verifiers:gsm8k"),
        ("verifiers:my/e.toml", "verifiers:{here}/my/e.toml"),
        ("openenv:http://h:8000", "openenv:http://h:8000"),
        ("my/a.py", "my/a.py"),
    ],
)
def test_files_are_known_by_their_absolute_paths(given: str, kept: str) -> None:
    setup = setup_of(environment=given, tools=("t.py:f",))
    assert setup.flags.environment == kept.format(here=Path.cwd()) and setup.flags.tool_parser == "auto"
    assert setup.flags.tools == (f"{Path.cwd()}/t.py:f",)
    assert EpisodeSetup.from_fields(json.loads(json.dumps(dataclasses.asdict(setup)))) == setup


def test_a_file_without_a_name_in_it_is_refused_as_it_was_given() -> None:
    setup = setup_of(tools=("my/a.py",))
    with pytest.raises(EpisodeError, match=r"--rl-tools 'my/a.py'"):
        EnvironmentPool(setup.flags.tools, None, workers=1, timeout=1, wait_timeout=9)


@pytest.mark.parametrize(
    ("eos", "chat", "more"), [("<eos>", True, (3,)), ("<|im_end|>", True, ()), ("<eos>", False, ())]
)
def test_a_turn_also_ends_where_the_chat_template_ends_it(eos: str, chat: bool, more: tuple[int, ...]) -> None:
    """A base model's tokenizer has another end than its template."""
    words = {word: i for i, word in enumerate(["?", "<eos>", "<|im_start|>", "<|im_end|>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*words][1:])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, chat_template=CHATML)
    assert setup_of(chat, environment="a.py:A").ends(fast, SimpleNamespace(tools=())) == more
