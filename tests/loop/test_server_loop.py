"""vLLM's own server as the engine of a job: real torchrun, real Megatron, the real server on a CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import pytest
from ports import free_port

from mindspeed_rl_plugin.generators.vllm_server import EXTENSION
from mindspeed_rl_plugin.prompts.tokenizer import load_tokenizer

START_SECONDS = 300
ROOT, TALK = Path(__file__).parents[2], Path(__file__).with_name("talk.py")
# The model of the jobs of jobs.py.
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@dataclass
class Serving:
    command: list[str]
    url: str
    log: Path

    def start(self) -> None:
        """And wait until it answers."""
        more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        more |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("a") as file:
            how = {"stdout": file, "stderr": subprocess.STDOUT, "env": os.environ | more, "start_new_session": True}
            self.process = subprocess.Popen(self.command, **how)
        wait_for(self)

    def stop(self) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, how)
                try:
                    self.process.wait(30)
                except subprocess.TimeoutExpired:
                    continue


@pytest.fixture(scope="module")
def server(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The server, as docs/schedules.md says; free for one job after the other."""
    yield from serving(tmp_path_factory.mktemp("served"), arithmetic / "tokenizer", 24)


def serving(folder: Path, tokenizer: Path, longest: int) -> Iterator[Serving]:
    """A server of the model of the jobs, with random weights. longest: tokens of prompt and response."""
    sizes = {"vocab_size": len(load_tokenizer(str(tokenizer))), "max_position_embeddings": longest + 8}
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    port = str(free_port())
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--tokenizer", str(tokenizer), "--load-format", "dummy", "--dtype", "float32"]
    command += ["--max-model-len", str(longest), "--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
    command += ["--worker-extension-cls", EXTENSION, "--host", "127.0.0.1", "--port", port]
    command += ["--kv-cache-memory-bytes", str(50 << 20), "--enforce-eager"]
    made = Serving(command, f"http://127.0.0.1:{port}", folder / "server.log")
    try:
        made.start()
        yield made
    finally:
        made.stop()


def wait_for(serving: Serving) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert serving.process.poll() is None, serving.log.read_text()[-4000:]
        try:
            urllib.request.urlopen(serving.url + "/health", timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server did not start within {START_SECONDS} s: {serving.log.read_text()[-4000:]}")


def flags(server: Serving, staleness: int, iterations: int = 3) -> tuple[str, ...]:
    apart = ("--rl-schedule", "async", "--rl-correction", "truncate", "--rl-engine-url", server.url)
    return ("--train-iters", str(iterations), *apart, "--rl-max-staleness", str(staleness))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_generates_for_a_job_and_then_for_others(job, server, nothing_left) -> None:
    """Without lag each log-prob of the server is the trainer's; with lag, whatever new weights do to responses in the
    making, each row is trained once, and no token is older than the bound."""
    exact = job(*flags(server, 0), "--rl-verify-weights", ranks=1, name="exact").dumping()
    result = exact.run()
    result.check_log_probs(3)
    assert [line["version"] for line in result.metrics] == [0, 1, 2]
    assert all(line["grad_norm"] > 1e-3 for line in result.metrics)
    exact.check_trained(12)
    said = (exact.run_dir / "engine-at-url-0.log").read_text()
    assert said.splitlines()[-1] in ("[rl] the job has ended", "[rl] the engine has left the job"), said
    for inflight in ("keep", "recompute", "drain"):
        lagging = job(*flags(server, 2, 5), "--rl-inflight", inflight, ranks=1, name=inflight).dumping()
        result = lagging.run()
        lagging.check_trained(20)
        assert max(line["lag/max"] for line in result.metrics) <= 2
        assert max(line["rollout/kl"] for line in result.metrics) < 1.0
    still = job(*flags(server, 2, 5), "--lr", "0", "--min-lr", "0", ranks=1, name="still").run()
    assert max(line["lag/max"] for line in still.metrics) > 0, "all of it is of the newest weights"
    for line in still.metrics:  # the same weights under other names
        assert line["rollout/weight_max"] == pytest.approx(1, abs=1e-4) and abs(line["rollout/kl"]) < 1e-5
    nothing_left()


@pytest.mark.slow
def test_a_server_samples_the_turns_of_episodes(job, server, nothing_left) -> None:
    """Their environments are beside the process that asks the server."""
    talk = ("--rl-environment", f"{TALK}:Talk", "--rl-environment-workers", "1")
    stops = ("--rl-stop-token-ids", *map(str, range(0, 97, 2)))  # an untrained model ends a turn by every other token
    short = ("--rl-max-response-length", "12", "--rl-max-turn-length", "3", "--rl-max-turns", "2")
    sizes = ("--rl-max-prompt-length", "12", "--rl-max-observation-length", "4", "--lr", "3e-3")
    made = job(*flags(server, 0), *talk, *stops, *short, *sizes, "--rl-reward", "environment", ranks=1).dumping()
    result = made.run()
    result.check_log_probs(3)
    assert all(1 < line["episode/turns_mean"] <= 2 and line["grad_norm"] > 1e-3 for line in result.metrics)
    made.check_trained(12)
    nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_stands_still_costs_the_time_of_its_rows(job, server) -> None:
    """The whole of it is stopped: connections stay, and nobody answers. It goes on by itself."""
    running = job(*flags(server, 1, 1000), ranks=1).dumping().start()
    running.until(running.rollouts)
    os.killpg(server.process.pid, signal.SIGSTOP)
    running.until(f"[rl] warning: the server at {server.url} generates no more", 100)  # half of --rl-wait-timeout
    os.killpg(server.process.pid, signal.SIGCONT)
    running.end(2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_was_brought_and_stands_still_is_not_tried_again(job, joined, server) -> None:
    """Who brought it ends with a message; the job goes on with an engine of its own."""
    apart = ("--rl-schedule", "async", "--rl-generators", "1", "--rl-correction", "truncate")
    running = job("--train-iters", "1000", *apart).dumping().start()
    bridge = (engines := joined(running)).join(by=server.url)
    running.until("engines at work: 2")
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        assert bridge.wait(150) == 1 and f"[rl] generate: the server at {server.url} did not" in engines.said()
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
    log = running.end(20).log
    assert log.count("engine joined: ") == 2 and f"engine left: server at {server.url}" in log, log[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_holds_its_server_and_waits_for_it_when_it_dies(job, server) -> None:
    """A second job, and a second engine of the same one, are refused; the first goes on. It does when the server is
    there again, too. When it was ended the second gets the server, and ends where that stays away. The last test of the
    server, whose own memory and files stay when it is killed."""
    long = ("--rl-wait-timeout", str(START_SECONDS + 60))  # longer than a server may take to start
    running = job(*flags(server, 1, 1000), *long, ranks=1).dumping().start()
    second = job(*flags(server, 1, 1000), ranks=1, name="second").dumping()
    running.more(1)
    address, secret_file = running.invitation()
    held = f"it generates for the job at {address}, whose engine process sent a sign of life"
    assert f"--rl-engine-url {server.url}: {held}" in second.fail(120).log
    engine = [sys.executable, "-m", "mindspeed_rl_plugin", "generate", "--join", address, "--secret-file", secret_file]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    same = subprocess.run([*engine, "--engine-url", server.url], env=env, capture_output=True, text=True, timeout=120)
    assert same.returncode == 1 and held in same.stderr, same.stderr
    running.more(2)
    gone = f"the server at {server.url} generates no more"
    os.killpg(server.process.pid, signal.SIGKILL)
    running.until(f"[rl] warning: {gone}")
    server.start()
    running.end(2)
    second.start()
    second.until(second.rollouts)
    os.killpg(server.process.pid, signal.SIGKILL)
    assert re.search(f"was graded for 120 s .*; engines at work: 0; {gone} .*no server answers", second.wait(200).log)


@pytest.mark.slow
def test_a_server_that_is_not_there_stops_the_start(job) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    away = ("--rl-schedule", "async", "--rl-max-staleness", "0", "--rl-engine-url", url)
    result = job("--train-iters", "3", *away, ranks=1).fail(120)
    assert f"--rl-engine-url: no server answers at {url}" in result.log
