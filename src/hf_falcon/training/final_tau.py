# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The tau of a trained drafter, measured by decoding."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.drafter import DraftModel
from ..core.target_parts import longest_text

logger = logging.getLogger(__name__)


def decoded_tau(
    target: PreTrainedModel, drafter: DraftModel, prompts: Sequence[Tensor], max_new_tokens: int = 128
) -> dict[str, float]:
    """
    Decodes prompts greedily, with trees of the drafter's own size in every round and without prompt lookup: the result
    depends on the drafter and not on the machine's speed.

    Args:
        target ([`PreTrainedModel`]): the target.
        drafter ([`FalconDraftModel`]): its drafter, in any dtype.
        prompts (sequence of `torch.LongTensor` of shape `(length,)`): tokens of each prompt.
        max_new_tokens (`int`, *optional*, defaults to 128): new tokens a prompt, at most; fewer where the target's
            positions end before.

    Returns:
        `final_tau`, accepted draft tokens a round, and `final_alpha`, accepted draft tokens over new tokens, of all
        prompts together. Empty if the target is decoded plainly, which a warning then explains, or if no
        prompt leaves room for an answer.
    """
    drafter.eval()
    rounds, accepted, new_tokens = 0, 0, 0
    longest = longest_text(target.config.get_text_config(decoder=True)) or math.inf
    for prompt in prompts:
        if (room := min(max_new_tokens, longest - len(prompt))) < 1:
            logger.warning(f"A prompt of {len(prompt)} tokens leaves no room for an answer: it is not decoded.")
            continue
        input_ids = prompt[None].to(target.device)
        output = target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            assistant_model=drafter,
            max_new_tokens=int(room),
            do_sample=False,
            num_assistant_tokens_schedule="constant",
            prompt_lookup_num_tokens=0,
            return_dict_in_generate=True,
        )
        found = output.draft_statistics
        if found is None:
            return {}
        rounds += found.rounds
        accepted += found.accepted_tokens
        new_tokens += found.new_tokens
    return {"final_tau": accepted / rounds, "final_alpha": accepted / new_tokens} if rounds else {}
