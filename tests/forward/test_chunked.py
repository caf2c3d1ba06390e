"""Log-probs and entropy over all logits, against torch's log_softmax, and in chunks, against those over all logits."""

from pathlib import Path

import pytest
import torch

from mindspeed_rl_plugin.device.meters import StorageMeter, Temporary
from mindspeed_rl_plugin.forward.chunked import chunked_token_logps
from mindspeed_rl_plugin.forward.head import token_logps

VOCAB, PADDED, HIDDEN, TOKENS = 301, 320, 16, 13
CHUNKS = (1, 3, 5, 13, 1000)  # one token, not a divisor, not a divisor, all tokens, more than there are


def random_case(dtype=torch.float32, vocab=VOCAB, padded=PADDED, tokens=TOKENS):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(padded, HIDDEN, generator=g, dtype=torch.float64).to(dtype)
    weight[vocab:] += 9  # the padded rows must not be able to hide
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, (tokens,), generator=g)


def over_all_logits(hidden, weight, labels, **settings):
    return token_logps(hidden @ weight.t(), labels, **settings)


def in_chunks(hidden, weight, labels, **settings):
    return chunked_token_logps(hidden, weight, labels, chunk_tokens=2, **settings)


both_ways = pytest.mark.parametrize("head", [over_all_logits, in_chunks])


def gradients(both, hidden, weight):
    """Of an uneven mixture of log-probs and entropies."""
    g = torch.Generator().manual_seed(1)
    factors = torch.randn(2, len(hidden), generator=g, dtype=torch.float64).to(both[0].dtype)
    return torch.autograd.grad((factors * torch.stack(both)).sum(), (hidden, weight))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)]
)
def test_over_all_logits_they_are_those_of_log_softmax(dtype, tolerance, temperature):
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 5, 16, generator=g, dtype=torch.float64) * 3.0).to(dtype)
    logits[..., 11:] += 9  # the padded columns must not be able to hide
    before, labels = logits.clone(), torch.randint(0, 11, (3, 5), generator=g)
    real = (logits[..., :11].double() / temperature).log_softmax(-1)
    logp, entropy = token_logps(logits, labels, vocab_size=11, temperature=temperature)
    want = real.gather(-1, labels[..., None])[..., 0], -(real.exp() * real).sum(-1)
    for got, value in zip((logp, entropy), want, strict=True):
        torch.testing.assert_close(got.double(), value, rtol=tolerance, atol=tolerance)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_same_as_over_all_logits(chunk, temperature, entropy_grad):
    hidden, weight, labels = random_case()
    settings = {"vocab_size": VOCAB, "temperature": temperature, "entropy_grad": entropy_grad}
    got = chunked_token_logps(hidden, weight, labels, chunk_tokens=chunk, **settings)
    want = over_all_logits(hidden, weight, labels, **settings)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert got[1].requires_grad == want[1].requires_grad == entropy_grad
    for a, b in zip(gradients(got, hidden, weight), gradients(want, hidden, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    with torch.no_grad():
        again = chunked_token_logps(hidden, weight, labels, chunk_tokens=chunk, **settings)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "the first ratio would not be 1"


def test_bfloat16_rounds_the_logits_as_a_linear_layer_does():
    hidden, weight, labels = random_case(torch.bfloat16)
    settings = {"vocab_size": VOCAB, "temperature": 0.6, "entropy_grad": True}
    got = chunked_token_logps(hidden, weight, labels, chunk_tokens=5, **settings)
    want = over_all_logits(hidden, weight, labels, **settings)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(got, hidden, weight), gradients(want, hidden, weight), strict=True):
        assert a.dtype == torch.bfloat16
        assert float((a - b).float().norm() / b.float().norm()) < 1e-2


@both_ways
def test_gradcheck(head):
    hidden, weight, labels = random_case(torch.float64, vocab=71, padded=80, tokens=4)

    def both(h, w):
        return head(h, w, labels, vocab_size=71, temperature=0.7, entropy_grad=True)

    assert torch.autograd.gradcheck(both, (hidden, weight))


@both_ways
def test_padded_rows_have_no_probability_and_no_gradient(head):
    hidden, weight, labels = random_case()
    both = head(hidden, weight, labels, vocab_size=VOCAB, entropy_grad=True)
    _, grad = gradients(both, hidden, weight)
    assert grad[:VOCAB].abs().sum() > 0 and grad[VOCAB:].abs().sum() == 0
    with torch.no_grad():
        weight[VOCAB:] = torch.nan
    assert torch.equal(head(hidden, weight, labels, vocab_size=VOCAB)[0], both[0])


@both_ways
def test_certain_tokens_have_no_nan(head):
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.full((200, 1), -1.0)
    weight[150] = 1.0
    logp, entropy = head(hidden, weight, torch.tensor([150, 150]), vocab_size=200, entropy_grad=True)
    (logp + entropy).sum().backward()
    assert (logp == 0).all() and (entropy == 0).all() and torch.isfinite(hidden.grad).all()


def test_nothing_to_score_gives_zero_gradients():
    hidden, weight, labels = random_case(tokens=0)
    both = chunked_token_logps(hidden, weight, labels, vocab_size=VOCAB, chunk_tokens=5, entropy_grad=True)
    assert both[0].shape == both[1].shape == (0,)
    grads = gradients(both, hidden, weight)
    assert grads[0].shape == (0, HIDDEN) and grads[1].shape == weight.shape and (grads[1] == 0).all()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen):
    inputs = random_case()
    inputs[frozen].requires_grad_(False)
    chunked_token_logps(*inputs, vocab_size=VOCAB, chunk_tokens=5)[0].sum().backward()
    assert inputs[frozen].grad is None and inputs[1 - frozen].grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zeroed", [None, False, True])
