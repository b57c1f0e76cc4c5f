# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Which modules of a target give a token other bits when several tokens run together: one forward over a tree against
forwards over single tokens, as plain decoding runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ..core.interfaces import target_acceleration
from ..core.target_parts import CACHE_NAME
from ..core.target_run import TargetRun
from ..core.tree import DraftTree, ancestor_mask, chain

# Numbers of tokens that are compared.
SIZES = 1, 2, 4, 8, 16, 24
# What a module got, and what it gave, for each forward: of shape `(tokens, ...)`.
_Recorded = dict[str, list[tuple[Tensor | None, Tensor]]]


@dataclass
class Exactness:
    """
    What differs between a forward over several tokens and forwards over one.

    Args:
        rows (`int`): tokens of the forward.
        is_tree (`bool`): whether they are a tree of several paths; else one path.
        modules (`dict[str, float]`):
            The share of differing values of each module's output, in the order of the forward. What follows a
            difference mostly differs, too.
        first (`str`, *optional*): the first module that gives other values.
        alone (`dict[str, float]`):
            The share by kind of linear layer or norm, if it gets equal inputs: a module's own difference. A kind is
            the class and the shape of the weight.
        logits (`float`): the share of differing logits.
    """

    rows: int
    is_tree: bool
    modules: dict[str, float] = field(default_factory=dict)
    first: str | None = None
    alone: dict[str, float] = field(default_factory=dict)
    logits: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether every module gives equal bits."""
        return self.first is None and self.logits == 0 and not any(self.alone.values())


@torch.no_grad()
def exactness(
    target: PreTrainedModel, input_ids: Tensor, sizes: Sequence[int] = SIZES, is_tree: bool = True
) -> list[Exactness]:
    """
    Compares forwards over several tokens with forwards over one, bit by bit.

    Args:
        target ([`PreTrainedModel`]): a target that takes trees.
        input_ids (`torch.LongTensor` of shape `(1, length)`): a prompt.
        sizes (sequence of `int`, *optional*): numbers of tokens.
        is_tree (`bool`, *optional*, defaults to `True`):
            Whether half of the tokens are on other paths, which the compared path passes by.

    Returns:
        `list[Exactness]`: one for each number.
    """
    deepest = max(map(_path_length if is_tree else int, sizes))
    tokens, single, single_logits = _single_tokens(target, input_ids, deepest)
    found = []
    for rows in sizes:
        tree, path = _tree(tokens, rows) if is_tree else (chain(tokens[:rows]), list(range(rows)))
        run = TargetRun(target, input_ids, target.generation_config, _arguments(target, input_ids))
        run.prefill(input_ids)
        with _recording(target) as recorded:
            logits, _ = run.score([tree], [torch.cat((input_ids.cpu(), tokens[None, :1]), dim=1)])
        run.finish()
        each = Exactness(rows, is_tree, logits=_share(single_logits[: len(path)], logits[0, path]))
        for name, outputs in recorded.items():
            given, together = outputs[0]
            if name not in single or len(outputs) > 1 or together.shape[0] != rows:
                continue
            calls = single[name][: len(path)]
            each.modules[name] = _share(torch.cat([output for _, output in calls]), together[path])
            if each.first is None and each.modules[name] > 0:
                # With other inputs it is the module around it that differs: attention has no module of its own.
                is_own = (
                    given is None
                    or _share(torch.cat([before for before, _ in calls if before is not None]), given[path]) == 0
                )
                each.first = name if is_own else name.rpartition(".")[0]
        for kind, share in _alone(target, single, rows):
            each.alone[kind] = max(share, each.alone.get(kind, 0.0))
        found.append(each)
    return found


def _arguments(target: PreTrainedModel, input_ids: Tensor) -> dict[str, Any]:
    return {
        CACHE_NAME: DynamicCache(config=target.config),
        "attention_mask": torch.ones_like(input_ids),
        "use_cache": True,
    }


def _single_tokens(target: PreTrainedModel, input_ids: Tensor, count: int) -> tuple[Tensor, _Recorded, Tensor]:
    """The greedy tokens after a prompt, on the host; what their forwards record; and the logits after each."""
    arguments = _arguments(target, input_ids)
    mask = arguments.pop("attention_mask")
    # The prompt is read as before a tree: what differs is then the forward over several tokens.
    with target_acceleration(target).reading():
        token = target(input_ids, attention_mask=mask, **arguments).logits[:, -1:].argmax(dim=-1)
    tokens, logits = [], []
    with _recording(target) as recorded:
        for _ in range(count):
            tokens.append(token)
            mask = torch.cat((mask, mask[:, :1]), dim=1)
            # As `generate`: without padding most models get no mask.
            outputs = target(token, attention_mask=mask, **arguments)
            logits.append(outputs.logits[0])
            token = outputs.logits[:, -1:].argmax(dim=-1)
    # Others have the heads there: Gemma 3 turns queries and keys before their norms.
    of_tokens = {name: calls for name, calls in recorded.items() if all(len(output) == 1 for _, output in calls)}
    return torch.cat(tokens, dim=1)[0].cpu(), of_tokens, torch.cat(logits)


def _path_length(rows: int) -> int:
    return (rows + 1) // 2 if rows > 2 else rows


def _tree(tokens: Tensor, rows: int) -> tuple[DraftTree, list[int]]:
    """A tree whose path of `tokens` has another node before each of its nodes; and the path's nodes."""
    path, parents, token_ids = [0], [0], [int(tokens[0])]
    length = _path_length(rows)
    for depth in range(1, length):
        parent = path[-1]
        if len(parents) + length - depth < rows:
            parents.append(parent)
            token_ids.append(int(tokens[depth - 1]))
        path.append(len(parents))
        parents.append(parent)
        token_ids.append(int(tokens[depth]))
    while len(parents) < rows:
        parents.append(path[-1])
        token_ids.append(int(tokens[0]))
    return _tree_of(torch.tensor(token_ids, device="cpu"), torch.tensor(parents, device="cpu")), path


