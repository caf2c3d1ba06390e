"""What `plan` says: what does not fit, what its columns and Eq. 3 are made of, and its errors."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_rl_plugin.config.run_flags import LoraConfig
from mindspeed_rl_plugin.layout.layout import EngineParallel, Parallel
from mindspeed_rl_plugin.tools.layout_args import model_shape
from mindspeed_rl_plugin.tools.plan import plan
from mindspeed_rl_plugin.tools.plan.estimate import PlannedRun, TrainerBytes, estimate

ROOT = Path(__file__).parents[2]
CONFIG = dict(model_type="qwen2", vocab_size=250, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
CONFIG |= dict(num_attention_heads=4, num_key_value_heads=2)
SEVEN = ["--model", "qwen2.5-7b", "--train", "tp4,dp2", "--generate", "tp4"]


def printed(capsys, *argv):
    assert plan.main(list(argv)) == 0
    return capsys.readouterr().out


def test_a_plan_needs_no_megatron(tmp_path):
    """Of a reshard, of a script with RL flags, and of the dock, whose columns are those of the stages; nothing but the
    plan is printed, such as a warning of what Megatron misses."""
    script = tmp_path / "train.sh"
    script.write_text(f"bash {ROOT}/examples/launch.sh --rl-algorithm ppo")
    plans = (SEVEN, [str(script), "--vocab", "250"], ["--dock"])
    plans = "; ".join(f"assert plan.main({argv!r}) == 0" for argv in plans)
    code = f"import sys; from mindspeed_rl_plugin.tools.plan import plan; {plans}"
    check = "; sys.exit(sorted({'megatron', 'vllm', 'tensordict'} & sys.modules.keys()) or None)"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_does_not_fit_is_marked_in_every_phase(capsys):
    mark = "(does not fit)"

    def memory(device):
        """The first table's row of each mode."""
        lines = printed(capsys, *SEVEN, "--device-gb", device).splitlines()
        return {mode: next(line for line in lines if line.startswith(mode)) for mode in ("stream", "allgather")}

    rows = memory("16")
    assert rows["stream"].split(mark)[0].split() == ["stream", "22.85"] and rows["stream"].count(mark) == 1
    assert rows["allgather"].count(mark) == 2
    rows = memory("7.6")
    assert rows["allgather"].count(mark) == 2 and rows["stream"].split(mark)[2].split() == ["3.81", "3.79"]
    assert mark not in printed(capsys, *SEVEN)


def test_a_plan_ends_with_a_conclusion(capsys):
    """By hand: 15.23 GB over tp4 are 3.81 a device; the update has 6 times as much, 22.85."""

    def last(*argv):
        return printed(capsys, *argv).splitlines()[-1]

    assert last(*SEVEN) == "fits 64 GB: yes, 60.2 GB left for the KV cache and the engine's working memory"
    assert last(*SEVEN, "--device-gb", "22.8").startswith("fits 22.8 GB: no, the update needs 22.85 GB per device")
    assert "not with --rl-reshard allgather" in last(*SEVEN[:4], "--generate", "tp2", "--device-gb", "24")


def test_columns_and_equation_3_are_explained(capsys):
    """Of 15.23 GB tp4 holds 3.81 a device; the engine the same, so that nothing is in flight."""
    out = printed(capsys, *SEVEN)
    assert "reshard peak: weights 3.81, engine's weights 3.81, and in allgather the complete model 15.23, in " in out
    assert "= 7.62 GB of redundant weights in all, R / GDP = 3.81 GB" in out
    assert "offload of the weights: 0.15 s" in out  # 3.81 GB at 25 GB/s
    assert "stream receives nothing" in out and "times" not in out
    assert "critic" not in out and "critic's weights 3.54" in printed(capsys, *SEVEN, "--critic")
    assert " 2 GB/s from a node" in printed(capsys, *SEVEN, "--far", "2")


def test_host_memory_of_a_machine(capsys):
    """By hand: 7.616e9 parameters over tp4; of eight ranks each offloads 2 bytes and half of 12 a parameter."""
    out = printed(capsys, *SEVEN)
    line = next(line for line in out.splitlines() if line.startswith("host memory"))
    numbers = [float(word) for word in re.findall(r" (\d+\.\d+)", line)]
    total, state, reference = numbers
    assert state == pytest.approx(8 * (2 + 6) * 7.616 / 4, rel=1e-3)
    assert reference == pytest.approx(8 * 3.808, rel=1e-3)
    assert total == pytest.approx(sum(numbers[1:]), abs=0.02)
    assert "machine of 8 ranks" in line and "not counted: the dock" in line


