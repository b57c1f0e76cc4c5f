# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Options of drafting, read from a drafter's `generation_config`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import GenerationConfig

from .hook import call_settings, default_generation_params

# Far beyond what pays: more is a damaged or a hostile file, and would take all memory.
_RANGES = {
    "num_assistant_tokens": (1, 4096),
    "num_draft_passes": (1, 64),
    "draft_top_k": (1, 256),
    "draft_width": (1, 128),
    "prompt_lookup_num_tokens": (0, 4096),
}
_DEEPEST = 1024
# A drafter that is right this many times as often as it says says nothing.
_LARGEST_CALIBRATION = 100.0
_SCHEDULES = ("heuristic", "constant")
_VERIFICATIONS = ("exact", "speculative", "multi_root")


@dataclass(frozen=True)
class DraftOptions:
    """
    Options of drafting. They are fields of `drafter.generation_config`, which is saved with the drafter:
    `drafter.generation_config.num_assistant_tokens = 16`. A call of `generate` may set other values for itself, as
    arguments (those that transformers knows) or in its `generation_config` (all of them).

    Args:
        num_assistant_tokens (`int`, *optional*, defaults to 32):
            Draft tokens of the tree that the target verifies in one forward (the node budget), at most.
        num_assistant_tokens_schedule (`str`, *optional*, defaults to `"heuristic"`):
            "heuristic": each round drafts and verifies what pays on this machine, and nothing where nothing pays. It
            needs a dynamic tree; others are as "constant". "constant": `num_assistant_tokens` every round, and passes
            by `assistant_confidence_threshold`.
        num_draft_passes (`int`, *optional*, defaults to 6):
            Draft passes of a round at most; each goes `block_size` tokens deeper.
        draft_top_k (`int`, *optional*, defaults to 8):
            Candidates for the children of one node.
        draft_width (`int`, *optional*, defaults to 6):
            Nodes that each level of a dynamic tree continues, and so the paths that a draft pass extends.
        draft_tree (`str` or `list[list[int]]`, *optional*, defaults to `"dynamic"`):
            "dynamic": the most probable nodes of each round. "static": a fixed tree of `num_assistant_tokens` nodes.
            A list of paths, each a list of child ranks from the root, is a fixed tree of one's own.
        assistant_confidence_threshold (`float`, *optional*, defaults to 0.05):
            With the schedule "constant": no further draft pass once the most probable path is less likely than this.
            0 always drafts on.
        prompt_lookup_num_tokens (`int`, *optional*, defaults to 32):
            Tokens of a continuation found in the context that a dynamic tree takes in, at most; they count as nodes. 0
            looks nothing up.
        verification (`str`, *optional*, defaults to `"exact"`):
            How drafts are verified when sampling. "exact": the tokens are those that plain decoding draws under the
            same seed. "speculative": candidates are drawn from the drafter and accepted by the ratio of probabilities.
            Tokens are distributed as plain decoding's, and are others; at high temperature a good drafter has more of
            them accepted. The tree is a static one. "multi_root": **biased**, samples are not distributed as plain
            decoding's. Beside the token that the target drew its likeliest others begin trees, `draft_top_k` together,
            and the one is kept that most tokens are accepted behind. Both draft trees of `num_assistant_tokens` nodes
            every round and look nothing up. Greedy decoding, and batches, are as with "exact".
        draft_calibration (`list[float]`, *optional*, defaults to `()`):
            How often nodes at depth 1, 2, ... are right, over the drafter's own probability, as `hf-falcon tune`
            found it. "heuristic" starts from there and learns on.

    Raises:
        `ValueError`: for a value out of range, naming the field, the value and what it may be.
    """

    num_assistant_tokens: int = 32
    num_assistant_tokens_schedule: str = "heuristic"
    num_draft_passes: int = 6
    draft_top_k: int = 8
    draft_width: int = 6
    draft_tree: str | Sequence[Sequence[int]] = "dynamic"
    assistant_confidence_threshold: float = 0.05
    prompt_lookup_num_tokens: int = 32
    verification: str = "exact"
    draft_calibration: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name, (least, largest) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
                raise ValueError(
                    f"`{name}` is {value!r}: set it to an integer of at least {least} and at most {largest}."
                )
        schedule = self.num_assistant_tokens_schedule
        if schedule not in _SCHEDULES:
            known = ", ".join(map(repr, _SCHEDULES))
            raise ValueError(f"`num_assistant_tokens_schedule` is {schedule!r}: set it to one of {known}.")
        if self.verification not in _VERIFICATIONS:
            known = ", ".join(map(repr, _VERIFICATIONS))
            raise ValueError(f"`verification` is {self.verification!r}: set it to one of {known}.")
        threshold = self.assistant_confidence_threshold
        if not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
            raise ValueError(f"`assistant_confidence_threshold` is {threshold!r}: set it between 0 and 1.")
        shares = self.draft_calibration
        if not isinstance(shares, (list, tuple)) or len(shares) > _DEEPEST or not all(map(_is_calibration, shares)):
            raise ValueError(
                f"`draft_calibration` is {shares!r:.80}: set it to a list of at most {_DEEPEST} numbers, each above 0 "
                f"and at most {_LARGEST_CALIBRATION}."
            )
        tree = self.draft_tree
        is_paths = isinstance(tree, (list, tuple)) and all(isinstance(path, (list, tuple)) for path in tree)
        if not is_paths and tree not in ("dynamic", "static"):
            raise ValueError(f"`draft_tree` is {tree!r}: set it to 'dynamic', 'static' or a list of paths.")
        most = _RANGES["num_assistant_tokens"][1]
        nodes, depth = (len(tree), max(map(len, tree), default=0)) if is_paths else (0, 0)
        if nodes > most or depth > _DEEPEST:
            raise ValueError(
                f"`draft_tree` has {nodes} paths and is {depth} deep: give at most {most} paths and {_DEEPEST} levels."
            )

    @classmethod
    def from_generation_config(
        cls, generation_config: GenerationConfig | None, call: GenerationConfig | None = None
    ) -> DraftOptions:
        """
        The options of a drafter; what its generation configuration leaves out or sets to `None` keeps its default.

        Args:
            generation_config ([`GenerationConfig`] or `None`): the drafter's.
            call ([`GenerationConfig`], *optional*): that of a `generate` call; what it sets itself wins.

        Returns:
            [`DraftOptions`]: those that they set.
        """
        given = {field.name: getattr(generation_config, field.name, None) for field in fields(cls)}
        given |= {name: value for name in given if (value := set_by_call(call, name)) is not None}
        return cls(**{name: value for name, value in given.items() if value is not None})


def _is_calibration(share: Any) -> bool:
    return isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= _LARGEST_CALIBRATION


def set_by_call(call: GenerationConfig | None, name: str) -> Any:
    """
    The value that a `generate` call sets for a field, in its arguments or its configuration, or `None`.

    Args:
        call ([`GenerationConfig`] or `None`):
            The configuration that `generate` prepared. The hook notes on it which values the user set. In a
            configuration from elsewhere, a value that equals transformers' default counts as not set.
        name (`str`): the field.
    """
    settings = call_settings(call)
    if settings is not None:
        return settings.get(name)
    value = getattr(call, name, None)
    return None if value == default_generation_params().get(name) else value
