"""Families of models from Hugging Face's files to Hugging Face's files: import, GRPO with an engine, export.

Log-probs of the first rollout, the engine's and the trainer's, are those of transformers' model, or where it has none
of a float64 model of our own; what is exported has the fields and the tensors of what was imported.
"""

import json

import pytest
import torch
from family_models import FAMILIES
from jobs import AGREEMENT
from safetensors.torch import load_file

from mindspeed_rl_plugin.engine.hf_config import compare_configs
from mindspeed_rl_plugin.monitor.dump import read_rollout
from mindspeed_rl_plugin.prompts.tokenizer import vocabulary
from mindspeed_rl_plugin.tools.convert import to_hf

pytestmark = pytest.mark.slow

GIVEN = {"qwen2_moe": "--moe-shared-expert-gate", "deepseek_v2": "--moe-router-pre-softmax"}
MOVED = 1e-5  # nats, least KL to the reference after an update


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deepseek_v2-lite"])  # core 0.19 builds none
def test_from_its_files_through_rl_to_its_files(job, arithmetic, imported, tmp_path, capsys, family):
    hf, back = tmp_path / "hf", tmp_path / "back"
    torch.manual_seed(0)
    spread = any("experts" in field for field in FAMILIES[family])
    model, loads, logps = imported(family, "--train", "tp1,ep2" if spread else "tp2")
    assert GIVEN.get(family, "") in model
    ends = {*range(0, 1 + max(vocabulary(arithmetic / "tokenizer").values()), 9)}
    (hf / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ends]}))
    generate = ("--rl-generate-tp", "2", *(("--rl-generate-ep", "2") if spread else ()))
    options = ("--train-iters", "2", "--rl-verify-weights", *loads, *generate)
    sequence = () if spread else ("--sequence-parallel",)
    done = job(*options, *sequence, model=model).dumping().run(900)
    done.check_agreement(2, MOVED)
    rows = read_rollout(sorted((done.run_dir.parent / "dump").glob("*.parquet"))[0])
    masks = (mask.bool() for mask in rows["loss_mask"].rows())
    said = [tokens[mask].tolist() for tokens, mask in zip(rows["tokens"].rows(), masks, strict=True)]
    assert not any(ends & {*tokens[:-1]} for tokens in said) and any(tokens[-1] in ends for tokens in said)
    worst = {name: 0.0 for name in ("logp_rollout", "logp_old")}
    for i, tokens in enumerate(rows["tokens"].rows()):
        mask = rows["loss_mask"].rows()[i].bool()
        theirs = logps(tokens.long())[:-1].gather(-1, tokens.long()[1:, None])[:, 0]
        for name in worst:
            ours = rows[name].rows()[i].double()
            worst[name] = max(worst[name], (ours[1:] - theirs)[mask[1:]].abs().max().item())
    print(f"{family}: engine and trainer differ from the reference by {worst}")
    assert max(worst.values()) < AGREEMENT
    assert to_hf.main(["--load", str(done.run_dir.parent), "--out", str(back)]) == 0, capsys.readouterr()
    given, exported = (json.loads((at / "config.json").read_text()) for at in (hf, back))
    assert compare_configs(exported, given) == []
    tensors = {name: t.shape for name, t in load_file(back / "model.safetensors").items()}
    assert tensors == {name: t.shape for name, t in load_file(hf / "model.safetensors").items()}
