"""Run by test_first_step.py: log-probs, then two optimizer steps on the same rows, in several layouts.

Argument: a folder with `rollout.pt` and `cases.json`, {name: {"flags": Megatron's, and
"chunk" for log-probs in chunks}}.
Writes `NAME.pt` there for each case: log-probs of all rows before the steps and after them, metrics of both steps.
"""

import functools

import torch
import torch.distributed as dist
from tiny_megatron import VOCAB, only_step, parallel_state, run

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.rows import Ragged
from mindspeed_rl_plugin.stages.logprobs import compute_logps
from mindspeed_rl_plugin.update.step import PolicyStep


def everywhere(micro_batches, logps):
    """Row id -> log-probs, from all data parallel ranks of the last stage."""
    mine = {}
    for rows, column in zip(micro_batches, logps or [], strict=logps is not None):
        assert torch.equal(column.lengths, rows["tokens"].lengths)
        mine.update({tuple(i): row.clone() for i, row in zip(rows.ids, column.rows(), strict=True)})
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {i: row for part in parts for i, row in part.items()}


def hooks_of(chunk):
    return getattr(chunk, "remove_forward_pre_hook_handles", {})


def check_quiet(chunk, *ignored):
    """During the log-prob pass: eval mode, no gradient, and no hook of --overlap-param-gather."""
    assert not chunk.training and not torch.is_grad_enabled() and not hooks_of(chunk)


def step_of(job, rows, case):
    settings = ForwardSettings.from_args(job.args, vocab_size=VOCAB, temperature=0.8, chunk_tokens=case.get("chunk", 0))
    ids = only_step(job, rows).of_rank(parallel_state.get_data_parallel_rank())
    mine = [rows.select(part) for part in ids]
    for chunk in job.model:
        chunk.train()
    watch = [chunk.module.register_forward_hook(functools.partial(check_quiet, chunk)) for chunk in job.model]
    logps = compute_logps(job.model, mine, settings)
    for hook in watch:
        hook.remove()
    assert (logps is None) == (not parallel_state.is_pipeline_last_stage(ignore_virtual=True))
    assert all(chunk.training and bool(hooks_of(chunk)) == job.args.overlap_param_gather for chunk in job.model)
    before = everywhere(mine, logps)
    filled = []
    for part in mine:
        column = Ragged.from_rows([before[tuple(i)] for i in part.ids])
        filled.append(part.with_columns(logp_old=column, logp_ref=column))
    update = PolicyStep(resolve(AlgorithmConfig(algorithm="grpo")), settings, job.model)
    metrics = []
    for _ in range(2):
        update.prepare(filled)
        job.train_step(update)
        metrics.append(update.metrics())
    return {"before": before, "after": everywhere(mine, compute_logps(job.model, mine, settings)), "metrics": metrics}


run(step_of, lr=1e-2)
