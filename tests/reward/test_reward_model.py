"""A reward model as a grader, with tiny random ones: its scores, its tokenizer, what is refused before it is loaded."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stage_context import context_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from mindspeed_rl_plugin.checks import flag_checks
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.prompts import PromptStream, Renderer
from mindspeed_rl_plugin.reward import GradeItem, RewardError, RewardPool
from mindspeed_rl_plugin.reward import reward_model as model_module
from mindspeed_rl_plugin.reward.reward_model import RewardModel, same_tokenizer
from mindspeed_rl_plugin.reward.specs import parse_specs
from mindspeed_rl_plugin.rows import Ragged, Rows, SampleId
from mindspeed_rl_plugin.stages import prompts as prompts_stage
from mindspeed_rl_plugin.stages import reward as reward_stage

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789<>"
TEMPLATE = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"


def items(*responses, prompt, answer=""):
    return [GradeItem(prompt, r, answer, {}, SampleId(0, i // 2, i % 2)) for i, r in enumerate(responses)]


@pytest.fixture(scope="module")
def pool(decoder, encoder):
    with closing(RewardPool([f"model:{decoder}=0.5", "exact=2", f"model:{encoder}"], workers=1, timeout=60)) as pool:
        yield pool


def grade(specs, batch):
    with closing(RewardPool(specs, workers=1, timeout=60)) as pool:
        return pool.grade(batch)


def save_tokenizer(folder, letters=LETTERS, template=None, pad=False):
    """One token per letter; without `pad` the end is what a text may end with too."""
    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate([*letters, "[UNK]", "[PAD]"])}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", eos_token=">")
    own.pad_token = "[PAD]" if pad else own.eos_token
    own.chat_template = template
    own.save_pretrained(folder)
    return own


def save_model(folder, model, config, layers):
    torch.manual_seed(layers)
    sizes = dict(vocab_size=48, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2)
    model(config(**sizes, max_position_embeddings=40, num_labels=1, initializer_range=0.5)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "decoder"
    save_tokenizer(folder, template=TEMPLATE)
    return save_model(folder, LlamaForSequenceClassification, LlamaConfig, layers=2)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "encoder"
    save_tokenizer(folder, letters=LETTERS[::-1], pad=True)
    return save_model(folder, BertForSequenceClassification, BertConfig, layers=1)


def copied(folder, target):
    return Path(shutil.copytree(folder, target, dirs_exist_ok=True))


def alone(folder, text):
    """Score of one text, without any padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.no_grad():
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        return float(model(input_ids=ids).logits[0, 0])


def test_scores_of_two_models_beside_a_rule(pool, decoder, encoder):
    """Groups of unlike lengths, one text that ends like padding; each model reads text by a tokenizer of its own."""
    responses = ["a1", "the answer is 7", "b>", "0"]
    got = pool.grade(items(*responses, prompt="x", answer="0"))
    for response, grade in zip(responses, got, strict=True):
        want = [alone(decoder, f"<u>x<a>{response}"), float(response == "0"), alone(encoder, f"x{response}")]
        assert grade.parts == pytest.approx(want, abs=1e-5) and grade.error is None
        assert grade.total == pytest.approx(0.5 * want[0] + 2 * want[1] + want[2], abs=1e-5)
    assert len({round(g.parts[0], 4) for g in got}) == 4 and len({round(g.parts[2], 4) for g in got}) == 4