def test_with_lora_a_device_has_state_of_factors_only():
    """By hand: tensor parallel ranks split B of q, k, v, gate, up, and A of o, down; weights are merged one by one."""
    shape, width, kv, ffn = model_shape("qwen2.5-7b", 4), 3584, 512, 18944
    run = PlannedRun(shape, Parallel(8, tp=4))
    whole, lora = (estimate(replace(run, lora=each), EngineParallel(4), 2) for each in (LoraConfig(), LoraConfig(16)))
    factors = 16 * 28 * (5 * width + (width + 2 * kv + 2 * ffn) // 4 + (width + ffn) // 4 + 2 * width)
    merged = 2 * width * ffn // 4 + (256 << 20)  # gate and up of a layer, and two buckets of 2 bytes an element
    weights = whole.policy.weights + 2 * factors
    assert lora.policy == TrainerBytes(weights, 4 * factors, 12 * factors // 2, 0, 2 * merged)
    assert lora.peak("stream") == whole.peak("stream") + 2 * factors + 2 * merged
    assert lora.whole_training.policy == whole.policy and whole.policy.merged == 0


def test_state_of_experts_factors_is_spread_over_fewer_ranks():
    """Two data parallel ranks with 64 experts each, of which no rank has a copy."""
    run = PlannedRun(replace(model_shape("qwen3-30b-a3b", 1), layers=2), Parallel(2, ep=2), lora=LoraConfig(4))
    attention = 4 * 2 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    experts = 4 * 2 * 64 * 3 * (2048 + 768)
    policy = estimate(run, EngineParallel(1), 2).policy
    assert (policy.gradients, policy.optimizer) == (4 * (attention + experts), 12 * (attention // 2 + experts))


def test_what_lora_trains_saves_and_merges(capsys):
    """By hand: 16 x (rows + columns) of all matrices; a checkpoint has 14 bytes of each. Without LoRA a host has a
    reference (30.46 GB) and more offloaded state, too."""
    out = printed(capsys, *SEVEN, "--lora-rank", "16")
    kinds = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert f"rank 16, scale 1: 196 matrices ({kinds}), 40,370,176 of 7,655,986,688 parameters are trained; a ref" in out
    assert "saves 18.82 GB of gradients and optimizer per device, per host 120.67; a che" in out
    assert "takes about 0.57 instead of 106.62\n" in out and "also has at most 0.60 GB of merged weights;" in out
    assert "copy of the reference" not in out and "weights 3.85, merged weights 0.60, engine's weights 3.81" in out
    last = printed(capsys, *SEVEN, "--lora-rank", "16", "--generate-first", "8", "--device-gb", "4.5").splitlines()[-1]
    assert last.startswith("fits 4.5 GB: no, the check of merged weights before a checkpoint needs 4.64 GB per device")


def test_engines_need_no_tp(capsys):
    assert "engines 16 x (tp1 ep1: 1 ranks)" in printed(
        capsys, "--model", "qwen2.5-32b", "--train", "tp8,dp2", "--generate", "dp16"
    )
    experts = ["--model", "qwen3-30b-a3b", "--train", "tp2,ep2,dp2", "--generate"]
    assert "engines 2 x (tp1 ep2: 2 ranks)" in printed(capsys, *experts, "ep2")
    for words, message in (("dp2", "dp2 is wrong; 4 ranks: "), ("ep3", "4 ranks are no multiple of the 3")):
        assert plan.main([*experts, words]) == 1
        err = capsys.readouterr().err
        assert f"plan: --generate {words}: {message}" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv, message",
    [
        ([*SEVEN, "--bucket-mb", "0"], "--bucket-mb must be at least 1, got 0"),
        ([*SEVEN[:2], "--train", "tp4,xx2"], "--train tp4,xx2: 'xx2' is not one of tp, pp"),
        ([*SEVEN[:2], "--train", "tp4,tp2"], "tp is given twice"),
        ([*SEVEN, "--world", "32"], "tp x pp x cp x dp = 8, but --world is 32"),
        ([*SEVEN[:4], "--generate", "tp4", "--generate-world", "6"], "6 ranks are no multiple of the 4 ranks"),
        ([*SEVEN, "--generate-first", "-1"], "--generate-first must be at least 0, got -1"),
        ([*SEVEN[:4], "--generate", "tp8"], "--generate tp8: attention heads of 28 .* tp that works: 1, 2, 4$"),
        ([*SEVEN[:2], "--train", "tp8", "--generate", "tp4"], "--train tp8: attention heads of 28.*works: 1, 2, 4$"),
        ([*SEVEN[:2], "--train", "tp4,ep2", "--generate", "tp4"], "--train tp4,ep2: leave ep2 out; a model"),
        ([*SEVEN[:4], "--generate", "tp2,ep4"], "--generate tp2,ep4: leave ep4 out; a model of"),
        (["--model", "qwen9"], "--model qwen9: no such path; give .*qwen2.5-32b"),
        (["--model", "qwen2.5-7b"], "for example --train"),
        ([*SEVEN, "--vocab", "9"], "--vocab is for a launch script"),
        ([*SEVEN, "--lora-rank", "0"], "--lora-rank must be at least 1, got 0"),
        ([*SEVEN, "--far", "0"], "--far must be greater than 0, got 0"),
        (SEVEN[:4], "for example --generate tp4"),
        ([], "--model and --train"),
    ],
)
def test_errors_name_the_flag_and_what_works(argv, message, capsys):
    assert plan.main(argv) == 1
    err = capsys.readouterr().err
    assert re.search(message, err.strip()), err


@pytest.mark.parametrize(
    "content, message",
    [
        (None, r"config.json is missing"),
        (b"\x93\xfa\x00", "config.json is no JSON"),
        (b'{"model_type": "qw', "config.json is no JSON"),
        (b"[]", "config.json holds a list"),
        (json.dumps({"model_type": "qwen2"}).encode(), "config.json has no vocab_size"),
        (json.dumps(CONFIG | {"hidden_size": "32"}).encode(), "hidden_size of config.json is '32'"),
        (json.dumps(CONFIG | {"num_key_value_heads": "2"}).encode(), "sizes in config.json must be numbers"),
        (json.dumps(CONFIG | {"model_type": "qwen3_moe"}).encode(), "config.json has no moe_intermediate_size"),
        (json.dumps({"model_type": "gpt2"}).encode(), "model_type 'gpt2' is of no known family"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert plan.main(["--model", str(tmp_path), "--train", "tp1", "--generate", "tp1"]) == 1
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
