"""Whole RL jobs in processes: torchrun, real Megatron, real vLLM, a tiny Qwen2-shaped model on arithmetic."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 128 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion "
    "--no-bias-dropout-fusion"
)
# Qwen3-MoE, the first layer dense.
MOE_MODEL = MODEL.replace("--add-qkv-bias", "--qk-layernorm --kv-channels 32") + (
    " --num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-layer-freq [0]+[1]*1"
)
# DeepSeek-V3, the first layer dense; vLLM on CPU has latent attention of these sizes only.
LATENT_MODEL = MOE_MODEL.replace("--group-query-attention --num-query-groups 2 ", "").replace(
    "--kv-channels 32", "--kv-channels 128"
) + (
    " --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --rope-type rope --rotary-scaling-factor 1.0 --attention-backend unfused "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-shared-expert-intermediate-size 96 --moe-router-load-balancing-type none"
)
TRAIN = (
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --lr-decay-style constant --ckpt-format torch "
    "--eval-interval 1000 --eval-iters 0 --log-interval 1 --seed 1 --distributed-backend gloo "
    "--use-distributed-optimizer --tokenizer-type HuggingFaceTokenizer --save-interval 100"
)
# Old log-probs by a pass of their own, so that a first ratio of 1 says that log-prob pass and update agree.
GRADER = Path(__file__).with_name("signal_grader.py")
RL = (
    f"--rl-algorithm grpo --rl-reward {GRADER}:grade --rl-samples-per-prompt 4 --rl-max-prompt-length 16 "
    "--rl-max-response-length 8 --rl-kv-cache-gb 0.05 --rl-wait-timeout 120 --rl-reward-workers 1 --no-rl-progress "
    "--rl-old-logprobs pass"
)


@dataclass
class Result:
    """A finished job."""

    code: int
    log: str
    run_dir: Path

    @property
    def metrics(self) -> list[dict]:
        """Training lines of metrics.jsonl, in order."""
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == "train"]

    @property
    def evaluations(self) -> list[dict]:
        lines = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == "eval"]


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives to outgoing connections."""
    while True:
        port = 20000 + random.SystemRandom().randrange(12000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


@dataclass
class Job:
    """One launch command. agents: torchrun processes, each with `ranks` ranks; script: what the runner runs;
    path: entries of PYTHONPATH; model: flags of the model."""

    data: Path
    save: Path
    extra: Sequence[str] = ()
    ranks: int = 2
    agents: int = 1
    script: Path = ROOT / "examples" / "pretrain_gpt.py"
    path: Sequence[Path] = ()
    model: str = MODEL
    processes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.save / "rl"

    def command(self, agent: int, port: int) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        torchrun += ["--nnodes", str(self.agents), "--node-rank", str(agent)]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        script = ["-m", "mindspeed_rl_plugin", str(self.script)]
        data = ["--tokenizer-model", str(self.data / "tokenizer"), "--rl-prompt-data", str(self.data / "prompts.jsonl")]
        fixed = [*self.model.split(), *TRAIN.split(), *RL.split(), *data, "--save", str(self.save)]
        return [*torchrun, *script, *fixed, *self.extra]

    def dumping(self) -> Job:
        """The same job, writing its rollouts to `save`/dump."""
        self.extra = (*self.extra, "--rl-dump-dir", str(self.save / "dump"))
        return self

    def start(self) -> None:
        """Start the agents, afresh or again; their logs are added to."""
        self.processes.clear()
        port = free_port()
        path = os.pathsep.join(filter(None, (*map(str, self.path), os.environ.get("PYTHONPATH"))))
        for agent in range(self.agents):
            with open(self.log_file(agent), "a") as log:
                self.processes.append(
                    subprocess.Popen(
                        self.command(agent, port),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path},
                        start_new_session=True,
                    )
                )

    def log_file(self, agent: int) -> Path:
        self.save.mkdir(parents=True, exist_ok=True)
        return self.save / f"agent{agent}.log"

    def wait(self, timeout: float) -> Result:
        """The end of all agents. Raises subprocess.TimeoutExpired past `timeout` seconds."""
        end = time.monotonic() + timeout
        codes = [p.wait(max(0.1, end - time.monotonic())) for p in self.processes]
        log = "\n".join(self.log_file(a).read_text() for a in range(self.agents))
        return Result(max(map(abs, codes)), log, self.run_dir)

    def run(self, timeout: float = 240) -> Result:
        """Start and wait; a job that fails fails the test with the end of its log."""
        self.start()
        result = self.wait(timeout)
        assert result.code == 0, result.log[-6000:]
        return result

    def rank_pid(self, rank: int) -> int:
        """Process id of a rank, found by its environment."""
        for agent in self.processes:
            for child in psutil.Process(agent.pid).children(recursive=True):
                if child.environ().get("RANK") == str(rank) and child.ppid() == agent.pid:
                    return child.pid
        raise AssertionError(f"no process of rank {rank}")

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, corpus and prompts of the quickstart, small."""
    out = tmp_path_factory.mktemp("arithmetic")
    prepare = [sys.executable, str(ROOT / "examples" / "arithmetic" / "prepare.py"), "--out", str(out)]
    subprocess.run([*prepare, "--documents", "2000", "--prompts", "64", "--heldout", "16"], check=True, timeout=120)
    return out


@pytest.fixture(scope="session")
def moe_model() -> str:
    """Flags of a model with experts, for `Job.model`."""
    return MOE_MODEL


@pytest.fixture(scope="session")
def latent_model() -> str:
    """Flags of a model with latent attention, for `Job.model`."""
    return LATENT_MODEL


@pytest.fixture
def job(arithmetic: Path, tmp_path: Path) -> Iterator:
    """Factory of jobs; what still runs at the end of the test is killed."""
    jobs: list[Job] = []

    def make(*extra: str, name: str = "run", **named) -> Job:
        jobs.append(Job(arithmetic, tmp_path / name, extra, **named))
        return jobs[-1]

    yield make
    for each in jobs:
        each.stop()
