"""Faults that are planted into processes of `doctor`: it names each, and nothing else. Healthy, it names nothing."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from planted_faults import FAULTS, ROOT, SLOW_RANK, check_named, planted, results_of, start_doctor
from two_machines import two_machines, why_not

from mindspeed_rl_plugin.tools.doctor import doctor, engine_checks, rank_checks, small_models, train_checks
from mindspeed_rl_plugin.tools.doctor.machine import DEVICE_CHECKS
from mindspeed_rl_plugin.tools.doctor.nodes import Nodes
from mindspeed_rl_plugin.tools.doctor.program import run_checks
from mindspeed_rl_plugin.tools.doctor.result import FAIL, NOT_RUN, PASS, Result, explained
from mindspeed_rl_plugin.tools.doctor.small_models import YOURS
from mindspeed_rl_plugin.tools.rehearse.entry_script import Entry

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
needs_unshare = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare (util-linux)"
)
needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=f"no second machine: {why_not()}")
PRIVATE = {"USER": "jane-roe", "API_TOKEN": "tk-8f21c0", "CLUSTER_NAME": "blue-whale"}
NO_ACCELERATOR = {"one rank a device", "memory of other processes"}
NOT_ON_A_CPU = NO_ACCELERATOR | {"--save", "ports", "clock", "captured graphs", "tensors derived from weights"}
NOT_ON_A_CPU |= {"weights that change between two steps"}  # of latent attention: log-probs are not compared
# The arguments of a launch: Qwen3-30B-A3B, with flags that no small job has without a script.
LAUNCH = """
    --transformer-impl local --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --kv-channels 128 --group-query-attention --num-query-groups 4 --qk-layernorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --normalization RMSNorm --position-embedding-type rope --rotary-base 1000000
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-layer-freq [1]*48 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 4 --sequence-parallel
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1 --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --use-distributed-optimizer --overlap-grad-reduce --ckpt-format torch_dist --bf16 --seq-length 4096
    --max-position-embeddings 32768 --micro-batch-size 1 --global-batch-size 256 --train-samples 100000 --lr 1e-6
    --lr-warmup-samples 1000 --tokenizer-type HuggingFaceTokenizer --tokenizer-model /nowhere --load /nowhere
    --finetune --no-load-optim --rl-algorithm dapo --rl-reward /nowhere.py:grade --rl-prompt-data /nowhere.jsonl
    --rl-share-prompts --rl-max-tokens-per-microbatch 8192 --rl-swap params,optimizer --rl-temperature 0.8
    --rl-top-p 0.9 --rl-schedule async --rl-generators 4
