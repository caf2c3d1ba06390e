"""Run by test_preset_invariance.py: one saved rollout through one optimizer step of each preset, in several layouts.

Argument: a folder with `rollout.pt` and `cases.json`, {layout: {"flags": Megatron's, "variants": {variant: fields of
AlgorithmConfig}}}. Writes `LAYOUT.pt`: {variant: grad norm, metrics, full gradient of each parameter}. Weights stay
as they are (learning rate 0), so all variants share one model.
"""

import json

import torch
import torch.distributed as dist
from tiny_megatron import VOCAB, Job, load_rows, parallel_state, run

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.forward import ForwardSettings, plan_batches
from mindspeed_rl_plugin.types import Ragged
from mindspeed_rl_plugin.update.step import Update


def uneven(column):
    """Advantages that differ between the tokens of a response, as REINFORCE++ has them."""
    ramp = torch.cat([torch.linspace(0.5, 1.5, len(row)) for row in column.rows()])
    return Ragged(column.values * ramp, column.offsets)


def step_of(job, rows, chosen):
    settings = ForwardSettings.from_args(job.args, vocab_size=VOCAB, temperature=0.8)
    algorithm = resolve(AlgorithmConfig(**chosen))
    if algorithm.per_token:
        rows = rows.with_columns(advantages=uneven(rows["advantages"]))
    update = Update(algorithm, settings, job.model, norm_length=20)
    (step,) = plan_batches(
        rows.ids,
        global_batch_size=len(rows),
        micro_batch_size=job.args.micro_batch_size,
        dp_size=parallel_state.get_data_parallel_world_size(),
    )
    update.prepare([rows.select(ids) for ids in step.of_rank(parallel_state.get_data_parallel_rank())])
    _, grad_norm = job.train_step(update)
    metrics = update.metrics()
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, metrics)
    assert all(m == metrics for m in everywhere), f"ranks disagree on the metrics: {everywhere}"
    return {"grad_norm": grad_norm, "metrics": metrics, "gradients": job.gradients()}


def main(folder):
    rows = load_rows(folder / "rollout.pt")
    for layout, case in json.loads((folder / "cases.json").read_text()).items():
        with Job(f"{case['flags']} --global-batch-size {len(rows)}", lr=0.0) as job:
            found = {name: step_of(job, rows, chosen) for name, chosen in case["variants"].items()}
            if dist.get_rank() == 0:
                torch.save(found, folder / f"{layout}.pt")


run(main)
