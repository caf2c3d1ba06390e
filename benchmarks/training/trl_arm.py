"""TRL's arm, one process of it: GRPOTrainer on the same model, prompts and lengths.

torchrun --nproc-per-node 2 benchmarks/training/trl_arm.py DIR ITERATIONS OUT.json GRADERS [vllm]

GRADERS: responses that a process grades at once, in threads, with the case's own grader.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
import trl_vllm
import workload
from datasets import Dataset
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList
from trl import GRPOTrainer
from trl_parts import Clock, settings, timed

folder, iterations, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
graders = ThreadPoolExecutor(int(sys.argv[4]))
grade = runpy.run_path(str(folder / "grader.py"))["grade"]
VLLM = sys.argv[5:] == ["vllm"]  # else transformers generates
case = workload.read(folder)
LENGTHS = workload.lengths(case)
END = case.vocabulary - 1


class Imposed(LogitsProcessor):
    """Ends each row at its length and not before: the last token is the end token."""

    def __init__(self, limits: list[int], prompt: int) -> None:
        self.limits, self.prompt = torch.tensor(limits), prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, END] = -torch.inf
        last = self.limits == input_ids.shape[1] - self.prompt + 1
        scores[last] = -torch.inf
        scores[last, END] = 0.0
        return scores


def limits_of(rows: Sequence[Sequence[int]]) -> list[int]:
    """Imposed tokens of the response to each row of prompt tokens."""
    count: Counter[int] = Counter()
    limits = []
    for row in rows:
        prompt = workload.prompt_of(row)
        limits.append(LENGTHS[prompt][count[prompt] % case.members])
        count[prompt] += 1
    return limits


def with_lengths(own: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    """`generate` of a transformers model that ends each response at its length; `seen` takes the tokens of a call."""

    def call(*args, **kwargs):
        ids = kwargs["input_ids"]
        limits = limits_of(ids.tolist())
        seen.append(sum(limits) + ids.numel())
        return own(*args, logits_processor=LogitsProcessorList([Imposed(limits, ids.shape[1])]), **kwargs)

    return call


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    if VLLM:
        trl_vllm.prepare(folder)
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    clock = Clock()
    ranks = int(os.environ["WORLD_SIZE"])
    steps = case.samples // (case.micro_batch * ranks)
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: list(graders.map(grade, completions)),
        args=settings(
            out,
            iterations,
            micro_batch=case.micro_batch,
            steps=steps,
            members=case.members,
            limit=case.limit,
            **(trl_vllm.options(case.prompt + case.limit, ignore_eos=True) if VLLM else {}),
        ),
        train_dataset=Dataset.from_list([{"prompt": r["prompt"]} for r in rows]),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        callbacks=[clock],
    )
    seen: list[int] = []
    if VLLM:
        llm, generation = trainer.vllm_generation.llm, trainer.vllm_generation
        llm.generate = timed(clock, "generate", trl_vllm.imposed(llm.generate, limits_of, seen))
        generation.sync_weights = timed(clock, "sync", generation.sync_weights)
    else:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.generate = timed(clock, "generate", with_lengths(model.generate, seen))
    trainer._calculate_rewards = timed(clock, "reward", trainer._calculate_rewards)
    trainer._generate_and_score_completions = timed(clock, "rollout", trainer._generate_and_score_completions)
    trainer.train()
    counts: list[list[int]] = [[] for _ in range(ranks)]
    torch.distributed.all_gather_object(counts, seen)
    if trainer.accelerator.is_main_process:
        tokens = [sum(both) for both in zip(*counts, strict=True)]
        measured = {"steps": clock.steps, "tokens": tokens, "drift": clock.drift, "version": trl.__version__}
        out.write_text(json.dumps(measured))


main()