"""


def of_engine(folder: Path, code: str, dtype: str, models: Mapping[str, Any]) -> list[Result]:
    (file := folder / "models.json").write_text(json.dumps(models))
    program, env = (engine_checks.__name__, engine_checks.ENGINE_CHECKS), planted(folder, code)
    found = run_checks(*program, Nodes(1), folder / "work", 300.0, env, dtype, str(file), *models)
    return explained(found, doctor.ALL_CHECKS)


def of_trainer(folder: Path, code: str, model: str, dtype: str, full: bool = False) -> list[Result]:
    entry, axis = Entry(ROOT / "examples" / "pretrain_gpt.py", []), (train_checks.LAYOUTS | {YOURS: ("tp",)})[model][0]
    arguments = LAUNCH.split() if dtype == "bfloat16" and model in ("dense", YOURS) else ()
    bench = train_checks.TrainBench(Nodes(2), folder, entry, planted(folder, code), dtype, arguments)
    found = train_checks.check_model(model, axis, bench, bench.prepare(), first=True, full=full)
    return explained([*found], doctor.ALL_CHECKS)


def of_ranks(folder: Path, code: str, ranks: int, **env: str) -> list[Result]:
    program, env = (rank_checks.__name__, rank_checks.RANK_CHECKS), planted(folder, code) | env
    return explained(run_checks(*program, Nodes(ranks), folder / "run", 60.0, env), doctor.ALL_CHECKS)


def verdicts(results: Iterable[Result], verdict: str) -> set[str]:
    return {r.check for r in results if r.verdict == verdict}


@pytest.mark.parametrize("fault", FAULTS["engine"])
def test_faults_of_the_engine(tmp_path, fault):
    model, code, *expected = FAULTS["engine"][fault]
    check_named(of_engine(tmp_path, code, "float32", {model: small_models.models_of(())[0][model]}), *expected)


@pytest.mark.parametrize("fault", FAULTS["trainer"])
def test_faults_of_trainer_and_engine(tmp_path, fault):
    model, code, *expected = FAULTS["trainer"][fault]
    check_named(of_trainer(tmp_path, code, model, "bfloat16" if model == YOURS else "float32"), *expected)


def test_a_healthy_engine_is_not_named_in_bfloat16(tmp_path):
    models, why = small_models.models_of(LAUNCH.split())
    assert list(models) == [*train_checks.LAYOUTS, YOURS] and not why
    assert (models[YOURS]["model_type"], models[YOURS]["num_hidden_layers"]) == ("qwen3_moe", 2)
    check_named(of_engine(tmp_path, "", "bfloat16", models))


@pytest.mark.parametrize("model", [*train_checks.LAYOUTS, YOURS])
def test_a_healthy_trainer_is_not_named_in_bfloat16(tmp_path, model):
    check_named(of_trainer(tmp_path, "", model, "bfloat16", full=model == YOURS))


@pytest.mark.parametrize("fault", FAULTS["ranks"])
def test_faults_of_ranks(tmp_path, fault):
    ranks, code, *expected = FAULTS["ranks"][fault]
    check_named(found := of_ranks(tmp_path, code, ranks), *expected)
    folder = tmp_path / "run"
    assert len([*folder.glob("rank-*.jsonl")]) == ranks
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or ())]
    assert {r.check for r in found} == {check.name for check in rank_checks.RANK_CHECKS}
    assert code == SLOW_RANK or [r.check for r in found if r.verdict == FAIL] == [expected[0][0].name]


def test_ranks_that_cannot_start_are_named(tmp_path):
    one, *others = of_ranks(tmp_path, "", 2, MINDSPEED_RL_DEVICE="abacus")
    assert (one.check, one.verdict) == (rank_checks.RANKS_START.name, FAIL)
    assert one.told.startswith("rank") and ": died after " in one.told and "abacus" in one.figure
    assert {r.verdict for r in others} == {NOT_RUN}


def test_a_single_rank_has_no_links(tmp_path):
    not_run = {check.name for check in (*rank_checks.LINK_CHECKS, *DEVICE_CHECKS)}
    assert verdicts(of_ranks(tmp_path, "", 1), NOT_RUN) == not_run


def wait_for(line: str, log: Path, process: subprocess.Popen) -> None:
    while line not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


class Call:
    """A call of `doctor` with results in `out`, whose temporary folder and /dev/shm are its own."""

    def __init__(self, tmp_path: Path, *words: str, code: str = "") -> None:
        self.out, self.log, shared = tmp_path / "doctor.html", tmp_path / "log", tmp_path / "shm"
        shared.mkdir()
        self.private, temporary = PRIVATE | {"RUN_MARK": tmp_path.name}, tempfile.mkdtemp()  # vLLM needs a short one
        self.folders = (temporary, shared)
        env = planted(tmp_path, code) | self.private | {"TMPDIR": temporary}
        own = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(shared)]
        doctor = [sys.executable, "-m", "mindspeed_rl_plugin", "doctor", "--out", str(self.out), *words]
        self.began = time.monotonic()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen([*own, *doctor], env=env, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    def end(self) -> tuple[int, list[Result]]:
        """Exit status and results. Nothing is left behind, and the file has nothing private."""
        code = self.process.wait(1100)
        print(f"status {code}, {time.monotonic() - self.began:.0f} s", self.log.read_text())
        left = [
            p for p in psutil.process_iter(["environ"]) if self.private.items() <= (p.info["environ"] or {}).items()
        ]
        assert left == sum(map(os.listdir, self.folders), []) == []
        text = self.out.read_text()
        assert not re.search(r"\b(src|href|https?:)", text), "it opens without a network"
        for word in (*self.private.values(), str(ROOT), str(Path.home()), self.folders[0], socket.gethostname()):
            assert not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text), word
        return code, results_of(self.out)


@needs_unshare
def test_a_healthy_machine(tmp_path):
    call = Call(tmp_path)
    code, found = call.end()
    check_named(found)
    assert code == 0 and "nothing is at fault" in call.log.read_text()
    assert verdicts(found, NOT_RUN) == NOT_ON_A_CPU
    assert {r.part for r in found if r.verdict == PASS} == {"machine", "memory", "links", "engine", "trainer"}


@needs_unshare
def test_an_interrupt_in_the_middle(tmp_path):
    call = Call(tmp_path)
    wait_for("doctor: engine", call.log, call.process)
    time.sleep(10)
    call.process.send_signal(signal.SIGINT)
    code, found = call.end()
    check_named(found)
    assert code == 130 and "interrupted: other checks did not run" in call.log.read_text()
    assert {r.part for r in found} >= {"machine", "memory", "links"}, "what ran before"


@needs_unshare
@pytest.mark.parametrize("fault", FAULTS["command"])
def test_the_whole_command_names_a_fault_once(tmp_path, fault):
    parts, code, *expected = FAULTS["command"][fault]
    code, found = Call(tmp_path, "--only", *parts.split(), code=code).end()
    check_named(found, *expected)
    failed = [r for r in found if r.verdict == FAIL]
    assert code == 1 and {r.part for r in failed} >= {*parts.split()}
    assert {r.follows for r in failed} <= {"", f"{expected[0][0].part}: {expected[0][0].name}"}


@needs_namespaces
@pytest.mark.parametrize("fault", FAULTS["machines"])
def test_a_fault_is_named_with_its_machine(tmp_path, fault):
    ranks, code, shell, *expected = FAULTS["machines"][fault]
    first, second, gone = tmp_path / "log0", tmp_path / "log1", fault == "a machine that is gone"
    with two_machines() as machines:
        words = ("--only", "machine", "links")
        agents = start_doctor(machines, tmp_path, *words, ranks=ranks, code=code, shell=shell)
        if gone:
            wait_for("memory and links", second, agents[1])
            time.sleep(5)  # in the middle of its ranks
            machines[1].kill()
        codes = [agent.wait(200) for agent in agents]
        print(said := first.read_text(), second.read_text())
        assert not any(machine.processes() for machine in machines)
    assert codes == [int(bool(expected)), -9 if gone else 0]
    assert "part  " in said and "part  " not in second.read_text(), "the first machine has the table"
    check_named(found := results_of(tmp_path / "doctor.html"), *expected)
    assert "open files" in verdicts(found, PASS), "results that did come are kept"
    if not expected:
        assert {r.figure[:8] for r in found if r.check == "point to point"} == {"12 pairs"}
        assert verdicts(found, NOT_RUN) == NO_ACCELERATOR | {"--save"}
