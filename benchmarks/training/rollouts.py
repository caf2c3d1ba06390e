"""Rollouts of episodes by one engine apart from training, and single turns of as many tokens by the same engine.

    python benchmarks/training/rollouts.py FOLDER OUT.json EPISODES REPEATS NAME=WHO:WORKERS ...

One process. All rollouts take turns; before each one the engine forgets its prefixes, as it does when weights change.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import episode_tools
import torch.distributed as dist
from episode_task import MEMBERS, TURNS, schemas, tasks
from safetensors.torch import load_file
from transformers import AutoTokenizer

from mindspeed_rl_plugin.config.episode_flags import EpisodeConfig
from mindspeed_rl_plugin.dock.peers import Peers
from mindspeed_rl_plugin.engine import vllm_api
from mindspeed_rl_plugin.engine.options import VllmOptions
from mindspeed_rl_plugin.engine.rollout_engine import Engine, generate, response_request
from mindspeed_rl_plugin.engine.vllm_engine import VllmEngine
from mindspeed_rl_plugin.episodes.episode_engine import EpisodeEngine
from mindspeed_rl_plugin.episodes.episode_rows import EPISODE_COUNTS
from mindspeed_rl_plugin.episodes.setup import EpisodeSetup
from mindspeed_rl_plugin.rows import Completion, GenerateRequest, SampleId, Sampling

DEADLINE = 300.0  # seconds without a turn
AGENTS, AGENT = Path(episode_tools.__file__).with_name("episode_agents.py"), "play_"  # file, and begin of names in it


class Busy:
    """An engine, and the seconds in which it takes requests and makes steps for them."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.seconds = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self._timed(self._engine.submit, requests)

    def poll(self, timeout: float) -> list[Completion]:
        return self._timed(self._engine.poll, timeout)

    def _timed(self, function: Any, *given: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*given)
        finally:
            self.seconds += time.perf_counter() - begin


class Bench:
    """folder: as `episode_task` wrote it; count: episodes of a rollout."""

    def __init__(self, folder: Path, count: int) -> None:
        sizes = json.loads((folder / "sizes.json").read_text())
        self.folder, self.prompt, self.limit, self.rollouts = folder, sizes["prompt"], sizes["limit"], 0
        self.samples = [SampleId(0, i // MEMBERS, i % MEMBERS) for i in range(count)]
        self.tasks = tasks(count // MEMBERS)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        config = json.loads((folder / "model" / "config.json").read_text())
        ends = (self.tokenizer.eos_token_id,)
        options = VllmOptions(config, self.prompt + self.limit, kv_cache_bytes=1 << 28, eos_token_ids=ends)
        self.engine = VllmEngine(options)
        vllm_api.model(self.engine._worker).load_weights(load_file(folder / "model" / "model.safetensors").items())
        self.busy = Busy(self.engine)

    def episodes(self, who: str, workers: int) -> EpisodeEngine:
        """The engine with a tool, an environment or an agent of `AGENTS`."""
        if who.startswith(AGENT):
            flags = {"agent": f"{AGENTS}:{who}"}
        else:
            user = f"{episode_tools.__file__}:{who}"
            flags = {"environment": user} if inspect.isclass(getattr(episode_tools, who)) else {"tools": (user,)}
        flags = EpisodeConfig(**flags, max_turns=TURNS, environment_workers=workers)
        setup = EpisodeSetup(flags, "chat", str(self.folder / "tokenizer"), self.prompt, self.limit, DEADLINE)
        return setup.over(self.busy, self.tokenizer, setup.environments(), Peers())

    def requests(self, epoch: int) -> list[GenerateRequest]:
        """One for each episode."""
        made, tools = [], schemas()
        for sample in self.samples:
            task = self.tasks[sample.group]
            said = [{"role": "user", "content": task["prompt"]}]
            prompt = self.tokenizer.apply_chat_template(said, tools=tools, add_generation_prompt=True)["input_ids"]
            fields = {"text": task["prompt"], "answer": "", "record": task, "messages": said}
            made.append(response_request(Sampling(self.limit), 0, sample._replace(epoch=epoch), prompt, fields=fields))
        return made

    def timed(self, engine: Engine, requests: list[GenerateRequest]) -> tuple[float, float, list[Completion]]:
        """Seconds of a rollout, of the engine in it, and what came."""
        self.rollouts += 1
        self.engine.update_weights(self.rollouts)
        self.busy.seconds, begin = 0.0, time.perf_counter()
        done = generate(engine, requests, deadline=DEADLINE)
        return time.perf_counter() - begin, self.busy.seconds, done

    def rollout(self, engine: EpisodeEngine, workers: int | None, epoch: int) -> dict[str, float]:
        """Episodes, and twice single turns that sample as many tokens from the same prompts: alone, and behind as many
        tokens of the prompt as the episodes have of observations. workers: None where all agents run at once."""
        requests = self.requests(epoch)
        wall, busy, done = self.timed(engine, requests)
        tokens = sum(c.sampled for c in done)
        alone, with_prompts = (self.single_turns(requests, done, observations) for observations in (False, True))
        each = [dict(zip(EPISODE_COUNTS, c.columns["episode_counts"][0].tolist(), strict=True)) for c in done]
        spent = [counts["milliseconds"] / 1000 for counts in each]
        asleep = sum(spent) / workers if workers else max(spent)
        turns = sum(len(c.turns) for c in done)
        counts = {"turns": turns, "calls": sum(counts["calls"] for counts in each)}
        seconds = {"wall": wall, "engine": busy, "environments": asleep}
        seconds |= {"single_turns": with_prompts, "single_turns_sampled": alone}
        return {**seconds, **{name: n / len(done) for name, n in {**counts, "tokens": tokens}.items()}}

    def single_turns(self, requests: list[GenerateRequest], done: list[Completion], observations: bool) -> float:
        """Seconds of single turns of as many tokens as episodes have: sampled, and of their observations if asked for,
        for which the first tokens of the response stand in the prompt. No two rows share these."""
        asked = []
        for request, completion in zip(requests, done, strict=True):
            seen = completion.tokens[: len(completion.tokens) - completion.sampled] if observations else ()
            sampling = replace(request.sampling, max_tokens=completion.sampled, ignore_eos=True)
            tokens = (*request.prompt_tokens, *seen)
            asked.append(replace(request, task=None, prompt_tokens=tokens, sampling=sampling))
        seconds, _, turns = self.timed(self.busy, asked)
        assert [len(turn.tokens) for turn in turns] == [completion.sampled for completion in done]
        return seconds


def main(folder: Path, out: Path, count: int, repeats: int, cases: dict[str, tuple[str, int]]) -> None:
    """Rows of every case, the first one of each not kept: it warms up."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bench = Bench(folder, count)
    engines = {name: bench.episodes(*case) for name, case in cases.items()}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for epoch in range(repeats + 1):
        for name, engine in engines.items():
            who, workers = cases[name]
            rows[name].append(bench.rollout(engine, None if who.startswith(AGENT) else workers, epoch))
    for engine in engines.values():
        engine._lead.close()
    bench.engine.shutdown()
    out.write_text(json.dumps({name: made[1:] for name, made in rows.items()}))


if __name__ == "__main__":
    named = (argument.split("=") for argument in sys.argv[5:])
    asked = {name: (given.split(":")[0], int(given.split(":")[1])) for name, given in named}
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), asked)
