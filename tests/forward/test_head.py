"""Log-probs and entropy against torch's own log_softmax; gradients against numerical ones."""

import pytest
import torch

from mindspeed_rl_plugin.forward.head import token_logps

VOCAB, PADDED = 11, 16


def reference(logits, labels, temperature):
    real = (logits[..., :VOCAB].double() / temperature).log_softmax(-1)
    return real.gather(-1, labels[..., None])[..., 0], -(real.exp() * real).sum(-1)


def random_case(dtype, scale=3.0):
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 5, PADDED, generator=g, dtype=torch.float64) * scale).to(dtype)
    logits[..., VOCAB:] += 9  # the padded rows must not be able to hide
    return logits, torch.randint(0, VOCAB, (3, 5), generator=g)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)]
)
def test_values(dtype, tolerance, temperature):
    logits, labels = random_case(dtype)
    before = logits.clone()
    logp, entropy = token_logps(logits, labels, vocab_size=VOCAB, temperature=temperature)
    want_logp, want_entropy = reference(logits, labels, temperature)
    torch.testing.assert_close(logp.double(), want_logp, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=tolerance, atol=tolerance)
    assert logp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(logits, before)


def test_gradcheck():
    logits, labels = random_case(torch.float64)
    logits.requires_grad_()

    def both(x):
        return token_logps(x, labels, vocab_size=VOCAB, temperature=0.7, entropy_grad=True)

    assert torch.autograd.gradcheck(both, (logits,))


def test_padded_columns_get_no_gradient_and_entropy_has_one_only_when_asked():
    logits, labels = random_case(torch.bfloat16)
    logits.requires_grad_()
    logp, entropy = token_logps(logits, labels, vocab_size=VOCAB)
    assert logp.requires_grad and not entropy.requires_grad
    logp.sum().backward()
    assert logits.grad.dtype == torch.bfloat16
    assert logits.grad[..., :VOCAB].abs().sum() > 0 and logits.grad[..., VOCAB:].abs().sum() == 0


def test_certain_tokens_have_no_nan():
    logits = torch.full((1, 1, PADDED), -1e4)
    logits[..., 3] = 1e4
    logits.requires_grad_()
    logp, entropy = token_logps(logits, torch.tensor([[3]]), vocab_size=VOCAB, entropy_grad=True)
    (logp + entropy).sum().backward()
    assert logp.item() == 0.0 and entropy.item() == 0.0 and torch.isfinite(logits.grad).all()


def test_a_vocabulary_wider_than_the_logits_is_refused():
    with pytest.raises(ValueError, match="17.*16 x 1"):
        token_logps(torch.zeros(1, 1, 16), torch.zeros(1, 1, dtype=torch.int64), vocab_size=17)
