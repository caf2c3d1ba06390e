"""Run by test_invariance.py: one saved rollout through one optimizer step, in several layouts.

Argument: a folder with `rollout.pt` and `cases.json`, {name: {"flags": Megatron's, and where they differ
"aggregation", "chunk", "tied", "mode"}}. Writes `NAME.pt` there for each case: grad norm, metrics, full gradient
of each parameter.
"""

import contextlib
import math
from unittest import mock

import torch
from tiny_megatron import VOCAB, agreed, only_step, parallel_state, refuses, rerun_state_machine, run, sampled_again

from mindspeed_rl_plugin.algorithms import Totals, resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.forward.context_parallel import positions
from mindspeed_rl_plugin.rows import Ragged, Rows
from mindspeed_rl_plugin.update.step import PolicyStep

KL_COEF, ENTROPY_COEF, TEMPERATURE = 0.1, 0.05, 0.8


def through_train_step(job, rows, case):
    """Loss and gradients by `update/` and Megatron's own train_step."""
    chosen = AlgorithmConfig(
        algorithm="grpo",
        aggregation=case.get("aggregation"),
        kl_loss_coef=KL_COEF,
        kl_estimator="k3-unbiased",
        entropy_coef=ENTROPY_COEF,
    )
    settings = ForwardSettings.from_args(
        job.args, vocab_size=VOCAB, temperature=TEMPERATURE, chunk_tokens=case.get("chunk")
    )
    update = PolicyStep(resolve(chosen), settings, job.model, norm_length=20)
    step = only_step(job, rows)
    if case.get("mode") in ("dropped", "masked"):
        rows = without_row(rows, 2, case["mode"])
    if case.get("mode") in ("filtered", "repeated"):
        rows = sampled_again(rows, torch.tensor([2, 0, 0, 1, 0, 2, 2, 1], dtype=torch.int32), case["mode"])
    mine = [rows.select(ids) for ids in step.of_rank(parallel_state.get_data_parallel_rank())]
    refuses_bad_input(update, mine)
    update.prepare(mine)
    if case.get("mode") == "replay":
        make_megatron_replay(update)
    if case.get("mode") == "mean of means":
        average_each_micro_batch(update)
    if case.get("mode") == "mean of ranks":
        average_on_each_rank(update)
    with contiguous_split() if case.get("mode") == "contiguous" else contextlib.nullcontext():
        _, grad_norm = job.train_step(update)
    assert job.samples == len(rows)
    return update.metrics(), grad_norm


def without_row(rows, index, how):
    """The rollout with one row trained nowhere: "masked" by its loss mask, or "dropped" by the columns of a sample."""
    masks = [row.clone() for row in rows["loss_mask"].rows()]
    if how == "masked":
        masks[index].zero_()
        return rows.with_columns(loss_mask=Ragged.from_rows(masks))
    kept = torch.ones(len(rows), dtype=torch.int8)
    kept[index] = 0
    advantage = torch.stack([row[row.abs().argmax()] for row in rows["advantages"].rows()])
    columns = {name: column for name, column in rows.columns.items() if name != "advantages"}
    return Rows(rows.ids, {**columns, "advantage": advantage, "valid": kept})


def refuses_bad_input(update, mine):
    """What a caller can get wrong is named before anything runs."""
    few = [Rows(part.ids, {name: part[name] for name in ("tokens", "loss_mask")}) for part in mine]
    refused = [(mine[:-1], f"{len(mine) - 1} micro-batches prepared where Megatron's step runs {len(mine)}")]
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        refused.append((few, "the update lacks columns ['logp_old', 'logp_ref', 'advantages']"))
    for given, message in refused:
        refuses(update, given, message)


def average_each_micro_batch(update):
    """The fault that the test must catch: every micro-batch averages over its own tokens."""
    across = len(update._batches) * parallel_state.get_data_parallel_world_size()
    for i, batch in enumerate(update._batches):
        counts = batch.mask.sum(-1)
        own = Totals(int(counts.sum()), int((counts > 0).sum()), update.norm_length)
        update._weights[i] = (update.algorithm.weights(counts, own) / across).float()


