"""Models as MindSpeed-LLM's own specs build them, by its own launch scripts: log-probs of engine and trainer are those
of the model that `export` publishes.

The scripts are rehearsed in float32, which Megatron's grouped experts do not have, and nothing is learned: the
checkpoint has the weights that sampled.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_models import ling_logps, transformers_logps
from jobs import AGREEMENT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mindspeed_rl_plugin.monitor.dump import read_rollout
from mindspeed_rl_plugin.monitor.run_files import read_jsonl
from mindspeed_rl_plugin.tools.convert import to_hf

pytestmark = [pytest.mark.slow, pytest.mark.upstream, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
CHECKOUTS = ("MINDSPEED_PATH", "MINDSPEED_LLM_PATH")
GROUPS = "tests/pipeline/legacy/deepseek2/deepseek_v2_mcore_tp1_pp1_ep8.sh"  # of experts; it wants two ranks
SCRIPTS = {
    "examples/mcore/deepseek2_lite/pretrain_deepseek2_lite_16b_ptd_8p.sh": "YaRN, no query compression",
    "examples/mcore/deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh": "split projections, a layer without effect, MTP",
    "examples/mcore/glm45-air/pretrain_glm45_air_106b_4k_A3_ptd.sh": "half of a head rotated, MTP",
    "examples/mcore/kimi2/pretrain_kimi2_18b_4k_8p_ptd.sh": "YaRN, a biased router",
    "examples/mcore/ling_v2/pretrain_ling_mini_16b_4k_ptd.sh": "stacked queries, keys and values, MTP",
    "examples/mcore/magistral/pretrain_magistral_small_24b_A3_ptd.sh": "heads of a size of their own",
    "examples/mcore/seed_oss/pretrain_seed_oss_36b_ptd_2k_A3.sh": "biases of queries, keys and values",
    "tests/poc/mixtral_8x7b/pretrain_mixtral_8x7b_4k_256die_A3_ptd.sh": "experts without shared ones",
    GROUPS: "groups of experts, ranked by their best one",
    "tests/poc/qwen2_moe/pretrain_qwen2_57b_a14b_4k_64die_A3.sh": "--shared-expert-gate",
}
# --moe-router-load-balancing-type: pai_megatron_aux_loss, group_limited_greedy, softmax_topk, none with a bias.
ROUTERS = [script for script in SCRIPTS if re.search("deepseek2_lite|ep8|qwen2_57b|deepseek3", script)]
REPLAY = "--rl-router-replay rollout"
# Virtual pipelines in the place of a script's own schedule: what is taken out of it, and put in for two ranks.
VIRTUAL = {
    "examples/mcore/deepseek3/pretrain_deepseek3_671b_4k_A3_ptd.sh": (
        ("--schedules-method dualpipev", "--moe-fb-overlap", "--q-lora-rank 1536"),
        "--tensor-model-parallel-size 1 --overlap-grad-reduce",
    ),
    "examples/mcore/glm45-air/pretrain_glm45_air_106b_4k_A3_ptd.sh": ((), ""),
}
# Taken out: what needs bfloat16, or grouped experts, which have no float32; tokens that are spread evenly whatever the
# router says.
WITHOUT = """
    --bf16 --reuse-fp32-param --router-gating-in-fp32 --moe-grouped-gemm --moe-tp-extend-ep --moe-alltoall-overlap-comm
    --moe-allgather-overlap-comm --gemm-gradient-accumulation-fusion --fix-router
