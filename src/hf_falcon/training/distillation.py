# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Distillation of token distributions through a frozen LM head, in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.draft_session import TargetHead

# Elements of one chunk of logits: few enough for the caches of a processor, and for a vocabulary of 262k.
_CHUNK_ELEMENTS = 1 << 21
# Fewer rows read a large head's weights too often: 56 ms a row at 8 rows, 16 at 64 (262k tokens, one thread).
_CHUNK_ROWS = 64


def chunk_rows(vocab_size: int) -> int:
    """Rows whose logits, of `vocab_size` tokens, exist at one time."""
    return max(_CHUNK_ROWS, _CHUNK_ELEMENTS // vocab_size)


class _HeadDistillation(torch.autograd.Function):
    """
    The gradient with respect to the predictions is computed chunk by chunk in the forward pass, so that only one chunk
    of logits exists at a time. All passes share the target's distribution of a chunk.
    """

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, labels: Tensor, head: TargetHead, soft: float) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(predicted)
        total = predicted.new_zeros((), dtype=torch.float32)
        ranks = torch.empty(predicted.shape[:2], dtype=torch.int64, device=predicted.device)
        rows = chunk_rows(head.draft_vocab_size)
        for start in range(0, labels.shape[0], rows):
            chunk = slice(start, start + rows)
            label_scores = head.logits(labels[chunk]).float().log_softmax(dim=-1)
            tokens = label_scores.argmax(dim=-1, keepdim=True)
            probabilities = label_scores.exp()
            entropy = -torch.dot(probabilities.flatten(), label_scores.flatten())
            for index, features in enumerate(predicted[:, chunk]):
                with torch.enable_grad():
                    inputs = features.detach().requires_grad_()
                    logits = head.logits(inputs)
                scores = logits.detach().float().log_softmax(dim=-1)
                chosen = scores.gather(1, tokens)
                divergence = -torch.dot(probabilities.flatten(), scores.flatten()) - entropy
                total += soft * divergence - (1 - soft) * chosen.sum()
                ranks[index, chunk] = (scores > chosen).sum(dim=-1)
                # Glancing needs the ranks alone.
                if ctx.needs_input_grad[0]:
                    # Gradient of the logits: the drafter's distribution minus the mixture that it should have.
                    slope = scores.exp_().sub_(probabilities, alpha=soft)
                    slope.scatter_add_(1, tokens, torch.full_like(chosen, soft - 1))
                    (gradient[index, chunk],) = torch.autograd.grad(logits, inputs, slope.to(logits.dtype))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ranks)
        return total / max(1, ranks.numel()), ranks

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * (gradients[0] / max(1, gradient.shape[:2].numel())), None, None, None


def distillation_loss(predicted: Tensor, labels: Tensor, head: TargetHead, soft: float) -> tuple[Tensor, Tensor]:
    """
    `soft * KL(p || q) + (1 - soft) * CE(argmax p, q)`; p and q are the distributions of the target's LM head at the
    true and the predicted features, over the draft vocabulary. Mean over passes and rows (Falcon, equation 9).

    Args:
        predicted (`torch.Tensor` of shape `(passes, rows, hidden_size)`): predicted features.
        labels (`torch.Tensor` of shape `(rows, hidden_size)`): the true features, the same for every pass.
        head ([`TargetHead`]): the target's LM head.
        soft (`float`): share of the KL divergence.

    Returns:
        The loss (scalar), and the rank of the target's token among the drafter's choices, 0 being the first
        (`torch.LongTensor` of shape `(passes, rows)`).
    """
    return _HeadDistillation.apply(predicted, labels, head, soft)
