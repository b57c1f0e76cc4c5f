# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Packed weights: on a CPU, products of a few rows with a linear layer's weight are bound by how the weight lies in
memory. Here it is laid out once for such products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compact_weights import CompactWeight
from .packed_layouts import BlockLayout, OneDnnLayout, PackedWeight, layout_of

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Linear):
    """
    A linear layer whose weight is packed. A layer becomes one in place, by its class, and ceases to be one likewise:
    hooks and references to it stay as they are.

    `weight` is then a [`PackedWeight`]. Where other modules share it (a tied LM head), `weight` stays as it was, and
    is packed beside.
    """

    packed: OneDnnLayout | BlockLayout
    unpacked_parameter: nn.Parameter
    # For compiled rounds.
    compact: CompactWeight | None = None

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "Packed weights give no gradient: call the model under `torch.no_grad()`, as `generate` does, or call "
                "`hf_falcon.unpack_weights(model)` first."
            )
        if input.dtype != self.unpacked_parameter.dtype:
            # Autocast, or a mistake: as the ordinary layer has it.
            return F.linear(input, self.packed.to_dense(), self.bias)
        if torch.compiler.is_compiling() and self.compact is not None and self.compact.suits(input):
            return self.compact.product(input, self.bias)
        return self.packed.product(input, self.bias)

    @classmethod
    @torch.inference_mode(False)
    def pack(cls, linear: nn.Linear, keep_dense: bool) -> None:
        """Packs a linear layer's weight; `keep_dense` leaves the weight itself where it is."""
        weight = linear.weight
        packed = layout_of(weight)
        # Not by attribute assignment, which would register the parameter under a second name.
        vars(linear).update(packed=packed, unpacked_parameter=weight)
        linear.__class__ = cls
        if not keep_dense:
            linear.weight = nn.Parameter(PackedWeight(packed, weight), requires_grad=False)
            # The parameter itself waits, empty: whoever refers to it (an optimizer) finds it again after `unpack`.
            weight.data = weight.data.new_empty(0)

    @torch.inference_mode(False)
    def unpack(self) -> None:
        """Makes this the ordinary layer that it was, with the same parameter of the same values."""
        weight = self.unpacked_parameter
        if self._gave_up_dense:
            weight.data = self.packed.to_dense()
        self.weight = weight
        del self.packed, self.unpacked_parameter
        self.__class__ = nn.Linear  # type: ignore[assignment]

    @property
    def _gave_up_dense(self) -> bool:
        return self.weight is not self.unpacked_parameter

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._gave_up_dense:
            destination[f"{prefix}weight"] = self.packed.to_dense()

    def _load_from_state_dict(self, *args: Any) -> None:
        # New values: an ordinary layer takes them.
        self.unpack()
        self._load_from_state_dict(*args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # `.to()`, `.half()` and the like: what they make need not be packable.
        self.unpack()
        return self._apply(fn, recurse)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy is an ordinary layer: oneDNN's tensors cannot be copied.
        state = vars(self).copy()
        weight = state.pop("unpacked_parameter")
        packed = state.pop("packed")
        if self._gave_up_dense:
            weight = nn.Parameter(packed.to_dense(), requires_grad=weight.requires_grad)
        state["_parameters"] = {**self._parameters, "weight": weight}
        return object.__new__, (nn.Linear,), state


def pack_weights(model: nn.Module) -> None:
    """
    Packs the weights of all linear layers of a model for products of a few rows on a CPU, in place, until
    [`unpack_weights`]. Verifying trees becomes faster, and so does plain decoding in bfloat16.

    Memory stays what it was: each weight is given up for its packed form. Only what other modules need as it is, such
    as an embedding tied to the LM head, is there twice; and the pages of weights that are mapped from a checkpoint's
    file go when the system wants them. `state_dict`, `save_pretrained` and copies have ordinary weights; `.to()` and
    `load_state_dict` unpack what they touch. In bfloat16 the outputs stay the same to the bit; in float32 they differ
    by rounding.

    The model must not be trained, nor its weights be changed, and no other thread may run it while it is packed or
    unpacked. Once packed, threads may share it.

    Args:
        model (`torch.nn.Module`): a target or a drafter, in evaluation mode, in float32 or bfloat16, on the CPU.

    Raises:
        `RuntimeError`: if torch was built without oneDNN, or the processor lacks what oneDNN needs for bfloat16.
        `ValueError`: if the model is quantised, in training mode, not on the CPU, of another dtype, or has no linear
            layer. Nothing is packed then.
    """
    linears = _packable(model)
    owners = Counter(_address(each) for module in model.modules() for each in module._parameters.values())
    for linear in linears:
        PackedLinear.pack(linear, keep_dense=owners[_address(linear.weight)] > 1)


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
    return any(isinstance(module, PackedLinear) for module in model.modules())


@contextmanager
def packed_weights(*models: nn.Module) -> Iterator[None]:
    """
    Packs models as [`pack_weights`] does, inside a `with` statement:

    ```python
    with hf_falcon.packed_weights(target, drafter):
        target.generate(**inputs, assistant_model=drafter)
    ```

    A model that was packed before stays so.

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
    """The linear layers of a model that are to be packed, or the error that says why none can be."""
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
    if not linears and not is_packed(model):
        raise ValueError(f"{name} has no ordinary linear layer (`torch.nn.Linear`): there is nothing to pack.")
    for path, linear in linears.items():
        dtype = linear.weight.dtype
        if dtype not in _DTYPES:
            raise ValueError(
                f"{name}'s `{path}.weight` is {dtype}, and weights are packed in {' or '.join(map(str, _DTYPES))} "
                "only: load the model in one of them, or generate without packed weights."
            )
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            raise RuntimeError(
                f"{name} is in bfloat16, and this processor lacks what oneDNN needs for it: load the model in "
                "float32, or generate without packed weights."
            )
    return list(linears.values())


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing but a product: no subclass, no other forward, no odd weight."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    return type(module._parameters.get("weight")) is nn.Parameter


def _address(parameter: Tensor | None) -> int | None:
    """Where a parameter's values lie: tied ones lie in one place. `None` where that has no answer."""
    if parameter is None or type(parameter) is not nn.Parameter or parameter.layout != torch.strided:
        return None
    return parameter.data_ptr()
