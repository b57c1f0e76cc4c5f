# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Tiny drafters that know some texts by heart: they accept much there, and little where anything is changed."""

from functools import cache
from typing import Any

import torch
from eagle3_models import new_eagle3
from tiny_models import new_drafter, new_target, random_tokens
from torch import Tensor
from transformers import PreTrainedModel

from hf_falcon.bench.acceptance import _read

ANSWER = 24
# Small trees, as each round has one.
OPTIONS = {"num_assistant_tokens": 4, "num_draft_passes": 2, "draft_top_k": 2, "draft_width": 2}
# A chat template, as tokens before a prompt.
PREFIX = torch.tensor([[60, 61, 62, 60, 61, 62, 60, 61]])


@cache
def deep_target() -> PreTrainedModel:
    """A random target with layers to choose from. No test may change it."""
    return new_target("llama", num_hidden_layers=6)


def prompts(count: int = 3, seed: int = 0, prefix: Tensor | None = None) -> list[dict[str, Tensor]]:
    """The inputs of `generate` for random prompts of one length."""
    rows = random_tokens(count, 12, seed=seed)
    if prefix is not None:
        rows = torch.cat((prefix.expand(count, -1), rows), dim=1)
    return [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in rows]


def answered(target: PreTrainedModel, inputs: list[dict[str, Tensor]]) -> Tensor:
    """The prompts with their greedy answers, of shape `(prompts, length)`."""
    options = {"max_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}
    return torch.cat([target.generate(**each, **options) for each in inputs])


def fit(
    drafter: Any, target: PreTrainedModel, texts: list[Tensor], before_norm: bool = False, noise: float = 0.0
) -> Any:
    """
    Trains a drafter of one token a pass on the target's choices in some texts, until it knows them.

    Args:
        drafter, target: the models.
        texts (`list` of `torch.LongTensor` of shape `(rows, length)`): texts, each row one.
        before_norm (`bool`, *optional*, defaults to `False`): see [`first_choices`].
        noise (`float`, *optional*, defaults to 0.0):
            Standard deviation of noise on all that the drafter reads beside the outputs of layers.
    """
    head, layers, hidden = drafter.make_head(target), list(drafter.config.feature_layers), target.config.hidden_size
    batches = []
    for token_ids in texts:
        with torch.no_grad():
            read = [_read(target, row[None], layers, before_norm) for row in token_ids]
        features = torch.cat([each for each, _ in read])[:, :-2]
        expected = torch.tensor([choices[1:-1] for _, choices in read])
        rows = torch.arange(features.shape[1])
        mask = torch.zeros(len(rows), len(rows)).masked_fill(rows[:, None] < rows, torch.finfo(torch.float32).min)
        rows, mask = rows.expand(len(token_ids), -1), mask.expand(len(token_ids), 1, -1, -1)
        batches.append((features, head.embed(token_ids[:, 1:-1]), rows, mask, expected))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
    torch.manual_seed(0)
    for _ in range(120):
        loss = torch.tensor(0.0)
        for features, embeds, rows, mask, expected in batches:
            embeds = embeds + noise * torch.randn_like(embeds)
            last = features[..., :hidden] + noise * torch.randn_like(features[..., :hidden])
            fused, _ = drafter.fuse(torch.cat((last, features[..., hidden:]), dim=-1), embeds)
            logits = head.logits(drafter.run_layers(fused, rows, rows, mask))
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3 * len(batches), f"the drafter has not learnt the texts: {loss}"
    return drafter.eval()


def fitted(kind: str, texts: list[Tensor], before_norm: bool = False, noise: float = 0.0, **config: Any) -> Any:
    """
    A drafter for [`deep_target`] that knows some texts: "falcon", which reads two layers beside the last hidden state,
    or "eagle3".
    """
    target = deep_target()
    if kind == "falcon":
        sizes = {"block_size": 1, "num_lstm_layers": 0, "num_hidden_layers": 1}
        drafter = new_drafter(target, scale=0, **{**sizes, "feature_layers": [1, 3], **config})
    else:
        drafter = new_eagle3(target, scale=0.1, **{"eagle_aux_hidden_state_layer_ids": [2, 3, 4], **config})
    for name, value in OPTIONS.items():
        setattr(drafter.generation_config, name, value)
    return fit(drafter, target, texts, before_norm, noise)
