"""The oracle of test_steps.py: losses of a step as loops over rows and tokens in float64, one unpadded row at a time.

Nothing of the package takes part; the model is Megatron's.
"""

import math

import torch
from tiny_megatron import VOCAB

TEMPERATURE = 0.8


def events(model, rows, i):
    """(token, distribution before it) of each trained token of row i."""
    tokens, mask = rows["tokens"].row(i).long(), rows["loss_mask"].row(i)
    length = len(tokens)
    causal = torch.triu(torch.ones(length, length), 1).bool()[None, None]
    logits = model(tokens[None], torch.arange(length)[None], causal)[0, :, :VOCAB]
    logps = (logits.double() / TEMPERATURE).log_softmax(-1)
    return [(t, int(tokens[t]), logps[t - 1]) for t in range(length) if mask[t]]


def policy_loss(model, rows, chosen):
    """GRPO's clipped loss with k3-unbiased and an entropy bonus, mean over sequences of the mean over tokens."""
    counts = [int(mask.sum()) for mask in rows["loss_mask"].rows()]
    sequences, total, entropies = sum(count > 0 for count in counts), 0.0, 0.0
    for i, count in enumerate(counts):
        old, reference, advantages = (rows[n].row(i).double() for n in ("logp_old", "logp_ref", "advantages"))
        for t, token, event in events(model, rows, i):
            logp, advantage = event[token], advantages[t]
            ratio = (logp - old[t]).exp()
            bounded = torch.clamp(ratio, 0.8, 1.2)
            loss = -advantage * ratio if -advantage * ratio > -advantage * bounded else -advantage * bounded
            gap = reference[t] - logp
            half_square, number = gap * gap / 2, float(gap.detach())
            kl = min(math.exp(number) - number - 1, 10.0) + half_square - half_square.detach()
            entropy = -(event.exp() * event).sum()
            loss = loss + chosen["kl_loss_coef"] * kl - chosen["entropy_coef"] * entropy
            total = total + loss / (count * sequences)
            entropies += float(entropy.detach())
    return total, {"entropy": entropies / sum(counts)}


def pair_loss(model, rows, chosen):
    """DPO's losses: mean over pairs."""
    beta, pairs, total, margins, gain_of_chosen = chosen["dpo_beta"], len(rows) // 2, 0.0, [], 0.0
    for pair in range(pairs):
        gains = []
        for row in (2 * pair, 2 * pair + 1):
            answer = [event[token] for _, token, event in events(model, rows, row)]
            gain = sum(answer) - rows["reference"][row]
            gains.append(gain / max(len(answer), 1) if chosen.get("dpo_length_norm") else gain)
        h = gains[0] - gains[1]
        margins.append(beta * float(h.detach()))
        gain_of_chosen += float(gains[0].detach())
        wrong = chosen.get("dpo_label_smoothing", 0.0)
        losses = {
            "hinge": 1 - beta * h if margins[-1] < 1 else 0 * h,
            "ipo": (h - 1 / (2 * beta)) ** 2,
            "sigmoid": (1 - wrong) * torch.log1p(torch.exp(-beta * h)) + wrong * torch.log1p(torch.exp(beta * h)),
        }
        total = total + losses[chosen["dpo_loss"]] / pairs
    means = {"margin": sum(margins), "accuracy": sum(m > 0 for m in margins), "chosen_reward": beta * gain_of_chosen}
    return total, {f"dpo/{name}": value / pairs for name, value in means.items()}


def step_by_loops(job, rows, chosen):
    """Metrics, gradient norm and gradients of one step, on each rank alone."""
    model = job.model[0]
    model.zero_grad_buffer()
    loss_of = pair_loss if chosen["algorithm"] == "dpo" else policy_loss
    total, metrics = loss_of(model.module, rows, chosen)
    total.backward()
    norm = math.sqrt(sum(float(p.main_grad.double().square().sum()) for p in model.parameters()))
    return {"metrics": {"loss": float(total.detach()), **metrics}, "grad_norm": norm, "gradients": job.gradients()}