def test_chat_messages_keep_their_turns(pool, decoder, encoder, tmp_path):
    """From a file of messages to the score, by the model's own template; a model without one reads their text."""
    asked = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": "7"}) + "\n" for p in (asked, "hi")))
    policy = save_tokenizer(tmp_path / "policy", template="{{ messages[-1]['content'] }}")
    renderer = Renderer(policy, "prompt", "answer", chat_template=True)
    prompts = PromptStream([str(tmp_path / "a.jsonl")], renderer, max_length=9, seed=0).all()
    meta = prompts_stage.prompt_rows(0, prompts)["meta"]
    replies = {
        "tokens": Ragged.from_rows([torch.tensor(policy.encode(r), dtype=torch.int32) for r in ("7", "42")]),
        "loss_mask": Ragged.from_rows([torch.ones(n, dtype=torch.uint8) for n in (1, 2)]),
    }
    rows = Rows((SampleId(0, 0, 0), SampleId(0, 1, 0)), {"meta": meta, **replies})
    decode = lambda ids: "".join(policy.convert_ids_to_tokens(ids))  # noqa: E731
    stage = reward_stage.Reward(reward_stage.spec(3), context_of(graders=pool, decode=decode))
    parts = stage.compute(rows)["reward_parts"]
    want = [alone(decoder, "<s>be<u>hi<a>7"), 1.0, alone(encoder, "system: be\n\nuser: hi7")]
    assert parts[0].tolist() == pytest.approx(want, abs=1e-5)
    want = [alone(decoder, "<u>hi<a>42"), 0.0, alone(encoder, "hi42")]
    assert parts[1].tolist() == pytest.approx(want, abs=1e-5)


SAID = [
    {"role": "assistant", "content": "c", "turn": [1, 2], "reward": 0.5, "seconds": 0.25},
    {"role": "tool", "name": "f", "content": "7", "seconds": 0.5},
    {"role": "assistant", "content": "42", "turn": [3, 4], "reward": 0.0},
]