def _tree_of(token_ids: Tensor, parents: Tensor) -> DraftTree:
    visible = ancestor_mask(parents, len(parents))
    return DraftTree(token_ids, parents, visible.sum(dim=1) - 1, visible)


@contextmanager
def _recording(target: PreTrainedModel) -> Iterator[_Recorded]:
    """Inside, what modules get and give is recorded, of all modules whose output has a vector for each token."""
    recorded: _Recorded = {}
    handles = []

    def record(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor) and output.dim() >= 3 and output.shape[0] == 1:
                given = inputs[0][0] if inputs and isinstance(inputs[0], Tensor) else None
                recorded.setdefault(name, []).append((given, output[0].clone()))

        return hook

    for name, module in target.named_modules():
        if name:
            handles.append(module.register_forward_hook(record(name), with_kwargs=True))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _alone(target: PreTrainedModel, single: _Recorded, rows: int) -> Iterator[tuple[str, float]]:
    """The share of differing values of each linear layer and norm, given what single tokens gave it."""
    for name, calls in single.items():
        module = target.get_submodule(name)
        weight = module._parameters.get("weight")
        if weight is None or isinstance(module, nn.Embedding) or any(given is None for given, _ in calls):
            continue
        inputs = torch.cat([given for given, _ in calls if given is not None])
        count = -(-rows // len(inputs))
        # A norm of each head gets `(tokens, heads, head_dim)`.
        together = module(torch.cat([inputs] * count)[:rows][None])[0]
        alone = torch.cat([output for _, output in calls] * count)[:rows]
        yield f"{type(module).__name__} {tuple(weight.shape)}", _share(alone, together)


def _share(alone: Tensor, together: Tensor) -> float:
    return float((alone != together).float().mean())
