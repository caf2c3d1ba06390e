"""Run by test_preset_invariance.py: one saved rollout through one optimizer step of each preset, in several layouts.

Argument: a folder with `rollout.pt` and `cases.json`, {layout: {"flags": Megatron's, "variants": {variant: fields of
AlgorithmConfig, and "times": how often each row was sampled}, and for micro-batches by tokens "budget" and "packed";
"bounded": attention takes packed rows by their boundaries}}. Writes `LAYOUT.pt`: {variant: grad norm, metrics, full
gradient of each parameter, rows of each micro-batch}. Weights stay as they are (learning rate 0), so all variants share
one model.
"""

from unittest import mock

import torch
from tiny_megatron import VOCAB, agreed, only_step, parallel_state, run

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.forward import ForwardSettings, plan_tokens
from mindspeed_rl_plugin.host.npu_ops import npu_fusion_attention
from mindspeed_rl_plugin.rows import Ragged
from mindspeed_rl_plugin.update.step import PolicyStep


def uneven(column):
    """Advantages that differ between the tokens of a response, as REINFORCE++ has them."""
    ramp = torch.cat([torch.linspace(0.5, 1.5, len(row)) for row in column.rows()])
    return Ragged(column.values * ramp, column.offsets)


ATTENTION = "megatron.core.transformer.dot_product_attention.DotProductAttention"
BOUNDARIES = []  # what the attention was handed


def by_boundaries(self, query, key, value, attention_mask, packed_seq_params=None, **_):
    """In the place of Megatron's own attention, like TransformerEngine's and MindSpeed's; query `[T, heads, D]`."""
    assert attention_mask is None and packed_seq_params.qkv_format == "thd" and query.dim() == 3
    ends = packed_seq_params.cu_seqlens_q.tolist()
    assert packed_seq_params.max_seqlen_q == max(b - a for a, b in zip(ends, ends[1:], strict=False))
    BOUNDARIES.append((ends, len(query)))
    given = {"scale": query.shape[-1] ** -0.5, "atten_mask": torch.ones(2048, 2048).triu(1).bool(), "sparse_mode": 2}
    lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": packed_seq_params.cu_seqlens_kv.tolist()}
    return npu_fusion_attention(query, key, value, 0, "TND", **given, **lengths)[0]


def step_of(job, rows, chosen, budget=None, packed=False, chunk=None):
    settings = ForwardSettings.from_args(
        job.args, vocab_size=VOCAB, temperature=0.8, max_tokens=budget, packed=packed, chunk_tokens=chunk
    )
    chosen = dict(chosen)
    if times := chosen.pop("times", None):
        rows = rows.with_columns(multiplicity=torch.tensor(times, dtype=torch.int32))
    algorithm = resolve(AlgorithmConfig(**chosen))
    if algorithm.per_token:
        rows = rows.with_columns(advantages=uneven(rows["advantages"]))
    update = PolicyStep(algorithm, settings, job.model, norm_length=20)
    step = only_step(job, rows)
    if budget:
        lengths = dict(zip(rows.ids, rows["tokens"].lengths.tolist(), strict=True))
        (step,) = plan_tokens([step], lengths, settings.budget)
    batches = step.of_rank(parallel_state.get_data_parallel_rank())
    update.prepare([rows.select(ids) for ids in batches])
    job.samples = 0
    _, grad_norm = job.train_step(update)
    assert job.samples == len(rows), "the schedules of learning rate and samples see the configured batch"
    metrics = agreed(update.metrics())
    sizes = [len(ids) for ids in batches]
    return {"grad_norm": grad_norm, "metrics": metrics, "gradients": job.gradients(), "sizes": sizes}


def bounded_step(job, rows, chosen, **how):
    """The same where the attention takes boundaries and refuses masks."""
    BOUNDARIES.clear()
    implementation = mock.patch.object(job.args, "transformer_impl", "transformer_engine")
    with implementation, mock.patch(f"{ATTENTION}.forward", by_boundaries):
        step = step_of(job, rows, chosen, **how)
    return step | {"boundaries": list(BOUNDARIES)}


def steps_of(job, rows, case):
    how = {name: case[name] for name in ("budget", "packed", "chunk") if name in case}
    step = bounded_step if case.get("bounded") else step_of
    return {name: step(job, rows, chosen, **how) for name, chosen in case["variants"].items()}


run(steps_of)