@pytest.mark.parametrize(
    ("asked", "by_template", "as_text"),
    [
        ([{"role": "user", "content": "hi 1"}], "<u>hi 1", "hi 1"),
        (
            [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
            "<s>be<u>hi",
            "system: be\n\nuser: hi",
        ),
    ],
)
def test_of_an_episode_the_whole_conversation_is_scored(pool, decoder, encoder, asked, by_template, as_text):
    """And not its last turn as if it answered the prompt; among samples that are none."""
    data = asked if len(asked) > 1 else None
    (item,) = items("42", prompt="hi", answer="7")
    got = [grade.parts for grade in pool.grade([replace(item, messages=data, conversation=[*asked, *SAID]), item])]
    assert got[0][0] == pytest.approx(alone(decoder, f"{by_template}<a>c<t>7<a>42"), abs=1e-5)
    assert got[0][2] == pytest.approx(alone(encoder, f"{as_text}c742"), abs=1e-5)
    assert got[1][0] == pytest.approx(alone(decoder, "<u>hi<a>42"), abs=1e-5)


def test_a_template_that_refuses_a_conversation_is_named(decoder, tmp_path):
    strict = "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' or m.seconds }}{% endfor %}"
    save_tokenizer(copied(decoder, tmp_path), template=strict)
    with pytest.raises(ValueError, match="refuses .* the roles assistant tool assistant: no tools; give"):
        RewardModel(str(tmp_path), "cpu")(["p"], ["42"], [None], [SAID])


@pytest.mark.slow
def test_a_text_beyond_the_models_positions_is_a_failure_not_a_cut(decoder):
    with pytest.raises(RewardError, match="56 tokens, .* 40; .*--rl-max-prompt-length"):
        grade([f"model:{decoder}"], items("a" * 49, prompt="x"))


@pytest.mark.slow
def test_missing_weights_are_not_drawn_at_random(decoder, tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(decoder)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"cannot be loaded: /.* score.weight"):
        grade([f"model:{tmp_path}"], [])


@pytest.mark.parametrize(
    ("changes", "gone", "message"),
    [
        ({}, "config.json", "no config.json"),
        ({"architectures": ["LlamaForCausalLM"]}, None, "LlamaForCausalLM"),
        ({"id2label": {"0": "a", "1": "b"}}, None, "2 labels"),
        ({}, "tokenizer*", "it has no tokenizer"),
        ({}, "*.safetensors", "it has no weights"),
    ],
)
def test_what_is_no_reward_model_is_refused_by_its_files(decoder, tmp_path, changes, gone, message):
    copied(decoder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in tmp_path.glob(gone) if gone else ():
        file.unlink()
    with pytest.raises(ValueError, match=f"reward model:{tmp_path}: ") as error:
        parse_specs([f"model:{tmp_path}=0.5"], None)
    assert message in str(error.value)


def test_a_tokenizer_beyond_the_embedding_is_refused_with_both_sizes(decoder, tmp_path):
    other = LETTERS + "".join(map(chr, range(200, 220)))
    save_tokenizer(copied(decoder, tmp_path), letters=other, template=TEMPLATE)
    with pytest.raises(ValueError, match=f"model:{tmp_path}: .* up to 60, .* 48 rows"):
        RewardModel(str(tmp_path), "cpu")


def test_special_tokens_beyond_the_embedding_are_refused_only_in_a_text(decoder, tmp_path):
    """A pad token that was added beyond the embedding pads nothing: another id does, and scores stay the unpadded."""
    own = save_tokenizer(copied(decoder, tmp_path), template=TEMPLATE)
    own.add_tokens([f"<{i}>" for i in range(8)], special_tokens=True)
    own.add_special_tokens({"pad_token": "<pad>"})
    own.save_pretrained(tmp_path)
    assert own.pad_token_id == 49 and parse_specs([f"model:{tmp_path}"], None)
    score = RewardModel(str(tmp_path), "cpu")
    texts = ["a1", "the answer is 7", "b>", "ba"]  # ">" is the end, "a" has the id 0
    got = score(["x"] * 4, texts, [None] * 4)
    assert got == pytest.approx([alone(tmp_path, f"<u>x<a>{text}") for text in texts], abs=1e-5)
    assert len({round(value, 4) for value in got}) == 4
    with pytest.raises(ValueError, match="'<7>' with the id 48"):
        score(["x"], ["<7>"], [None])


def test_texts_that_use_every_id_are_scored_one_by_one(decoder, monkeypatch):
    score = RewardModel(str(decoder), "cpu")
    assert model_module._padding([[0, 2], [1]], (49, 0), 3) is None
    assert model_module._padding([[0, 1]], (49, 0), 4) == 2 and model_module._padding([[1]], (49, 0), 4) == 0
    monkeypatch.setattr(model_module, "_padding", lambda rows, own, size: None)
    texts = ["a1", "the answer is 7"]
    got = score(["", ""], texts, [None, None])
    assert got == pytest.approx([alone(decoder, f"<u><a>{text}") for text in texts], abs=1e-5)


@pytest.mark.parametrize("cut", [4, 60, -1], ids=["no header", "within the header", "the last byte"])
def test_weights_that_are_not_whole_are_named(decoder, tmp_path, cut):
    file = copied(decoder, tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    with pytest.raises(ValueError, match=f"model:{tmp_path}: .* model.safetensors ") as error:
        parse_specs([f"model:{tmp_path}"], None)
    assert f" of {file.stat().st_size} bytes" in str(error.value) and "copy it again" in str(error.value)


def test_another_tokenizer_is_said_at_the_start(decoder, encoder, tmp_path, monkeypatch):
    save_tokenizer(tmp_path, template=None)
    assert same_tokenizer(str(decoder), str(tmp_path)) and not same_tokenizer(str(encoder), str(tmp_path))
    graders = ("math", f"model:{decoder}", f"model:{encoder}=2")
    config = replace(RLConfig(), reward=replace(RLConfig().reward, reward=graders))
    monkeypatch.setattr(flag_checks.RLConfig, "from_args", lambda args: config)
    monkeypatch.setattr(flag_checks, "tokenizer_path", lambda args: str(tmp_path))
    (line,) = flag_checks.warnings(SimpleNamespace())
    assert line.startswith("reward 'encoder' has another tokenizer")
    config = replace(config, episodes=replace(config.episodes, environment="a.py:A"))
    _, line = flag_checks.warnings(SimpleNamespace())
    assert "lacks the reward of --rl-environment a.py:A" in line
