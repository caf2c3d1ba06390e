"""MindSpeed-LLM converts Hugging Face weights at a start, and checkpoints after a save; RL starts and resumes there.

The checkouts come from MEGATRON_LM_PATH, MINDSPEED_PATH and MINDSPEED_LLM_PATH; the last two may name several, in the
same order. What MindSpeed-LLM imports and this environment lacks (peft) gets the rehearsal's stand-ins.
"""

import json
import os
import shutil

import pytest
import torch
from checkouts import checkouts, cores
from safetensors.torch import load_file

from mindspeed_rl_plugin.tools.patch import SCRIPT

SIZES = dict(vocab_size=4224, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
SIZES |= dict(num_key_value_heads=2, head_dim=32, max_position_embeddings=32, tie_word_embeddings=False)
FLAGS = "--qk-layernorm --kv-channels 32 --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2"
FLAGS += " --spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec"
FLAGS += " --no-create-attention-mask-in-dataloader --use-mcore-models --save-interval 2"
HF2MG = "--enable-hf2mg-convert --model-type-hf qwen3"


def has(llm, flag):
    return flag in (llm / "mindspeed_llm/features_manager/convert_checkpoint/convert_checkpoint.py").read_text()


@pytest.fixture
def hugging_face(megatron):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    folder = megatron.folder / "hf"
    shutil.rmtree(folder, ignore_errors=True)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "rope_theta": 10000.0}))
    return folder


@pytest.mark.upstream
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("i", range(max(1, len(checkouts("MINDSPEED_LLM_PATH")))))
def test_weights_are_converted_at_a_start_and_for_a_resume_only_where_its_reference_is_gone(megatron, hugging_face, i):
    mindspeed, llm = (checkouts(name)[i] for name in ("MINDSPEED_PATH", "MINDSPEED_LLM_PATH"))
    core = cores()["0.12"]
    path = os.pathsep.join(map(str, (core, mindspeed, llm, *filter(None, [os.environ.get("PYTHONPATH")]))))
    save = megatron.folder / f"out-{i}"
    back = ["--enable-mg2hf-convert", "--hf-cfg-dir", str(hugging_face)] if has(llm, "enable-mg2hf") else []
    flags = [*FLAGS.split(), *HF2MG.split(), *back, "--save", str(save)]

    def run(*flags):
        return megatron(*flags, "--load", str(hugging_face), rl=True, script=llm / SCRIPT, env={"PYTHONPATH": path})

    whole = run(*flags)
    assert [e["event"] for e in whole.events] == ["before_model", "reference", "start"] + ["step"] * 4
    cache = hugging_face / "megatron_cache_tp2pp1ep1"
    assert f"converts --load {hugging_face} to {cache}" in whole.log
    weights = load_file(hugging_face / "model.safetensors")
    for rank in (0, 1):
        file = cache / "iter_0000001" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)["model"]
        down = weights["model.layers.1.mlp.down_proj.weight"].chunk(2, dim=1)[rank]
        assert torch.equal(state["decoder.layers.1.mlp.linear_fc2.weight"].float(), down)
    for iteration in (2, 4) if back else ():
        shards = (save / f"mg2hf_iteration{iteration}").glob("*.safetensors")
        assert {name for file in shards for name in load_file(file)} == set(weights)

    for gone in (False, True):
        shutil.rmtree(save / "iter_0000004")
        (save / "latest_checkpointed_iteration.txt").write_text("2")
        if gone:
            shutil.rmtree(cache)
        resumed = run(*flags)
        assert (f"--load {hugging_face} is not converted" in resumed.log) != gone
        assert [e["event"] for e in resumed.events] == ["before_model", "reference", "state", "start", "step", "step"]
        assert resumed.of("reference") == whole.of("reference") and resumed.of("step") == whole.of("step")[2:]
    # 26.1.0 turns both conversions on by itself where --load holds safetensors; that folder may be read-only.
    other, last = (megatron.folder / f"{name}-{i}" for name in ("elsewhere", "last"))
    shutil.rmtree(cache)
    where = "--mg-save-dir" if has(llm, "--mg-save-dir") else "--mg-cache-dir"  # 2.3.0, but not its branch of today
    how = f"--model-type-hf qwen3 --only-convert-last-checkpoint {where}" if back else f"{HF2MG} {where}"
    itself = run(*f"{FLAGS} {how} {other} --save {last}".split())
    assert f"converts --load {hugging_face} to {other}" in itself.log and not cache.exists()
    assert itself.of("reference") == whole.of("reference") and itself.of("step") == whole.of("step")
    assert [folder.name for folder in last.glob("mg2hf_iteration*")] == (["mg2hf_iteration4"] if back else [])
