# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The distillation loss, computed in chunks, against one formula."""

import pytest
import torch
from tiny_models import HIDDEN, new_drafter, new_target

from hf_falcon.core.draft_session import TargetHead
from hf_falcon.training import distillation
from hf_falcon.training.distillation import distillation_loss


@pytest.mark.parametrize("kind, draft_vocab_size", [("llama", None), ("llama", 20), ("gemma2", None), ("gemma2", 20)])
@pytest.mark.parametrize("soft", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("chunk", [1, 150, 1 << 21])
def test_distillation_loss(monkeypatch, kind, draft_vocab_size, soft, chunk):
    monkeypatch.setattr(distillation, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(distillation, "_CHUNK_ROWS", 1)
    target = new_target(kind, **({"final_logit_softcapping": 3.0} if kind == "gemma2" else {}))
    head = TargetHead(new_drafter(target, draft_vocab_size=draft_vocab_size), target)
    torch.manual_seed(0)
    labels = torch.randn(11, HIDDEN)
    predicted = (labels + torch.randn(2, 11, HIDDEN)).requires_grad_()

    p, q = head.logits(labels).softmax(dim=-1), head.logits(predicted).softmax(dim=-1)
    hard = -q.log()[:, torch.arange(11), p.argmax(dim=-1)]
    expected = (soft * (p * (p / q).log()).sum(dim=-1) + (1 - soft) * hard).mean()
    (expected_gradient,) = torch.autograd.grad(3 * expected, predicted)

    loss, ranks = distillation_loss(predicted, labels, head, head, soft)
    (gradient,) = torch.autograd.grad(3 * loss, predicted)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
    for found, order in zip(ranks.tolist(), q.argsort(dim=-1, descending=True).tolist(), strict=True):
        assert found == [row.index(token) for row, token in zip(order, p.argmax(dim=-1).tolist(), strict=True)]
    assert 0 in ranks and ranks.max() > 2

    # Without a gradient, as glancing calls it.
    again, ranks_again = distillation_loss(predicted.detach(), labels, head, head, soft)
    assert torch.equal(again, loss) and torch.equal(ranks_again, ranks)


@pytest.mark.parametrize("chunk", [150, 1 << 21])
@pytest.mark.parametrize("divergence", distillation.DIVERGENCES)
def test_divergences(monkeypatch, divergence, chunk):
    """The formulas of the docstring, differentiated by autograd, with a weight for each pass."""
    monkeypatch.setattr(distillation, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(distillation, "_CHUNK_ROWS", 1)
    target = new_target("llama")
    head = TargetHead(new_drafter(target, draft_vocab_size=20), target)
    torch.manual_seed(0)
    labels = torch.randn(11, HIDDEN)
    predicted = (labels + torch.randn(2, 11, HIDDEN)).requires_grad_()
    weights = [1.5, 0.5]

    p, q = head.logits(labels).softmax(dim=-1), head.logits(predicted).softmax(dim=-1)
    hard = -q.log()[:, torch.arange(11), p.argmax(dim=-1)]
    kl, overlap = (p * (p / q).log()).sum(dim=-1), torch.minimum(p, q).sum(dim=-1)
    share = torch.exp(-3 * overlap.detach())
    formulas = {
        "kl": kl,
        "log_overlap": -overlap.log(),
        "total_variation": (p - q).abs().sum(dim=-1) / 2,
        "hybrid": share * kl + (1 - share) * (1 - overlap),
    }
    expected = (torch.tensor(weights)[:, None] * (0.7 * formulas[divergence] + 0.3 * hard)).mean()
    (expected_gradient,) = torch.autograd.grad(expected, predicted)

    loss, _ = distillation_loss(predicted, labels, head, head, 0.7, divergence=divergence, pass_weights=weights)
    (gradient,) = torch.autograd.grad(loss, predicted)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
