"""The launch scripts: what they pass to torchrun, taken down by a fake one, and what they say about missing paths."""

import argparse
import ast
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import ended

from mindspeed_rl_plugin.config import add_flags, flag_names

ROOT = Path(__file__).parents[2]
ASCEND = sorted((ROOT / "examples" / "ascend").glob("*.sh"))
PATHS = ("MINDSPEED_LLM", "LOAD", "SAVE", "HF_MODEL", "PROMPTS")
RECORDER = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >"$RECORD/call$(ls "$RECORD" | wc -l)"\n'

# Megatron's own parser, in a process of its own: importing it here would spoil the tests of host mode.
PARSE = """
import json, sys
import mindspeed_rl_plugin.adaptor
from megatron.training.arguments import parse_args
calls = json.loads(sys.argv[1])
parsed = []
for call in calls:
    sys.argv = ["pretrain_gpt.py", *call]
    parsed.append(vars(parse_args()))
print(json.dumps(parsed, default=str))
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def workplace(tmp_path):
    """A copy of examples/ beside a fake environment; `calls()` gives the arguments of each torchrun."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    executable(tmp_path / "setup.sh", "")
    executable(tmp_path / ".venv/bin/python", "#!/usr/bin/env bash\necho 20000\n")
    executable(tmp_path / ".venv/bin/torchrun", RECORDER)
    (tmp_path / "record").mkdir()
    return tmp_path


def run(workplace: Path, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in (*PATHS, "DATA", "MASTER_PORT", "NPROC")}
    env |= {"RECORD": str(workplace / "record"), **variables}
    command = ["bash", f"examples/{script}", *arguments]
    return subprocess.run(command, cwd=workplace, env=env, capture_output=True, text=True, timeout=60)


def calls(workplace: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted((workplace / "record").iterdir())]


def script_arguments(call: list[str]) -> list[str]:
    """What follows the entry script's name."""
    return call[next(i for i, a in enumerate(call) if a.endswith("pretrain_gpt.py")) + 1 :]


def test_entry_point_and_launch_script_know_nothing_of_rl():
    tree = ast.parse((ROOT / "examples/pretrain_gpt.py").read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert not [name for name in imported if name.split(".")[0] not in ("functools", "torch", "megatron")]
    assert "--rl-" not in (ROOT / "examples/launch.sh").read_text()


def test_quickstart_tunes_with_the_launch_script_that_pretrained(workplace):
    base = run(workplace, "launch.sh", DATA="runs/quickstart/data", MASTER_PORT="20000")
    assert base.returncode == 0, base.stderr
    # The fake torchrun prints no iteration, which grep reports as a failure: only the calls matter here.
    run(workplace, "quickstart.sh")
    alone, pretraining, tuning = calls(workplace)
    base_length = len(alone)
    assert pretraining[:base_length] == alone
    differing = [(a, t) for a, t in zip(alone, tuning, strict=False) if a != t]
    assert differing == [("runs/quickstart/pretrained", "runs/quickstart/tuned")]
    added = tuning[base_length:]
    assert added[added.index("--load") + 1] == "runs/quickstart/pretrained"
    assert added[added.index("--rl-algorithm") + 1] == "grpo"


def test_megatron_parses_what_the_quickstart_passes(workplace, warm_python):
    run(workplace, "quickstart.sh", "--smoke", "--seed", "3", "--rl-lora-rank", "8", "--lr", "1e-3")
    recorded = [script_arguments(c) for c in calls(workplace)]
    result = ended(warm_python, "-c", PARSE, json.dumps(recorded))
    pretraining, tuning = json.loads(result.stdout.splitlines()[-1])
    assert pretraining["rl_algorithm"] is None and tuning["rl_algorithm"] == "grpo"
    assert pretraining["save"] == tuning["load"] == "runs/quickstart-smoke-seed3/pretrained"
    assert (pretraining["rl_lora_rank"], tuning["rl_lora_rank"]) == (None, 8) and pretraining["lr"] != tuning[
        "lr"
    ] == 1e-3
    assert pretraining["seed"] != 1234 and tuning["rl_prompt_data"] != tuning["rl_eval_data"]
    for args in (pretraining, tuning):
        assert args["attention_dropout"] == args["hidden_dropout"] == 0
        assert (args["ckpt_format"], args["transformer_impl"], args["bf16"]) == ("torch", "local", False)
        assert args["kv_channels"] >= 32, "vLLM on CPU refuses smaller heads"
        assert args["use_distributed_optimizer"]


@pytest.mark.parametrize("arguments", [["quick"], ["--seed"]])
def test_quickstart_names_a_bad_argument(workplace, arguments):
    result = run(workplace, "quickstart.sh", *arguments)
    assert result.returncode != 0
    assert arguments[0] in result.stderr
    assert not calls(workplace)


def test_two_quickstarts_do_not_share_a_directory(workplace):
    (workplace / "runs").mkdir()
    with open(workplace / "runs/quickstart.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = run(workplace, "quickstart.sh")
    assert result.returncode == 1
    assert "another one is running in runs/quickstart" in result.stderr
    assert not calls(workplace)


@pytest.fixture
def ascend(workplace):
    """Runs an Ascend script with a recording torchrun on PATH; returns (result, recorded call)."""
    executable(workplace / "bin/torchrun", RECORDER)
    (workplace / "mindspeed-llm").mkdir()

    def call(script: Path, **variables: str):
        path = f"{workplace / 'bin'}:{os.environ['PATH']}"
        result = run(workplace, f"ascend/{script.name}", PATH=path, **variables)
        return result, next(iter(calls(workplace)), None)

    call.paths = {name: f"/data/{name.lower()}" for name in PATHS} | {"MINDSPEED_LLM": str(workplace / "mindspeed-llm")}
    return call


@pytest.mark.parametrize("missing", PATHS)
@pytest.mark.parametrize("script", ASCEND, ids=lambda p: p.stem)
def test_ascend_script_names_the_path_that_is_not_set(ascend, script, missing):
    result, call = ascend(script, **{k: v for k, v in ascend.paths.items() if k != missing})
    assert result.returncode != 0
    assert f"{missing}: set it to" in result.stderr
    assert call is None


@pytest.mark.parametrize("script", ASCEND, ids=lambda p: p.stem)
def test_ascend_script_passes_known_flags_and_batches_that_divide(ascend, script):
    result, call = ascend(script, **ascend.paths)
    assert result.returncode == 0, result.stderr
    assert "-m" in call and call[call.index("-m") + 1] == "mindspeed_rl_plugin"
    arguments = script_arguments(call)
    assert not {a for a in arguments if a.startswith("--rl-")} - set(flag_names())
    rl, _ = add_flags(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args(arguments)

    def value(flag: str, where: list[str] = arguments) -> int:
        return int(where[where.index(flag) + 1])

    ranks = value("--nproc_per_node", call) * value("--nnodes", call)
    model_parallel = value("--tensor-model-parallel-size") * value("--pipeline-model-parallel-size")
    data_parallel, rest = divmod(ranks, model_parallel)
    assert rest == 0
    assert rl.rl_rollout_prompts * rl.rl_samples_per_prompt % value("--global-batch-size") == 0
    assert value("--global-batch-size") % (value("--micro-batch-size") * data_parallel) == 0
    assert rl.rl_max_prompt_length + rl.rl_max_response_length <= value("--seq-length")
    assert ranks % rl.rl_generate_tp == 0
