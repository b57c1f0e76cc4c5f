# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Where faster ways to run the target and the drafter plug in. The core runs without any: `hf_falcon` registers those for
CPUs when it is imported, and a drafter that is loaded as custom code from the Hub has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor
from transformers import Cache, PreTrainedModel

from .modeling_falcon_draft import FalconDraftNetwork
from .target_parts import TargetHead


class TargetAcceleration:
    """
    How the target's forwards of one `generate` call run: as they are.

    Attributes:
        sizes (`tuple[int, ...]`): numbers of nodes that forwards are compiled for, in ascending order.
        is_packed (`bool`): whether the target's weights are packed.
        wants_static_shapes (`bool`): whether the cache has the same shapes and addresses in every round.
        wants_layers_apart (`bool`): whether each layer of the cache has buffers of its own.
    """

    sizes: tuple[int, ...] = ()
    is_packed: bool = False
    wants_static_shapes: bool = False
    wants_layers_apart: bool = False

    def padded_size(self, nodes: int) -> int:
        """Nodes that a tree of `nodes` nodes is padded to before it is scored."""
        return nodes

    def scoring(self, cache: Cache, masks: Iterable[Tensor]) -> AbstractContextManager[object]:
        """
        Inside, the target scores a tree.

        Args:
            cache ([`Cache`]): the target's cache.
            masks (iterable of `torch.Tensor` of shape `(batch, 1, nodes, slots)`): the masks that the forward gets.
        """
        return nullcontext()


class DrafterAcceleration:
    """
    How the drafter's passes of one `generate` call run: as they are.

    Args:
        drafter ([`FalconDraftNetwork`]): the drafter.

    Attributes:
        head ([`TargetHead`], *optional*): a faster head than the one that the call would make.
        wants_static_shapes (`bool`): see [`TargetAcceleration`]; of the drafter's cache.
    """

    head: TargetHead | None = None
    wants_static_shapes: bool = False

    def __init__(self, drafter: FalconDraftNetwork):
        self.drafter = drafter

    def drafting(self, head: TargetHead) -> AbstractContextManager[object]:
        """Inside, the drafter runs passes whose logits come from `head`."""
        return nullcontext()

    @property
    def run_layers(self) -> Callable[..., Tensor]:
        """The drafter's layers; see [`FalconDraftNetwork.run_layers`]."""
        return self.drafter.run_layers


class Backend(Protocol):
    """Makes the accelerations of a call."""

    def for_target(self, target: PreTrainedModel, is_batch: bool, reads_layers: bool) -> TargetAcceleration:
        """
        Args:
            target ([`PreTrainedModel`]): the target.
            is_batch (`bool`): whether the call has several rows.
            reads_layers (`bool`): whether the call reads the outputs of single layers.
        """

    def for_drafter(self, drafter: FalconDraftNetwork, target: PreTrainedModel) -> DrafterAcceleration: ...


_backend: Backend | None = None


def register(backend: Backend) -> None:
    """Takes the backend that every later call of this process uses."""
    global _backend
    _backend = backend


def target_acceleration(
    target: PreTrainedModel, is_batch: bool = False, reads_layers: bool = False
) -> TargetAcceleration:
    """See [`Backend.for_target`]."""
    return TargetAcceleration() if _backend is None else _backend.for_target(target, is_batch, reads_layers)


def drafter_acceleration(drafter: FalconDraftNetwork, target: PreTrainedModel) -> DrafterAcceleration:
    """See [`Backend.for_drafter`]."""
    return DrafterAcceleration(drafter) if _backend is None else _backend.for_drafter(drafter, target)