def test_accumulates_into_main_grad(dtype, zeroed):
    """As the layer of Megatron: DDP's hook takes `weight.grad` as a sign, and its value with `zero_out_wgrad`."""
    hidden, weight, labels = random_case(dtype)
    settings = {"vocab_size": VOCAB, "chunk_tokens": 5, "entropy_grad": True}
    _, want = gradients(chunked_token_logps(hidden, weight, labels, **settings), hidden, weight)
    weight.main_grad = torch.ones(weight.shape)
    if zeroed is not None:
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zeroed
    both = chunked_token_logps(hidden, weight, labels, accumulate=True, **settings)
    g = torch.Generator().manual_seed(1)
    factors = torch.randn(2, TOKENS, generator=g, dtype=torch.float64).float()
    (factors * torch.stack(both)).sum().backward()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(weight.main_grad - 1, want.float(), rtol=tolerance, atol=tolerance)
    if zeroed is None:
        assert weight.grad is None
    else:
        assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape
        assert not zeroed or (weight.grad == 0).all()


def test_peak_memory():
    """Two buffers of one chunk and what the gradients take, where the logits alone are sixteen chunks."""
    tokens, vocab, hidden_size, chunk = 128, 4096, 8, 8
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))

    def peak(function):
        meter = Temporary(StorageMeter())
        with meter.measured(hidden, weight, labels):
            logp, entropy = function(hidden, weight, labels, vocab_size=vocab, entropy_grad=True)
            torch.autograd.grad((logp + entropy).sum(), (hidden, weight))
        return meter.peak

    logits, one_chunk = 4 * tokens * vocab, 4 * chunk * vocab
    others = 4 * (vocab + tokens) * hidden_size + 4 * 30 * tokens
    assert peak(over_all_logits) >= 2 * logits
    assert peak(lambda *args, **more: chunked_token_logps(*args, chunk_tokens=chunk, **more)) <= 2 * one_chunk + others


def test_two_ranks(torchrun):
    torchrun(Path(__file__).with_name("chunked_ranks.py"))