"""
NOTHING_LEARNED = "--lr 0 --min-lr 0 --moe-router-bias-update-rate 0"
RL = "--rl-algorithm grpo --rl-prompt-data P --rl-reward math --rl-samples-per-prompt 8 --rl-max-prompt-length 512"


def published_model(folder):
    """What gives log-probs of the model in these files."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "bailing_moe":
        return ling_logps(config, load_file(folder / "model.safetensors"))
    return transformers_logps(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def checkouts(script: str) -> dict[str, str]:
    """The last pair of MindSpeed and MindSpeed-LLM that has the script."""
    mindspeed, llm = (os.environ.get(name, "").split(os.pathsep) for name in CHECKOUTS)
    pairs = [pair for pair in zip(mindspeed, llm, strict=False) if Path(pair[1], script).is_file()]
    if not pairs:
        pytest.skip(f"no pair of {' and '.join(CHECKOUTS)} with {script}")
    return dict(zip(CHECKOUTS, pairs[-1], strict=True))


def rehearsed(
    script: Path, scratch: Path, env: dict[str, str], ranks: int = 1, without: tuple[str, ...] = (), more: str = ""
) -> Path:
    """The folder of a rehearsal: checkpoints and dumps. env: which checkouts; without, more: flags of the script."""
    text, copy = script.read_text(), scratch / script.name
    for flag in (*WITHOUT.split(), *without):
        text = text.replace(f"{flag} ", " ").replace(f"{flag}\n", "\n")
    copy.write_text(re.sub(r"\S+/pretrain_gpt.py", "pretrain_gpt.py", text))
    command = [sys.executable, "-W", "ignore", "-m", "mindspeed_rl_plugin", "rehearse", str(copy)]
    command += ["--ranks", str(ranks), "--keep", "--timeout", "250", "--"]
    command += [*RL.split(), *NOTHING_LEARNED.split(), *more.split()]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | env | {"PYTHONPATH": path, "TMPDIR": str(scratch)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(scratch.glob("rehearse-*"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_the_model_that_its_makers_publish(script, tmp_path, capsys):
    env = checkouts(script)
    ranks = 2 if script == GROUPS else 1
    check(script, rehearsed(Path(env[CHECKOUTS[1]], script), tmp_path, env, ranks), tmp_path, capsys)


@pytest.mark.parametrize("script", VIRTUAL)
def test_a_script_with_a_virtual_pipeline_does_too(script, tmp_path, capsys):
    """Split projections without query compression, a layer without effect, MTP with gradients that are sent early; half
    of a head rotated."""
    env, (without, more) = checkouts(script), VIRTUAL[script]
    more += " --num-layers-per-virtual-pipeline-stage 1"
    folder = rehearsed(Path(env[CHECKOUTS[1]], script), tmp_path, env, 2, without, more)
    check(script, folder, tmp_path, capsys)


@pytest.mark.parametrize("script", ROUTERS)
def test_a_scripts_router_takes_the_experts_of_the_engine(script, tmp_path, capsys):
    """Each kind of MindSpeed-LLM's own router proves at its first call that it takes other experts than its own."""
    env = checkouts(script)
    folder = rehearsed(Path(env[CHECKOUTS[1]], script), tmp_path, env, 2 if script == GROUPS else 1, (), REPLAY)
    check(script, folder, tmp_path, capsys)
    trained = [line for line in read_jsonl(folder / "save" / "rl" / "metrics.jsonl") if "grad_norm" in line]
    assert trained and all(line["router/differ"] < 0.02 for line in trained)


def check(script: str, folder: Path, tmp_path: Path, capsys) -> None:
    """Log-probs of a rehearsal's engine and trainer against those of the model that `export` publishes."""
    back = tmp_path / "hf"
    assert to_hf.main(["--load", str(folder / "save"), "--out", str(back)]) == 0, capsys.readouterr()
    logps = published_model(back)
    worst = {name: 0.0 for name in ("logp_rollout", "logp_old")}
    for dump in (folder / "rl-dump-dir").glob("*.parquet"):
        rows = read_rollout(dump)
        for i, tokens in enumerate(map(torch.Tensor.long, rows["tokens"].rows())):
            theirs = logps(tokens)[:-1].gather(-1, tokens[1:, None])[:, 0]
            mask = rows["loss_mask"].rows()[i].bool()[1:]
            for name in worst:
                ours = rows[name].rows()[i].double()[1:]
                worst[name] = max(worst[name], (ours - theirs)[mask].abs().max().item())
    print(f"{script}: engine and trainer differ from the published model by {worst}")
    assert 0 < max(worst.values()) < AGREEMENT
