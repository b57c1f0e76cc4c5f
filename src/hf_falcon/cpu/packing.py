# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Packed weights. On a CPU the order of a weight in memory decides how long a product of a few rows takes. Packing brings
each weight of a linear layer into the right order once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.target_parts import modules_of
from .compact_weights import LentWeight, ordinary_linear, own_forward
from .huge_pages import move_to_huge_pages
from .packed_layouts import BlockLayout, OneDnnLayout, PackedWeight, has_bfloat16_products, layout_of
from .row_invariant import RowInvariantForward

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Linear):
    """
    A linear layer whose weight is packed. Packing and unpacking change the class of a layer in place; hooks and
    references to it stay.

    `weight` is then a [`PackedWeight`]. If other modules share it (a tied LM head), `weight` stays an ordinary
    parameter, and the packed copy exists beside it.
    """

    packed: OneDnnLayout | BlockLayout
    unpacked_parameter: nn.Parameter
    # Set while compiled code runs.
    lent: LentWeight | None = None

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "Packed weights give no gradient: call the model under `torch.no_grad()`, as `generate` does, or call "
                "`hf_falcon.unpack_weights(model)` first."
            )
        if input.dtype != self.unpacked_parameter.dtype:
            # Autocast, or a mistake: the result, or the error, of an ordinary layer.
            return F.linear(input, self.packed.to_dense(), self.bias)
        if torch.compiler.is_compiling() and self.lent is not None and self.lent.suits(input):
            return self.lent.product(input, self.bias)
        return self.packed.product(input, self.bias)

    @classmethod
    @torch.inference_mode(False)
    def pack(cls, linear: nn.Linear, keep_dense: bool) -> None:
        """Packs a linear layer's weight. With `keep_dense` the ordinary weight is kept, too."""
        weight = linear.weight
        packed = layout_of(weight)
        # Attribute assignment would register the parameter under a second name.
        vars(linear).update(packed=packed, unpacked_parameter=weight)
        linear.__class__ = cls
        if not keep_dense:
            linear.weight = nn.Parameter(PackedWeight(packed, weight), requires_grad=weight.requires_grad)
            # The parameter is kept, empty: a reference to it (an optimizer's) is valid again after `unpack`.
            weight.data = weight.data.new_empty(0)

    @torch.inference_mode(False)
    def unpack(self) -> None:
        """Restores the ordinary layer, with the same parameter and the same values."""
        weight = self.unpacked_parameter
        if self._gave_up_dense:
            weight.data = self.packed.to_dense()
            # Who freezes the model meanwhile, as PEFT does, freezes it for good.
            weight.requires_grad_(self.weight.requires_grad)
        self.weight = weight
        del self.packed, self.unpacked_parameter
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # Assignment of a parameter comes here. Another weight, such as one to tie to, makes it an ordinary layer.
        if name == "weight" and param is not self.unpacked_parameter and not isinstance(param, PackedWeight):
            self.unpack()
        nn.Linear.register_parameter(self, name, param)

    @property
    def _gave_up_dense(self) -> bool:
        return self.weight is not self.unpacked_parameter

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._gave_up_dense:
            destination[f"{prefix}weight"] = self.packed.to_dense()

    def _load_from_state_dict(self, *args: Any) -> None:
        # A packed weight cannot take new values.
        self.unpack()
        self._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to()`, `.half()` and others: their results may not support packing.
        self.unpack()
        return self._apply(fn, recurse)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is an ordinary layer, because oneDNN's tensors cannot be copied.
        state = vars(self).copy()
        weight = state.pop("unpacked_parameter")
        packed = state.pop("packed")
        if self._gave_up_dense:
            weight = nn.Parameter(packed.to_dense(), requires_grad=weight.requires_grad)
        state["_parameters"] = {**self._parameters, "weight": weight}
        return ordinary_linear(state)


def pack_weights(model: nn.Module) -> None:
    """
    Packs the weights of all linear layers of a model for products of a few rows on a CPU, in place, until
    [`unpack_weights`]. The verification of trees becomes faster, and so does plain decoding in bfloat16.

    The model takes as much memory as before, because the packed weights replace the ordinary ones. Only a weight that
    other modules share, such as an embedding tied to the LM head, is kept in both forms. Weights that are mapped from
    a checkpoint's file leave memory when the system needs it. On Linux 6.1 or later packed weights move to huge pages;
    the rest of a page that weights do not fill then counts as used memory. `state_dict`, `save_pretrained` and copies
    have ordinary weights; `.to()`, `load_state_dict` and an assignment of another `weight` unpack the layers that they
    change. In float32 the outputs differ by rounding; in bfloat16 products of a few rows mostly stay the same bits.

    Do not train the model or change its weights while they are packed. No other thread may run the model during the
    packing or unpacking itself. Threads may share a packed model.

    Args:
        model (`torch.nn.Module`): a target or a drafter, in evaluation mode, in float32 or bfloat16, on the CPU.

    Raises:
        `RuntimeError`: if torch was built without oneDNN, or the processor lacks oneDNN's instructions for bfloat16.
        `ValueError`: if the model is quantised, in training mode, not on the CPU, of another dtype, or has no linear
            layer. Nothing is packed then.
    """
    linears = _packable(model)
    owners = Counter(_address(each) for module in model.modules() for each in module._parameters.values())
    for linear in linears:
        PackedLinear.pack(linear, keep_dense=owners[_address(linear.weight)] > 1)
    move_to_huge_pages(module.packed.memory for module in model.modules() if isinstance(module, PackedLinear))


def unpack_weights(model: nn.Module) -> None:
    """
    Undoes [`pack_weights`]: the same parameters with the same values, to the bit. Does nothing to other models.

    Args:
        model (`torch.nn.Module`): see [`pack_weights`].
    """
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.unpack()


def is_packed(model: nn.Module) -> bool:
    """Whether any of a model's weights are packed."""
    return any(isinstance(module, PackedLinear) for module in modules_of(model))


@contextmanager
def packed_weights(*models: nn.Module) -> Iterator[None]:
    """
    Packs models as [`pack_weights`] does, inside a `with` statement:

    ```python
    with hf_falcon.packed_weights(target, drafter):
        target.generate(**inputs, assistant_model=drafter)
    ```

    A model that was packed before stays packed.

    Args:
        models (`torch.nn.Module`): see [`pack_weights`].
    """
    mine = [model for model in models if not is_packed(model)]
    try:
        for model in mine:
            pack_weights(model)
        yield
    finally:
        for model in mine:
            unpack_weights(model)


def _packable(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model to pack. Raises the errors of [`pack_weights`]."""
    name = type(model).__name__
    if not torch.backends.mkldnn.is_available():
        raise RuntimeError(
            "Packed weights need oneDNN, which this build of torch lacks (`torch.backends.mkldnn.is_available()` is "
            "False): use another build, or generate without packed weights."
        )
    if getattr(model, "is_quantized", False):
        raise ValueError(
            f"{name} is quantised, and quantised weights cannot be packed: generate without packed weights, or load "
            "the model without quantisation."
        )
    if model.training:
        raise ValueError(
            f"{name} is in training mode, and packed weights give no gradient: call `eval()` on it first."
        )
    elsewhere = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if elsewhere:
        raise ValueError(
            f"{name} has weights on {sorted(elsewhere)}, and weights are packed for the CPU only: move it there, or "
            "generate without packed weights."
        )
    linears = {path: module for path, module in model.named_modules() if _is_plain(module)}
    # A drafter without a network has no weights at all.
    if not linears and not is_packed(model) and any(True for _ in model.parameters()):
        raise ValueError(f"{name} has no ordinary linear layer (`torch.nn.Linear`): there is nothing to pack.")
    for path, linear in linears.items():
        dtype = linear.weight.dtype
        if dtype not in _DTYPES:
            raise ValueError(
                f"{name}'s `{path}.weight` is {dtype}, and weights are packed in {' or '.join(map(str, _DTYPES))} "
                "only: load the model in one of them, or generate without packed weights."
            )
        if dtype == torch.bfloat16 and not has_bfloat16_products():
            raise RuntimeError(
                f"{name} is in bfloat16, and this processor lacks oneDNN's instructions for it: load the model in "
                "float32, or generate without packed weights."
            )
    return list(linears.values())


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is exactly `torch.nn.Linear`: no subclass, no other forward, an ordinary weight."""
    if type(module) is not nn.Linear or not isinstance(own_forward(module), (type(None), RowInvariantForward)):
        return False
    return type(module._parameters.get("weight")) is nn.Parameter


def _address(parameter: Tensor | None) -> int | None:
    """The address of a parameter's values, which tied parameters share; `None` for parameters without one."""
    if parameter is None or type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        return None
    return parameter.data_ptr()
