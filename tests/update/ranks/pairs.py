"""Run by test_pair_invariance.py: one saved set of pairs through one optimizer step of DPO, in several layouts.

Argument: a folder with `rollout.pt`, whose rows are taken as pairs of two, and `cases.json`, {layout: {"flags":
Megatron's, "variants": {variant: fields of AlgorithmConfig}, and where they differ "chunk", "mode"}}. Writes
`LAYOUT.pt`: {variant: grad norm, metrics, full gradient of each parameter}. Weights stay as they are.
"""

import math

import torch
from tiny_megatron import VOCAB, agreed, only_step, parallel_state, refuses, run

from mindspeed_rl_plugin.algorithms import resolve
from mindspeed_rl_plugin.config import AlgorithmConfig
from mindspeed_rl_plugin.forward import ForwardSettings
from mindspeed_rl_plugin.forward.schedule import ends_here
from mindspeed_rl_plugin.rows import Rows, SampleId
from mindspeed_rl_plugin.update.pair_step import PairStep

TEMPERATURE = 0.8


def as_pairs(rows):
    """Two rows beside each other are chosen and rejected; their references lie around the model's own log-probs."""
    ids = tuple(SampleId(0, i // 2, i % 2) for i in range(len(rows)))
    reference = torch.stack([row.sum() for row in rows["logp_old"].rows()]).double()
    return Rows(ids, {"tokens": rows["tokens"], "loss_mask": rows["loss_mask"], "reference": reference})


def through_train_step(job, rows, case, chosen):
    """By `update/` and Megatron's own train_step."""
    settings = ForwardSettings.from_args(
        job.args, vocab_size=VOCAB, temperature=TEMPERATURE, chunk_tokens=case.get("chunk", 0)
    )
    update = PairStep(resolve(chosen), settings, job.model, len(rows) // 2)
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = [rows.select(ids) for ids in only_step(job, rows).of_rank(dp_rank)]
    refuses_bad_input(update, mine)
    update.prepare(mine)
    if case.get("mode") == "forgotten ranks":  # the fault that the test must catch
        object.__setattr__(update._scaling, "dp_size", 1)
    job.samples = 0
    losses, grad_norm = job.train_step(update)
    assert job.samples == len(rows), "the learning rate and the samples count sequences"
    metrics = update.metrics()
    if dp_size == 1 and ends_here(job.model):
        assert math.isclose(float(losses["loss"]), metrics["loss"], rel_tol=1e-4), "Megatron's line of the loss"
    return metrics, grad_norm


def refuses_bad_input(update, mine):
    """What a caller can get wrong is named before anything runs."""
    one, two = mine[0].ids[:2]
    cut = [mine[0].select((two, one, *mine[0].ids[2:])), *mine[1:]]
    few = f"{len(mine) - 1} micro-batches prepared where Megatron's step runs {len(mine)}"
    refuses(update, mine[:-1], few)
    refuses(update, cut, "a micro-batch cuts a pair")


def by_loops(job, rows, case, chosen):
    """The same as loops over pairs, answers and tokens in float64, one unpadded row at a time."""
    model, beta = job.model[0], chosen.dpo_beta
    model.zero_grad_buffer()
    total, margins, chosen_gain, pairs = 0.0, [], 0.0, len(rows) // 2
    for pair in range(pairs):
        gains = []
        for row in (2 * pair, 2 * pair + 1):
            tokens, mask = rows["tokens"].row(row).long(), rows["loss_mask"].row(row)
            length = len(tokens)
            causal = torch.triu(torch.ones(length, length), 1).bool()[None, None]
            logits = model.module(tokens[None], torch.arange(length)[None], causal)[0, :, :VOCAB]
            logps = (logits.double() / TEMPERATURE).log_softmax(-1)
            answer = [logps[t - 1, tokens[t]] for t in range(length) if mask[t]]
            gain = sum(answer) - rows["reference"][row]
            gains.append(gain / max(len(answer), 1) if chosen.dpo_length_norm else gain)
        h = gains[0] - gains[1]
        margins.append(beta * float(h.detach()))
        chosen_gain += float(gains[0].detach())
        if chosen.dpo_loss == "hinge":
            loss = 1 - beta * h if beta * float(h) < 1 else 0 * h
        elif chosen.dpo_loss == "ipo":
            loss = (h - 1 / (2 * beta)) ** 2
        else:
            wrong = chosen.dpo_label_smoothing
            loss = (1 - wrong) * torch.log1p(torch.exp(-beta * h)) + wrong * torch.log1p(torch.exp(beta * h))
        total = total + loss / pairs
    total.backward()
    norm = math.sqrt(sum(float(p.main_grad.double().square().sum()) for p in model.parameters()))
    accuracy = sum(margin > 0 for margin in margins) / pairs
    means = {"margin": sum(margins) / pairs, "chosen_reward": beta * chosen_gain / pairs}
    return {"loss": float(total.detach()), "accuracy": accuracy, **means}, norm


def steps_of(job, rows, case):
    how = by_loops if case.get("mode") == "loops" else through_train_step
    steps = {}
    for variant, fields in case["variants"].items():
        metrics, grad_norm = how(job, rows, case, AlgorithmConfig(algorithm="dpo", **fields))
        steps[variant] = {"grad_norm": grad_norm, "metrics": agreed(metrics), "gradients": job.gradients()}
    return steps


run(steps_of, as_pairs)
