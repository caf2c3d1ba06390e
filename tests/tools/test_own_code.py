"""Export writes a tokenizer whole and loads it; code of its own runs with --rl-trust-remote-code alone."""

import dataclasses
import json
import math

import pytest
from own_tokenizer import write
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from mindspeed_rl_plugin.checks.flag_checks import _code_of_rewards
from mindspeed_rl_plugin.config import RLConfig
from mindspeed_rl_plugin.config.run_flags import DataConfig, RewardConfig
from mindspeed_rl_plugin.prompts.tokenizer import load_tokenizer, vocabulary_digest
from mindspeed_rl_plugin.reward.grader_process import _load
from mindspeed_rl_plugin.reward.specs import Spec

TRUST = "--rl-trust-remote-code"


@pytest.fixture(scope="module", autouse=True)
def copies(tmp_path_factory):
    """Where transformers copies code before it runs it: not in the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture
def own(tmp_path):
    """The directory of a tokenizer with code of its own, and with what else may lie there."""
    folder = write(tmp_path / "own")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    of_training = ("trainer_state.json", "a.distcp", "a.ckpt", "a.npz", "a.parquet", "a.tar.gz", "core.12", "a.zip")
    of_model = ("model.safetensors", "model.safetensors.bak", "pytorch_model.bin", "README.md", ".gitattributes")
    for name in (*of_model, *of_training, "events.out.tfevents.1"):
        (folder / name).write_text("of the model")
    return folder


def test_code_of_a_tokenizers_own_runs_where_it_is_trusted(own):
    with pytest.raises(ValueError, match=rf"code of its own \(own_tokens.OwnTokenizer\), which is not run.*{TRUST}"):
        load_tokenizer(str(own))
    tokenizer = load_tokenizer(str(own), trust_remote_code=True)
    assert tokenizer.encode("1+1=") == [17, 11, 17, 29] and tokenizer.eos_token_id == 96
    assert len(vocabulary_digest(str(own), True)) == 16
    (own / "own_ids.py").write_text("import no_such_package")
    with pytest.raises(ValueError, match="no tokenizer can be loaded from .* No module named 'no_such_package'"):
        load_tokenizer(str(own), trust_remote_code=True)


def test_a_reward_model_with_code_of_its_own_runs_where_it_is_trusted(own):
    (own / "model.safetensors").unlink()
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    LlamaForSequenceClassification(LlamaConfig(vocab_size=97, **sizes)).save_pretrained(own)
    (own / "own.py").write_text(
        "from transformers import LlamaForSequenceClassification as OwnForSequenceClassification"
    )
    config = json.loads((own / "config.json").read_text())
    named = {"auto_map": {"AutoModelForSequenceClassification": "own.OwnForSequenceClassification"}}
    (own / "config.json").write_text(json.dumps(config | named))
    given = dataclasses.replace(RLConfig(), reward=RewardConfig(reward=(f"model:{own}",)))
    tokenizer, model = _code_of_rewards(None, given)
    assert "own_tokens" in tokenizer and "own.Own" in model and TRUST in model
    trusting = dataclasses.replace(given, data=DataConfig(trust_remote_code=True))
    assert not [*_code_of_rewards(None, trusting)]
    spec = Spec("own", f"model:{own}", file=str(own))
    (score,) = _load(spec, None, "cpu", True).function(["1+1="], ["2"], [None])
    assert math.isfinite(score)


def test_a_tokenizer_is_exported_whole(convert, own):
    convert.make("qwen2", eos_token_id=96)
    convert.imported("tp2")
    (own / "notes.dat").write_bytes(b"1" * 3000)
    convert.exported("--tokenizer", own)
    assert "note: also copied (0.003 MB): notes.dat\n" in convert.said
    (convert.back / "notes.dat").unlink()
    assert "tokenizer was copied but not loaded, and so not checked: it has code of its own" in convert.said
    ours = {f"model{end}" for end in (".safetensors",)} | {"config.json", "generation_config.json"}
    theirs = {"tokenizer_config.json", "own.model", "own_tokens.py", "own_ids.py", "chat_template.jinja"}
    assert {file.name for file in convert.back.iterdir()} == ours | theirs | {"additional_chat_templates"}
    loaded = AutoTokenizer.from_pretrained(convert.back, trust_remote_code=True)
    assert loaded.encode("1+1=") == [17, 11, 17, 29] and loaded.chat_template["tools"] == "{{ tools }}"
    convert.back = convert.back.with_name("checked")
    convert.exported("--tokenizer", own, TRUST)
    assert "not loaded" not in convert.said


def test_what_cannot_be_loaded_is_no_export(convert, own, monkeypatch):
    """Known before the weights are written, and nothing is left."""
    convert.make("qwen2")
    convert.imported("tp2")
    (own / "own.model").unlink()
    config = json.loads((convert.hf / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"layer_types": 5}))
    monkeypatch.setattr("mindspeed_rl_plugin.tools.convert.to_hf.write_shards", None)
    convert.exported("--tokenizer", own, TRUST, refused="no tokenizer can be loaded")
    convert.exported("--config", own, TRUST, refused="config.json cannot be loaded")
    assert not convert.back.exists()


def test_a_model_type_that_transformers_has_not_is_said(convert):
    convert.make("bailing_moe")
    convert.imported("tp1")
    convert.exported()
    assert "config.json was not loaded, and so not checked: transformers has no model_type 'bailing" in convert.said
