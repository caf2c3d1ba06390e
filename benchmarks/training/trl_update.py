"""TRL's passes of one optimizer step on given rows, in one process: used by shared_prompts.py.

    python benchmarks/training/trl_update.py CASE REPEATS

Prints JSON, [{metric: value} of each repeat]. The rows are one micro-batch of GRPOTrainer or DPOTrainer: its log-prob
pass, its loss with the backward pass, clipping, and AdamW with a learning rate of 0.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shared_rows
import torch
import transformers
import workload
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOTrainer
from trl_parts import settings


def make_model(longest: int) -> Any:
    size = shared_rows.SIZES
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).float()


def make_trainer(case: shared_rows.Case, folder: Path) -> Any:
    common = {
        "model": make_model(case.prompt + case.response),
        "processing_class": workload.tokenizer(shared_rows.SIZES.vocabulary),
    }
    if case.pair:
        args = DPOConfig(
            str(folder), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, disable_dropout=True
        )
        args.precompute_ref_log_probs = True
        pair = {"prompt": "w1", "chosen": " w2", "rejected": " w3"}
        return DPOTrainer(args=args, train_dataset=Dataset.from_list([pair]), **common)
    args = settings(folder / "out", 1, micro_batch=case.members, steps=1, members=case.members, limit=case.response)
    args.model_init_kwargs = None
    data = Dataset.from_list([{"prompt": "w1"}])
    return GRPOTrainer(args=args, train_dataset=data, reward_funcs=lambda completions, **_: [0.0], **common)


def inputs_of(case: shared_rows.Case) -> dict[str, torch.Tensor]:
    """The micro-batch as the trainer's loss takes it."""
    ids = torch.tensor(case.rows())
    prompts, completions = ids[:, : case.prompt], ids[:, case.prompt :]
    if case.pair:
        said = (torch.arange(ids.shape[1]) >= case.prompt).long().expand_as(ids)
        reference = {"ref_chosen_logps": torch.tensor([-900.0]), "ref_rejected_logps": torch.tensor([-905.0])}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": said, **reference}
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-1.0, 1.0, case.members),
        "num_items_in_batch": torch.tensor(float(completions.numel())),
    }


def measure(case: shared_rows.Case, repeats: int, folder: Path) -> list[dict[str, float]]:
    trainer = make_trainer(case, folder)
    trainer.current_gradient_accumulation_steps = 1
    model, inputs = trainer.model.train(), inputs_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def turn() -> dict[str, float]:
        start = time.perf_counter(), time.process_time()
        with torch.no_grad():
            if case.pair:
                own = {name: inputs[name] for name in ("input_ids", "attention_mask", "completion_mask")}
                trainer.compute_ref_log_probs(model, own)
            else:
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
                old, *_ = trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), case.response)
                inputs["old_per_token_logps"] = old
        middle = time.perf_counter(), time.process_time()
        trainer.compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return shared_rows.seconds(start, middle, (time.perf_counter(), time.process_time()))

    before = shared_rows.resident()
    shared_rows.clear_peak()
    turn()  # the first one of a process is slower
    result = [turn() for _ in range(repeats)]
    result[-1]["peak_bytes"] = shared_rows.peak_resident() - before
    return result


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(measure(shared_rows.CASES[sys.argv[1]], int(sys.argv[2]), Path(place))))
