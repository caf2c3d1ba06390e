"""Tiny Megatron jobs in torchrun, for the tests of attaching and starting; arguments of one that RL can train."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from refusals import namespace

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "examples" / "pretrain_gpt.py"

MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 2 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer "
    "--vocab-size 4200 --make-vocab-size-divisible-by 16 --transformer-impl local --no-persist-layer-norm "
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --hidden-dropout 0 --attention-dropout 0 "
    "--lr 1e-3 --lr-decay-iters 8 --train-iters 4 --eval-interval 1000 --eval-iters 0 --log-interval 1 --seed 7 "
    "--mock-data --split 1,0,0 --ckpt-format torch --distributed-backend gloo"
)
RL = (
    "--rl-algorithm grpo --rl-reward exact --rl-samples-per-prompt 2 --rl-max-prompt-length 16 "
    "--rl-max-response-length 16 --rl-kl-loss-coef 0.01"
)


@pytest.fixture(scope="session")
def start_flags():
    """`start_flags(rl)`: the flags of the tiny model, and those of an RL run of it."""
    data = ["--rl-tokenizer", "tokenizer", "--rl-prompt-data", "prompts.jsonl"]
    return lambda rl: [*MODEL.split(), *([*RL.split(), *data] if rl else [])]


@dataclass
class Job:
    """A finished job: its output, and the events that the watching loop wrote."""

    code: int
    log: str
    events: list[dict]

    def of(self, event: str) -> list[dict]:
        """The events of one kind."""
        return [e for e in self.events if e["event"] == event]


def run_job(
    python: str, folder: Path, *args: str, env: dict | None = None, script: Path = SCRIPT, mode: str = ""
) -> Job:
    """Run `script` on two ranks; mode: a switch of fake_loop.py. Raises after four minutes."""
    events = folder / "events.jsonl"
    events.unlink(missing_ok=True)
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(HERE / "fake_loop.py"), str(events), *([mode] if mode else [])]
    command += [str(script), *args]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    lines = events.read_text().splitlines() if events.exists() else []
    return Job(done.returncode, done.stdout, [json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def megatron(tmp_path_factory, request, start_flags):
    """`megatron("--flag", ...)` runs a job in one folder of the module; a failed job fails the test with its log. One
    with RL on the installed Megatron starts warm: what is to be seen of a start without RL needs all of it."""
    folder = tmp_path_factory.mktemp("megatron")
    (folder / "tokenizer").mkdir()
    (folder / "prompts.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')

    def run(*args: str, rl: bool = False, code: int | None = 0, **options) -> Job:
        python = request.getfixturevalue("warm_python") if rl and not options else sys.executable
        job = run_job(python, folder, *start_flags(rl), *args, **options)
        assert code is None or job.code == code, job.log[-6000:]
        return job

    run.folder = folder
    return run


@pytest.fixture
def build(tmp_path):
    """`build(changes)`: a namespace like Megatron's (refusals.py)."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1", "answer": "2"}))
    return partial(namespace, tmp_path)
