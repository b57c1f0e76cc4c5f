# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Muon for the matrices of a drafter, AdamW for its other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from ..cpu.processor import has_bfloat16_instructions


class MuonWithAdamW(Optimizer):
    """
    [`torch.optim.Muon`] for matrices and [`torch.optim.AdamW`] for all else. Updates of both have the same RMS, so
    they share one learning rate (Moonlight, arXiv 2502.16982).

    Args:
        matrices (sequence of `torch.Tensor`): parameters with two dimensions.
        others (sequence of `torch.Tensor`): all other parameters, and embeddings and heads.
        lr (`float`): learning rate of both.
        betas (`tuple[float, float]`), eps (`float`): of AdamW.
        weight_decay (`float`): of the matrices.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ):
        self._parts: list[Optimizer] = [
            Muon(list(matrices), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            AdamW([{"params": list(others)}], lr=lr, betas=betas, eps=eps, weight_decay=0.0),
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    @classmethod
    def of(cls, drafter: nn.Module, heads: Sequence[Tensor], **options: Any) -> MuonWithAdamW:
        """The optimizer of a drafter's trained parameters; those of its `heads` are updated by AdamW all the same."""
        trained = [each for each in drafter.parameters() if each.requires_grad]
        matrices = [each for each in trained if each.ndim == 2 and not any(each is own for own in heads)]
        others = [each for each in trained if not any(each is matrix for matrix in matrices)]
        return cls(matrices, others, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs one step; see [`~torch.optim.Optimizer.step`]."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _NativeProducts():
            for part in self._parts:
                part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See [`~torch.optim.Optimizer.load_state_dict`]."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Groups and states exist once: what a scheduler or a checkpoint changes, both parts see."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state


class _NativeProducts(TorchFunctionMode):
    """
    On a processor without products in bfloat16, Muon's are in the gradient's own dtype: torch asks for bfloat16
    without an option, and emulating it takes three times as long as float32.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.bfloat16 and args[0].device.type == "cpu" and not has_bfloat16_instructions():
            # Muon goes on in place.
            return args[0].clone()
        return function(*args, **(kwargs or {}))
