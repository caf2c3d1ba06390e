"""Engine and trainer against the same model in float64: what is left between them is rounding, and as small as can be.

An untrained model's log-probs agree within 2e-5 (`test_agreement`) because all its activations are small. In a
trained one attention scores reach 200, float32 rounds them by up to 1e-5, and that goes into the log-probs. So here
the weights are large, and the yardstick is a plain float32 model: neither side may be much farther from float64. An
error of two parts in a million in every linear layer of the engine fails here, and passes within 2e-5.
"""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from mindspeed_rl_plugin.prompts.tokenizer import load_tokenizer

LAYERS, HEADS, HEAD_DIM = 2, 2, 32
EPSILON, ROTARY_BASE, LARGE = 1e-5, 10000, "0.4"


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of `[B, S, heads, HEAD_DIM]`."""
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=x.dtype) / HEAD_DIM
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), 1.0 / ROTARY_BASE**exponents)
    angles = torch.cat([angles, angles], -1)[:, None]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def attention(qkv: Tensor) -> Tensor:
    """Causal attention from `[B, S, heads x (q, k, v)]` to `[B, S, heads x HEAD_DIM]`."""
    batch, length = qkv.shape[:2]
    q, k, v = qkv.view(batch, length, HEADS, 3, HEAD_DIM).unbind(3)
    scores = torch.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)) / HEAD_DIM**0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(later, -torch.inf).softmax(-1), v).flatten(2)


def log_probs(weights: dict[str, Tensor], tokens: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Log-prob `[B, S - 1]` of each token of `[B, S]` but the first, by the model of `jobs`, all in `dtype`."""
    w = {name: tensor.to(dtype) for name, tensor in weights.items()}
    x = w["embedding.word_embeddings.weight"][tokens]
    for layer in range(LAYERS):
        own = {name.split(f"layers.{layer}.")[1]: t for name, t in w.items() if f"layers.{layer}." in name}
        h = norm(x, own["input_layernorm.weight"])
        h = h @ own["self_attention.linear_qkv.weight"].T + own["self_attention.linear_qkv.bias"]
        x = x + attention(h) @ own["self_attention.linear_proj.weight"].T
        gate, up = (norm(x, own["pre_mlp_layernorm.weight"]) @ own["mlp.linear_fc1.weight"].T).chunk(2, -1)
        x = x + (silu(gate) * up) @ own["mlp.linear_fc2.weight"].T
    logits = norm(x, w["decoder.final_layernorm.weight"]) @ w["output_layer.weight"].T
    return logits[..., :vocab].log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    saved = torch.load(checkpoint / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["model"]
    return {name: tensor for name, tensor in saved.items() if torch.is_tensor(tensor)}


def distance(actual: Tensor, exact: Tensor) -> float:
    """Root mean square difference, nats."""
    return float((actual - exact).square().mean().sqrt())


@pytest.mark.slow
def test_engine_and_trainer_are_as_close_to_float64_as_float32_can_be(job):
    large = ("--init-method-std", LARGE, "--global-batch-size", "128", "--micro-batch-size", "16")
    done = job("--train-iters", "2", "--save-interval", "1", *large).dumping()
    done.run()
    rows = pq.read_table(done.save / "dump" / "rollout-000001.parquet").to_pylist()
    sequences = [torch.tensor(row["prompt_tokens"] + row["response_tokens"]) for row in rows]
    tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    weights = read_weights(done.save / "iter_0000001")
    vocab = len(load_tokenizer(str(done.data / "tokenizer")))

    def computed(dtype: torch.dtype) -> Tensor:
        logps, starts = log_probs(weights, tokens, vocab, dtype).double(), [len(row["prompt_tokens"]) for row in rows]
        return torch.cat([p[a - 1 : len(s) - 1] for p, a, s in zip(logps, starts, sequences, strict=True)])

    def dumped(column: str) -> Tensor:
        return torch.tensor([x for row in rows for x in row[column][-len(row["response_tokens"]) :]]).double()

    exact = computed(torch.float64)
    plain = distance(computed(torch.float32), exact)
    engine, trainer = (distance(dumped(name), exact) for name in ("logp_rollout", "logp_old"))
    assert plain > 1e-6, f"{plain}: the weights are too small to show anything"
    assert max(engine, trainer) < 1.5 * plain, (plain, engine, trainer)
