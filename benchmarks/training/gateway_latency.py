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
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import episode_agents
import episode_task
import torch
import torch.distributed as dist
from rollouts import DEADLINE, Busy
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine.options import VllmOptions, engine_arguments
from mindspeed_rl_plugin.engine.rollout_engine import generate, response_request
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
from mindspeed_rl_plugin.rows import SampleId, Sampling

PROMPT, TOKENS = 128, 128  # longest prompt; of each answer
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
START_SECONDS = 300.0  # for vLLM's server
# No thread is bound, and the model is in the process of its engine, as in a job.
SERVER_VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def make_model(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Write it. Its config."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **SIZES, **heads, **ends)).float().save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@contextlib.contextmanager
def vllm_server(options: VllmOptions, tokenizer: Path, log: Path) -> Iterator[str]:
    """The base URL of vLLM's server with these options, until the context ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    more = {"tokenizer": str(tokenizer), "skip_tokenizer_init": False, "distributed_executor_backend": "uni"}
    given = engine_arguments(options, "cpu", options.weights) | more
    given |= {"served_model_name": "policy", "host": "127.0.0.1", "port": port, "disable_uvicorn_access_log": True}
    flags = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("vllm_server.py")), *flags],
            stdout=file,
            stderr=file,
            env={**os.environ, **SERVER_VARIABLES},
        )
    try:
        end = time.monotonic() + START_SECONDS
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
    """A row of metrics of each pair of measurements."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    config, model = make_model(folder / "large", tokenizer), str(folder / "large")
    names = episode_task.NAMES
    rows = [{"prompt": f"work {names[i % len(names)]} {i}", "tokens": TOKENS} for i in range(clients)]
    options = VllmOptions(config, PROMPT + TOKENS, kv_cache_bytes=1 << 29, weights=model)
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        vllm_server(options, folder / "tokenizer", folder / "server.log") as url,
    ):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        engine = VllmEngine(options)
        engine.update_weights(0)
        busy = Busy(engine)
        flags = EpisodeConfig(agent=f"{episode_agents.__file__}:ask", environment_workers=1)
        setup = EpisodeSetup(flags, "chat", str(folder / "tokenizer"), PROMPT, TOKENS, DEADLINE, rewarded=True)
        episodes = setup.over(busy, tokenizer, setup.environments(), Peers())
        made = []
        for epoch in range(repeats + 1):
            begin, steps, busy.seconds = time.perf_counter(), engine._steps, 0.0
            ours = gateway_seconds(episodes, rows, epoch)
            wall, step = time.perf_counter() - begin, busy.seconds / (engine._steps - steps)
            begin = time.perf_counter()
            vllm = statistics.median(pool.submit(episode_agents.ask_all, rows, url).result())
            walls = {"wall": wall, "vllm_wall": time.perf_counter() - begin}
            made.append({"latency": ours, "vllm_latency": vllm, "over_vllm": ours / vllm, "step": step, **walls})
            print(made[-1], flush=True)
        episodes.shutdown()
    out.write_text(json.dumps(made[1:]))


def gateway_seconds(episodes: Any, rows: Sequence[dict[str, Any]], epoch: int) -> float:
    """Median latency at the gateway: of the agents' rewards."""
    asked = []
    for i, row in enumerate(rows):
        sampling = Sampling(TOKENS, ignore_eos=True)
        fields = {"text": row["prompt"], "answer": "", "record": row}
        asked.append(response_request(sampling, 0, SampleId(epoch, i, 0), (0,), fields=fields))
    done = generate(episodes, asked, deadline=DEADLINE)
    return statistics.median(float(completion.columns["turn_reward"].values.sum()) for completion in done)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
