"""Run by test_values.py: one saved rollout through one optimizer step of a critic, in several layouts.

Argument: a folder with `rollout.pt` and `cases.json`, {layout: Megatron's flags, or {"flags": those, "budget": tokens
of a packed micro-batch, "rows": "filtered" (some count several times, others never) or "repeated" (copies of them)}}.
Writes `LAYOUT.pt`: the values before the step, grad norm, metrics, full gradient of each parameter.
"""

import torch
import torch.distributed as dist
from tiny_megatron import VOCAB, only_step, parallel_state, run, sampled_again

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.critic.critic import Critic
from mindspeed_rl_plugin.forward import ForwardSettings, plan_tokens
from mindspeed_rl_plugin.forward.schedule import ends_here
from mindspeed_rl_plugin.rows import Ragged, Rows
from mindspeed_rl_plugin.update.value_step import ValueStep

TIMES = torch.tensor([2, 0, 0, 1, 0, 2, 2, 1], dtype=torch.int32)


def step_of(job, rows, case):
    budget = case.get("budget")
    settings = ForwardSettings.from_args(
        job.args, vocab_size=VOCAB, temperature=0.8, max_tokens=budget, packed=budget is not None
    )
    update = ValueStep(resolve(AlgorithmConfig(algorithm="ppo")), settings, job.model)
    critic = Critic(job.model, job.optimizer, None, job.config)
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    step = only_step(job, rows)
    if budget is not None:
        lengths = dict(zip(rows.ids, rows["tokens"].lengths.tolist(), strict=True))
        (step,) = plan_tokens([step], lengths, settings.budget)
    batches = [rows.select(ids) for ids in step.of_rank(dp_rank)]
    before = critic.values(batches, settings)
    assert (before is not None) == ends_here(job.model)
    mine = (dp_rank, [row for part in before for row in part.rows()]) if before is not None else None
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    parts = dict(part for part in ranks if part is not None)
    values = Ragged.from_rows([row for dp in sorted(parts) for row in parts[dp]])
    # Some values far from where they were, so that the clip bites.
    order = Rows(tuple(i for dp in range(dp_size) for ids in step.of_rank(dp) for i in ids), {"values": values})
    values = order.select(rows.ids)["values"]
    moved = rows["logp_ref"].values - rows["logp_old"].values
    rows = rows.with_columns(values=Ragged(values.values + moved, values.offsets), returns=rows["logp_old"])
    if "rows" in case:
        rows = sampled_again(rows, TIMES, case["rows"])
    update.prepare([rows.select(ids) for ids in step.of_rank(dp_rank)])
    _, grad_norm = job.train_step(update)
    step = {"grad_norm": grad_norm, "metrics": update.metrics(), "gradients": job.gradients()}
    return {"values": values.values, **step}


run(step_of, critic=True)
