"""TRL's arm of episodes.py, one process of it: GRPOTrainer with a tool or an environment, whose loop is as it comes.

torchrun --nproc-per-node 2 benchmarks/training/trl_episodes.py FOLDER ITERATIONS OUT.json [vllm]
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import episode_tools
import torch
import transformers
import trl
import trl_vllm
from datasets import Dataset
from episode_task import LIMIT, MICRO_BATCH, TURNS
from transformers import AutoTokenizer
from trl import GRPOTrainer
from trl_parts import Clock, settings, timed

folder, iterations, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
VLLM = sys.argv[4:] == ["vllm"]  # else transformers generates
case = json.loads((folder / "case.json").read_text())


def counted(generate: Callable[..., Any], seen: list[list[int]]) -> Callable[..., Any]:
    """`_generate`; `seen` takes episodes, turns, calls and sampled tokens of each rollout."""

    def call(prompts: list[Any]) -> Any:
        made = generate(prompts)
        _, _, masks, conversations, *_ = made
        roles = [message["role"] for conversation in conversations for message in conversation]
        seen.append([len(masks), roles.count("assistant"), roles.count("tool"), sum(map(sum, masks))])
        return made

    return call


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    if VLLM:
        trl_vllm.prepare(folder)
    clock, ranks = Clock(), int(os.environ["WORLD_SIZE"])
    who = getattr(episode_tools, case["who"])
    tasks = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    longest = json.loads((folder / "sizes.json").read_text())["prompt"] + 2 * LIMIT
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [episode_tools.grade(completion) for completion in completions],
        args=settings(
            out,
            iterations,
            micro_batch=MICRO_BATCH,
            steps=case["prompts"] * case["members"] // (MICRO_BATCH * ranks),
            members=case["members"],
            limit=LIMIT,
            max_tool_calling_iterations=TURNS - 1,
            **(trl_vllm.options(longest) if VLLM else {}),
        ),
        train_dataset=Dataset.from_list(
            [{**task, "prompt": [{"role": "user", "content": task["prompt"]}]} for task in tasks]
        ),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        callbacks=[clock],
        **({"environment_factory": who} if inspect.isclass(who) else {"tools": [who]}),
    )
    seen: list[list[int]] = []
    if VLLM:
        generation = trainer.vllm_generation
        generation.sync_weights = timed(clock, "sync", generation.sync_weights)
    trainer._generate = timed(clock, "rollout", counted(trainer._generate, seen))
    trainer.train()
    every: list[list[list[int]]] = [[] for _ in range(ranks)]
    torch.distributed.all_gather_object(every, seen)
    if trainer.accelerator.is_main_process:
        counts = [[sum(column) for column in zip(*both, strict=True)] for both in zip(*every, strict=True)]
        measured = {"steps": clock.steps, "counts": counts, "drift": clock.drift, "version": trl.__version__}
        out.write_text(json.dumps(measured))


main()
