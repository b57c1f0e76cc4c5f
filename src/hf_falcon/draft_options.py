# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Options of drafting, read from a drafter's `generation_config`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from transformers import GenerationConfig

# Far beyond what pays: more is a damaged or a hostile file, and would take all memory.
_LARGEST = {"num_assistant_tokens": 4096, "num_draft_passes": 64, "draft_top_k": 256, "draft_width": 128}
_DEEPEST = 1024


@dataclass(frozen=True)
class DraftOptions:
    """
    Options of drafting. They are fields of `drafter.generation_config`, which is saved with the drafter:
    `drafter.generation_config.num_assistant_tokens = 16`.

    Args:
        num_assistant_tokens (`int`, *optional*, defaults to 12):
            Draft tokens of the tree that the target verifies in one forward (the node budget).
        num_draft_passes (`int`, *optional*, defaults to 4):
            Draft passes of a round at most; each goes `block_size` tokens deeper.
        draft_top_k (`int`, *optional*, defaults to 8):
            Candidates for the children of one node.
        draft_width (`int`, *optional*, defaults to 6):
            Nodes that each level of a dynamic tree continues, and so the paths that a draft pass extends.
        draft_tree (`str` or `list[list[int]]`, *optional*, defaults to `"dynamic"`):
            "dynamic": the most probable nodes of each round. "static": a fixed tree of `num_assistant_tokens` nodes.
            A list of paths, each a list of child ranks from the root, is a fixed tree of one's own.
        assistant_confidence_threshold (`float`, *optional*, defaults to 0.05):
            No further draft pass once the most probable path is less likely than this. 0 always drafts on.

    Raises:
        `ValueError`: for a value out of range, naming the field, the value and what it may be.
    """

    num_assistant_tokens: int = 12
    num_draft_passes: int = 4
    draft_top_k: int = 8
    draft_width: int = 6
    draft_tree: str | Sequence[Sequence[int]] = "dynamic"
    assistant_confidence_threshold: float = 0.05

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
                raise ValueError(f"`{name}` is {value!r}: set it to an integer of at least 1 and at most {largest}.")
        threshold = self.assistant_confidence_threshold
        if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise ValueError(f"`assistant_confidence_threshold` is {threshold!r}: set it between 0 and 1.")
        tree = self.draft_tree
        is_paths = isinstance(tree, (list, tuple)) and all(isinstance(path, (list, tuple)) for path in tree)
        if not is_paths and tree not in ("dynamic", "static"):
            raise ValueError(f"`draft_tree` is {tree!r}: set it to 'dynamic', 'static' or a list of paths.")
        nodes, depth = (len(tree), max(map(len, tree), default=0)) if is_paths else (0, 0)
        if nodes > _LARGEST["num_assistant_tokens"] or depth > _DEEPEST:
            raise ValueError(
                f"`draft_tree` has {nodes} paths and is {depth} deep: give at most {_LARGEST['num_assistant_tokens']} "
                f"paths and {_DEEPEST} levels."
            )

    @classmethod
    def from_generation_config(cls, generation_config: GenerationConfig | None) -> DraftOptions:
        """The options that a generation configuration sets; what it leaves out or sets to `None` keeps its default."""
        given = {field.name: getattr(generation_config, field.name, None) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})
