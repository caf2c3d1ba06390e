"""Whole RL jobs in processes: torchrun, real Megatron, real vLLM, a tiny Qwen2-shaped model on arithmetic."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import golden
import psutil
import pyarrow.parquet as pq
from ports import free_port
from two_machines import Machine

from mindspeed_rl_plugin.monitor.run_files import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
JOINED = Path(__file__).with_name("joined_script.py")

MODEL = f"{golden.MODEL} {golden.DENSE}"
# Qwen3-MoE, the first layer dense.
MOE_MODEL = f"{golden.MODEL} {golden.EXPERTS}"
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
TRAIN = golden.TRAIN.partition(" --tokenizer-model")[0].replace("--lr 3e-3", "--lr 1e-3")
# Old log-probs by a pass of their own, so that a first ratio of 1 says that log-prob pass and update agree.
GRADER = Path(__file__).with_name("signal_grader.py")
RL = (
    f"--rl-algorithm grpo --rl-reward {GRADER}:grade --rl-samples-per-prompt 4 --rl-max-prompt-length 16 "
    "--rl-max-response-length 8 --rl-kv-cache-gb 0.05 --rl-wait-timeout 120 --rl-reward-workers 1 --no-rl-progress "
    "--rl-old-logprobs pass"
)


PP2 = ("--pipeline-model-parallel-size", "2", "--rl-generate-tp", "1", "--rl-verify-weights")
AGREEMENT = 2e-5  # nats, fp32: log-probs of the engine against the trainer's
INVITED = r"(?:generate --join|programs may observe: address) (\S+?),? (?:--secret-file|secret file) (\S+)"


def id_of(row: dict) -> tuple[int, int, int]:
    return row["epoch"], row["group"], row["member"]


@dataclass
class Result:
    """A finished job."""

    code: int
    log: str
    run_dir: Path

    def check_agreement(self, updates: int, moved: float = 1e-8, steps: int = 1) -> None:
        """Engine and trainer agree after each number of updates; each changes the weights, and the first of the `steps`
        updates of a rollout starts from the policy that it is compared with. moved: least KL to the reference."""
        lines, firsts = self.metrics, self.metrics[::steps]
        assert [line["version"] for line in firsts] == list(range(0, updates, steps))
        self.check_log_probs(1 if steps > 1 else updates)
        for line in firsts:
            assert line["ratio/mean"] == line["ratio/max"] == 1.0 and line["clip_fraction"] == line["kl/old"] == 0.0
            assert line["groups/informative"] > 0
        # Weights that never move, and log-probs that are all zero, would agree too.
        assert all(line["grad_norm"] > 1e-3 and 0.1 < line["entropy"] < 10 for line in lines)
        assert all((line["kl/ref"] < 1e-8) if i == 0 else (line["kl/ref"] > moved) for i, line in enumerate(lines))
        resharded = [line for line in lines if "reshard/bytes_sent" in line]  # not where engines are apart
        assert len({line.get("weights/digest") for line in resharded}) == len(resharded)
        for line in resharded:
            assert line["reshard/bytes_sent"] == line["reshard/bytes_received"]
            assert line["reshard/bytes_copied"] + line["reshard/bytes_received"] > 0

    def check_log_probs(self, rollouts: int = 1) -> None:
        """Engine and trainer agree in so many rollouts, or more: in all but those that older weights sampled."""
        worst = [line["logp_diff/max"] for line in self.metrics if "logp_diff/max" in line]
        print("engine and trainer differ by", worst)
        assert len(worst) >= rollouts and max(worst) < AGREEMENT, worst

    def lines(self, kind: str) -> list[dict]:
        """Lines of metrics.jsonl, in order."""
        return [line for line in read_jsonl(self.run_dir / "metrics.jsonl") if line["kind"] == kind]

    metrics = property(lambda self: self.lines("train"))
    evaluations = property(lambda self: self.lines("eval"))

    @property
    def numbers(self) -> list[dict]:
        """Every metric, the digests of the weights among them, but times and bytes of the dock."""
        lines = [*self.metrics, *self.evaluations]
        return [{name: value for name, value in line.items() if not golden.IGNORED.fullmatch(name)} for line in lines]


@dataclass
class Job:
    """One launch command."""

    data: Path
    save: Path
    extra: Sequence[str] = ()  # flags of its own
    ranks: int = 2  # of an agent
    agents: int = 1  # torchrun processes
    script: Path = ROOT / "examples" / "pretrain_gpt.py"  # what the runner runs
    path: Sequence[Path] = ()  # entries of PYTHONPATH
    model: str = MODEL  # flags of the model
    train: str = TRAIN  # flags of its training
    python: str = sys.executable  # what runs launcher and ranks
    processes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.save / "rl"

    def command(self, agent: int, port: int) -> list[str]:
        torchrun = [self.python, "-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        torchrun += ["--nnodes", str(self.agents), "--node-rank", str(agent)]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        script = ["-m", "mindspeed_rl_plugin", str(self.script)]
        data = ["--tokenizer-model", str(self.data / "tokenizer"), "--rl-prompt-data", str(self.data / "prompts.jsonl")]
        fixed = [*self.model.split(), *self.train.split(), *RL.split(), *data, "--save", str(self.save)]
        return [*torchrun, *script, *fixed, *self.extra]

    def dumping(self) -> Job:
        """The same job, writing its rollouts to `save`/dump."""
        self.extra = (*self.extra, "--rl-dump-dir", str(self.save / "dump"))
        return self

    def start(self) -> Job:
        """Start the agents, afresh or again; their logs are added to."""
        self.processes.clear()
        port = free_port()
        path = os.pathsep.join(filter(None, (*map(str, self.path), os.environ.get("PYTHONPATH"))))
        more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "PYTHON_EXEC": self.python}
        for agent in range(self.agents):
            with open(self.log_file(agent), "a") as log:
                self.processes.append(
                    subprocess.Popen(
                        self.command(agent, port),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=ROOT,
                        env=os.environ | more,
                        start_new_session=True,
                    )
                )
        return self

    def log_file(self, agent: int) -> Path:
        self.save.mkdir(parents=True, exist_ok=True)
        return self.save / f"agent{agent}.log"

    def invitation(self) -> tuple[str, str]:
        """Address and secret file that the job prints, those of its last start."""
        self.until(lambda: re.search(INVITED, self.log_file(0).read_text()), 120)
        return re.findall(INVITED, self.log_file(0).read_text())[-1]

    def until(self, what: str | Callable[[], object], seconds: float = 240) -> None:
        """Wait, while the job runs, until its first agent has said a line, or a function says that it is so."""
        end = time.monotonic() + seconds
        while not (what() if callable(what) else what in self.log_file(0).read_text()):
            running = time.monotonic() < end and self.processes[0].poll() is None
            assert running, f"{what} was not reached: {self.log_file(0).read_text()[-6000:]}"
            time.sleep(0.02)

    def rollouts(self) -> int:
        """How many were dumped."""
        return len([*(self.save / "dump").glob("*.parquet")])

    def dumped(self) -> list[dict]:
        """All rows that were trained, in order of their ids."""
        rows = [row for file in (self.save / "dump").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
        return sorted(rows, key=id_of)

    def trained(self) -> list[tuple[int, int, int]]:
        """Ids of all rows that were trained, in order."""
        return list(map(id_of, self.dumped()))

    def check_trained(self, groups: int, of_epoch: int = 4, more: bool = False) -> None:
        """Each row of so many groups was trained once, and no epoch has a gap. of_epoch: groups of an epoch, 0 where
        they differ; more: whether other groups may follow."""
        ids = self.trained()
        assert len(ids) == 4 * groups or (more and len(ids) > 4 * groups), (len(ids), groups)
        ids = ids[: 4 * groups]
        counted = Counter(epoch for epoch, group, member in dict.fromkeys(ids) if member == 0)
        sizes = {epoch: of_epoch or counted[epoch] for epoch in range(ids[-1][0] + 1)}
        assert ids == [(e, g, m) for e, size in sizes.items() for g in range(size) for m in range(4)]

    def more(self, rollouts: int) -> int:
        """Wait until so many more are trained. How many there are then, at least."""
        wanted = self.rollouts() + rollouts
        self.until(lambda: self.rollouts() >= wanted)
        return wanted

    def end(self, rollouts: int) -> Result:
        """End a job that goes on for so many more rollouts, of four groups, when these were trained."""
        enough = self.more(rollouts)
        self.processes[0].terminate()
        result = self.wait(60)
        assert result.code != 0
        self.check_trained(4 * enough, more=True)
        return result

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

    def fail(self, timeout: float = 240) -> Result:
        """Start and wait for the end, which has to be one with an error."""
        result = self.start().wait(timeout)
        assert result.code != 0, result.log[-3000:]
        return result

    def stop_at(self, iteration: int, timeout: float = 240) -> Result:
        """Run to the end of an iteration; the next run goes on from there."""
        extra, self.extra = self.extra, (*self.extra, "--exit-interval", str(iteration))
        result = self.run(timeout)
        self.extra = extra
        return result

    def rank_pid(self, rank: int) -> int:
        """Process id of a rank, when it is there: the launcher starts it with the job's arguments and RANK."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if str(self.save) in process.cmdline() and process.environ().get("RANK") == str(rank):
                        return process.pid
        raise AssertionError(f"no process of rank {rank}")

    def kill_after(
        self, iteration: int, stage: str, *, rank: int | None = 1, how: signal.Signals = signal.SIGKILL
    ) -> Result:
        """Start, and signal a rank (None: the launcher) as soon as rank 1 has ended a stage of an iteration, so in the
        middle of the next one."""
        self.start()
        events, wanted = self.run_dir / "events-rank1.jsonl", f'"iteration": {iteration}, "stage": "{stage}"'
        self.until(lambda: events.exists() and wanted in events.read_text())
        os.kill(self.processes[0].pid if rank is None else self.rank_pid(rank), how)
        result = self.wait(60)
        assert result.code != 0
        return result

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Joined:
    """Engines that join a job, each a process of its own, which may be killed at a moment of its work."""

    def __init__(self, job, python: str) -> None:
        self.job, self.python = job, python
        self.engines: list[subprocess.Popen] = []

    def join(
        self, moment: str = "never", ranks: int = 1, on: Machine | None = None, by: str | None = None
    ) -> subprocess.Popen:
        """One more. on: another machine; by: URL of the server that generates."""
        address, secret_file = self.job.invitation()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        given = [*torchrun, str(JOINED), moment, "--join", address, "--secret-file", secret_file]
        given += ["--engine-url", by] if by else []
        command = [self.python, *given] if on is None else on.command([sys.executable, *given])
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        with (self.job.save / f"engine{len(self.engines)}.log").open("w") as log:
            engine = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        self.engines.append(engine)
        return engine

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.job.save.glob("engine*.log")))
