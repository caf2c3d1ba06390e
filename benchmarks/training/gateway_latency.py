"""Latency of complete answers of the gateway of agents, and of vLLM's own server on the same engine.

    python benchmarks/training/gateway_latency.py FOLDER OUT.json CLIENTS REPEATS

FOLDER is as `episode_task` wrote it; the model is a larger one with random weights. All clients of a measurement are in
one process and ask at once: the gateway, then the server, and so on. Both engines have the same arguments and the same
changes of vLLM (`host.vllm_live`), and one thread. The first pair of measurements warms up, and is not kept.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import episode_agents
import torch
import torch.distributed as dist
from episode_task import NAMES
from rollouts import DEADLINE, Bench
from transformers import Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl_plugin.engine.options import VllmOptions, engine_arguments
from mindspeed_rl_plugin.engine.rollout_engine import generate, response_request
from mindspeed_rl_plugin.rows import SampleId, Sampling

PROMPT, TOKENS = 128, 128  # longest prompt; of each answer
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
START_SECONDS = 300.0  # for vLLM's server
# No thread is bound, and the model is in the process of its engine, as in a job.
SERVER_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def make_model(folder: Path) -> Path:
    """A folder for `Bench` with this model."""
    place, sizes = folder / "large", json.loads((folder / "sizes.json").read_text())
    shutil.copytree(folder / "tokenizer", place / "tokenizer")
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, num_key_value_heads=4, vocab_size=sizes["vocabulary"])
    Qwen2ForCausalLM(config).float().save_pretrained(place / "model")
    (place / "sizes.json").write_text(json.dumps({"prompt": PROMPT, "limit": TOKENS}))
    return place


@contextlib.contextmanager
def vllm_server(options: VllmOptions, place: Path) -> Iterator[str]:
    """The base URL of vLLM's server with these options, until the context ends. Raises RuntimeError when it does not
    start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = engine_arguments(options, "cpu", str(place / "model"))
    given |= {"tokenizer": str(place / "tokenizer"), "skip_tokenizer_init": False, "load_format": "safetensors"}
    given |= {"distributed_executor_backend": "uni", "disable_uvicorn_access_log": True}
    given |= {"served_model_name": "policy", "host": "127.0.0.1", "port": port}
    command = [sys.executable, str(Path(__file__).with_name("vllm_server.py"))]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            command += [f"--{flag}", str(value)]
    log, end = place / "server.log", time.monotonic() + START_SECONDS
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **SERVER_VARIABLES})
    try:
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"vLLM's server does not answer: {log.read_text()[-4000:]}")
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(url, timeout=5).status == 200
    return False


def main(folder: Path, out: Path, clients: int, repeats: int) -> None:
    """Metrics of each pair of measurements. Seconds, but for the ratio."""
    rows = [{"prompt": f"work {NAMES[i % len(NAMES)]} {i}", "tokens": TOKENS} for i in range(clients)]
    place, made = make_model(folder), []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bench = Bench(place, clients)
    engine, episodes, sampling = bench.engine, bench.episodes("play_once", 1), Sampling(TOKENS, ignore_eos=True)
    engine.update_weights(0)
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with pool, vllm_server(engine.options, place) as url:
        for epoch in range(repeats + 1):
            steps, bench.busy.seconds, asked = engine._steps, 0.0, []
            for i, row in enumerate(rows):
                fields = {"text": row["prompt"], "answer": "", "record": row}
                asked.append(response_request(sampling, 0, SampleId(epoch, i, 0), (0,), fields=fields))
            done = generate(episodes, asked, deadline=DEADLINE)
            ours = statistics.median(float(completion.columns["turn_reward"].values.sum()) for completion in done)
            step = bench.busy.seconds / (engine._steps - steps)
            vllm = statistics.median(pool.submit(episode_agents.ask_all, rows, url).result())
            made.append({"latency": ours, "vllm_latency": vllm, "over_vllm": ours / vllm, "step": step})
    episodes.shutdown()
    out.write_text(json.dumps(made[1:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