def average_on_each_rank(update):
    """The same of context parallelism: every rank averages over the tokens at its own positions."""
    cp_size = parallel_state.get_context_parallel_world_size()
    for i, batch in enumerate(update._batches):
        here = batch.mask.index_select(1, positions(batch.mask.shape[1]))
        update._weights[i] *= float(batch.mask.sum() / (cp_size * here.sum()))


@contextlib.contextmanager
def contiguous_split():
    """One piece of a row for each rank, where MindSpeed puts its ulysses' own (core/context_parallel, v2.3.0)."""

    def piece(tensor, axis, *_):
        size = parallel_state.get_context_parallel_world_size()
        return tensor.chunk(size, axis)[parallel_state.get_context_parallel_rank()]

    def split(batch):
        return {name: piece(tensor, 1) for name, tensor in batch.items()}

    rotary = "megatron.core.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank"
    host = mock.patch("megatron.training.utils.get_batch_on_this_cp_rank", split, create=True)
    with host, mock.patch(rotary, piece):
        yield


def make_megatron_replay(update):
    """Let the rerun state machine run the step a second time, as it does to validate a result."""
    forward_step, machine = update.forward_step, rerun_state_machine.get_rerun_state_machine()
    states = set()

    def asking(data_iterator, model):
        states.add(machine.state.name)
        machine.rerun_requested = machine.state.name == "INITIAL_RUN"
        machine.continue_requested = machine.state.name == "RERUNNING_IN_PLACE"
        return forward_step(data_iterator, model)

    update.forward_step = asking
    metrics = update.metrics
    update.metrics = lambda: metrics() if len(states) == 2 else {"replayed": 0.0}


def by_loops(job, rows, case):
    """The same loss as loops over rows and tokens in float64, one unpadded row at a time, without `update/`."""
    model = job.model[0]
    model.zero_grad_buffer()
    counts = [int(mask.sum()) for mask in rows["loss_mask"].rows()]
    sequences = sum(count > 0 for count in counts)
    total, entropies = 0.0, 0.0
    for i, count in enumerate(counts):
        if not count:
            continue
        column = {name: rows[name].row(i).double() for name in ("logp_old", "logp_ref", "advantages")}
        tokens = rows["tokens"].row(i).long()
        length = len(tokens)
        causal = torch.triu(torch.ones(length, length), 1).bool()[None, None]
        logits = model.module(tokens[None], torch.arange(length)[None], causal)[0, :, :VOCAB]
        logps = (logits.double() / TEMPERATURE).log_softmax(-1)
        for t in range(length):
            if not rows["loss_mask"].row(i)[t]:
                continue
            event = logps[t - 1]
            logp, advantage = event[tokens[t]], column["advantages"][t]
            ratio = (logp - column["logp_old"][t]).exp()
            bounded = torch.clamp(ratio, 0.8, 1.2)
            loss = -advantage * ratio if -advantage * ratio > -advantage * bounded else -advantage * bounded
            gap = column["logp_ref"][t] - logp
            half_square = gap * gap / 2
            kl = min(math.exp(float(gap.detach())) - float(gap.detach()) - 1, 10.0) + half_square - half_square.detach()
            entropy = -(event.exp() * event).sum()
            total = total + (loss + KL_COEF * kl - ENTROPY_COEF * entropy) / (count * sequences)
            entropies += float(entropy.detach())
    total.backward()
    norm = math.sqrt(sum(float(p.main_grad.double().square().sum()) for p in model.parameters()))
    return {"loss": float(total.detach()), "entropy": entropies / sum(counts)}, norm


def step_of(job, rows, case):
    how = by_loops if case.get("mode") == "loops" else through_train_step
    metrics, grad_norm = how(job, rows, case)
    if case.get("mode") != "mean of ranks":
        agreed(metrics)
    return {"grad_norm": grad_norm, "metrics": metrics, "gradients": job.gradients()}


run(step_of)
