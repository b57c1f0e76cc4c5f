# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Distillation of token distributions, in chunks: through the target's frozen LM head, or a head that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.interfaces import DraftHead

# Distances between the distributions of target and drafter; see [`distillation_loss`].
DIVERGENCES = ("kl", "log_overlap", "total_variation", "hybrid")
# Elements of one chunk of logits: few enough for the caches of a processor, and for a vocabulary of 262k.
_CHUNK_ELEMENTS = 1 << 21
# Fewer rows read a large head's weights too often: 56 ms a row at 8 rows, 16 at 64 (262k tokens, one thread).
_CHUNK_ROWS = 64


def chunk_rows(vocab_size: int) -> int:
    """Rows whose logits, of `vocab_size` tokens, exist at one time."""
    return max(_CHUNK_ROWS, _CHUNK_ELEMENTS // vocab_size)


class _HeadDistillation(torch.autograd.Function):
    """
    The gradient with respect to the states and to the head's parameters is computed chunk by chunk in the forward
    pass, so that only one chunk of logits exists at a time. All passes share the target's distribution of a chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        labels: Tensor,
        head: DraftHead,
        label_head: DraftHead,
        soft: float,
        divergence: str,
        pass_weights: Sequence[float],
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(states)
        of_parameters = [torch.zeros_like(each) for each in parameters]
        total = states.new_zeros((), dtype=torch.float32)
        ranks = torch.empty(states.shape[:2], dtype=torch.int64, device=states.device)
        rows = chunk_rows(head.draft_vocab_size)
        for start in range(0, labels.shape[0], rows):
            chunk = slice(start, start + rows)
            label_scores = label_head.logits(labels[chunk]).float().log_softmax(dim=-1)
            tokens = label_scores.argmax(dim=-1, keepdim=True)
            probabilities = label_scores.exp()
            entropy = -(probabilities * label_scores).sum(dim=-1)
            for index, (weight, rows_of_pass) in enumerate(zip(pass_weights, states[:, chunk], strict=True)):
                with torch.enable_grad():
                    inputs = rows_of_pass.detach().requires_grad_()
                    logits = head.logits(inputs)
                scores = logits.detach().float().log_softmax(dim=-1)
                chosen = scores.gather(1, tokens)
                ranks[index, chunk] = (scores > chosen).sum(dim=-1)
                drafted = scores.exp()
                distance, slope = _divergence(divergence, probabilities, entropy, drafted, scores)
                total += weight * (soft * distance.sum() - (1 - soft) * chosen.sum())
                # Glancing needs the ranks alone.
                if ctx.needs_input_grad[0]:
                    # Gradient of the logits. Of the cross-entropy it is the drafter's distribution minus the label.
                    slope.mul_(soft).add_(drafted, alpha=1 - soft)
                    slope.scatter_add_(1, tokens, torch.full_like(chosen, soft - 1)).mul_(weight)
                    found = torch.autograd.grad(logits, (inputs, *parameters), slope.to(logits.dtype))
                    gradient[index, chunk] = found[0]
                    for whole, part in zip(of_parameters, found[1:]):
                        whole += part
        ctx.save_for_backward(gradient, *of_parameters)
        ctx.mark_non_differentiable(ranks)
        return total / max(1, ranks.numel()), ranks

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *of_parameters = ctx.saved_tensors
        scale = gradients[0] / max(1, gradient.shape[:2].numel())
        return gradient * scale, *(None,) * 6, *(each * scale for each in of_parameters)


def _divergence(name: str, target: Tensor, entropy: Tensor, drafter: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """
    The divergence of each row from the target's distribution p to the drafter's q, and its gradient with respect to
    the drafter's logits.

    Args:
        name (`str`): one of `DIVERGENCES`.
        target, drafter, scores (`torch.Tensor` of shape `(rows, vocab)`): p, q, and log q.
        entropy (`torch.Tensor` of shape `(rows,)`): the entropy of p.

    Returns:
        `torch.Tensor` of shape `(rows,)` and of shape `(rows, vocab)`.
    """
    kl, kl_slope = -(target * scores).sum(dim=-1) - entropy, drafter - target
    if name == "kl":
        return kl, kl_slope
    overlap = torch.minimum(target, drafter).sum(dim=-1)
    # The overlap grows with q only where q < p.
    lacking = drafter * (drafter < target)
    overlap_slope = lacking - drafter * lacking.sum(dim=-1, keepdim=True)
    if name == "log_overlap":
        overlap = overlap.clamp_min(torch.finfo(overlap.dtype).tiny)
        return -overlap.log(), -overlap_slope / overlap[:, None]
    if name == "total_variation":
        return 1 - overlap, -overlap_slope
    share = torch.exp(-3 * overlap)
    blended = share * kl + (1 - share) * (1 - overlap)
    return blended, share[:, None] * kl_slope - (1 - share[:, None]) * overlap_slope


def distillation_loss(
    states: Tensor,
    labels: Tensor,
    head: DraftHead,
    label_head: DraftHead,
    soft: float,
    parameters: Sequence[Tensor] = (),
    divergence: str = "kl",
    pass_weights: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """
    `soft * D(p, q) + (1 - soft) * CE(argmax p, q)`; p is the distribution of the target's LM head at the true
    features, q the drafter's, both over the draft vocabulary. Mean over passes and rows (Falcon, equation 9).

    The divergence D is `"kl"`, KL(p || q), or one of the overlap a = sum of min(p, q), the share of tokens that
    speculative sampling accepts: `"log_overlap"`, -log a; `"total_variation"`, 1 - a; and `"hybrid"`,
    w * KL + (1 - w) * (1 - a) with w = exp(-3 a) as a constant (LK losses).

    Args:
        states (`torch.Tensor` of shape `(passes, rows, state_size)`): the drafter's states, or predicted features.
        labels (`torch.Tensor` of shape `(rows, hidden_size)`): the true features, the same for every pass.
        head ([`DraftHead`]): the drafter's head, which may be the target's.
        label_head ([`DraftHead`]): the target's LM head.
        soft (`float`): share of the divergence.
        parameters (sequence of `torch.Tensor`, *optional*): parameters of `head` that are trained.
        divergence (`str`, *optional*, defaults to `"kl"`): one of `DIVERGENCES`.
        pass_weights (sequence of `float`, *optional*): weight of each pass; their mean should be 1. By default equal.

    Returns:
        The loss (scalar), and the rank of the target's token among the drafter's choices, 0 being the first
        (`torch.LongTensor` of shape `(passes, rows)`).
    """
    weights = (1.0,) * len(states) if pass_weights is None else tuple(pass_weights)
    return _HeadDistillation.apply(states, labels, head, label_head, soft, divergence, weights, *parameters)
