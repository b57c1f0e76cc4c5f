# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Gives a drafter other weights, in place: packed copies and compiled passes follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..cpu.compiling import refresh_passes
from ..cpu.packing import is_packed, pack_weights, unpack_weights


def replace_weights(drafter: Any, weights: Mapping[str, Tensor]) -> None:
    """
    Args:
        drafter ([`DraftModel`]): the drafter. No call may draft with it meanwhile; if one does, it drafts worse.
        weights (mapping of `str` to `torch.Tensor`): new values of all its parameters.
    """
    packed = is_packed(drafter)
    if packed:
        unpack_weights(drafter)
    try:
        for name, parameter in drafter.named_parameters():
            # What was made in inference mode is changed in that mode only.
            with torch.inference_mode(parameter.is_inference()), torch.no_grad():
                parameter.copy_(weights[name])
    finally:
        # Also after Ctrl-C.
        if packed:
            pack_weights(drafter)
    refresh_passes(drafter)
