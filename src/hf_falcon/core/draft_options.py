# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Options of drafting, read from a drafter's `generation_config` and from a `generate` call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers import GenerationConfig

from .hook import call_settings, default_generation_params

MOST_PASSES = 64
# Larger values never pay. They come from a damaged or a hostile file, and would take all memory.
_RANGES = {
    "num_assistant_tokens": (1, 4096),
    "num_draft_passes": (0, MOST_PASSES),
    "draft_top_k": (1, 256),
    "draft_width": (1, 128),
    "prompt_lookup_num_tokens": (0, 4096),
}
_DEEPEST = 1024
# What a round may cost: options that are each in range could together take all memory, and minutes for a round.
MOST_ROWS_OF_A_PASS, MOST_CANDIDATES = 2**9, 2**18
_MOST_ROWS, _MOST_SCORES = 2**12, 2**28
# Probabilities that are wrong by a larger factor carry no information.
_LARGEST_CALIBRATION = 100.0
# Tokens of the context that a token is compared with, and 1; and a factor of e to this power on a probability.
_MOST_BONUSES, _LARGEST_BONUS = 9, 50.0
_WORDS = {
    "num_assistant_tokens_schedule": ("heuristic", "constant"),
    "verification": ("exact", "speculative", "multi_root"),
}


@dataclass(frozen=True)
class DraftOptions:
    """
    Options of drafting. They are fields of `drafter.generation_config`, which is saved with the drafter:
    `drafter.generation_config.num_assistant_tokens = 16`. All of them are arguments of `generate` and of a pipeline
    call, too: `target.generate(**inputs, assistant_model=drafter, num_assistant_tokens=16)`. A call may also set them
    in its `generation_config`, and a target in its own. A value of either counts before the drafter's.

    Args:
        num_assistant_tokens (`int`, *optional*, defaults to 32):
            The node budget: the largest number of draft tokens that the target verifies in one forward.
        num_assistant_tokens_schedule (`str`, *optional*, defaults to `"heuristic"`):
            "heuristic": each round drafts and verifies as many tokens as pay on this machine, and none if none pay.
            It needs a dynamic tree; with other trees it is the same as "constant". "constant": each round drafts
            `num_assistant_tokens` tokens, and `assistant_confidence_threshold` limits the draft passes.
        num_draft_passes (`int`, *optional*, defaults to 6):
            The largest number of draft passes in a round. Each pass goes `block_size` tokens deeper. With 0, prompt
            lookup alone proposes tokens.
        draft_top_k (`int`, *optional*, defaults to 8):
            The number of candidates for the children of one node.
        draft_width (`int`, *optional*, defaults to 6):
            The number of nodes in each level of a dynamic tree that get children: a draft pass extends as many paths.
        draft_tree (`str` or `list[list[int]]`, *optional*, defaults to `"dynamic"`):
            "dynamic": the most probable nodes of each round. "static": a fixed tree of `num_assistant_tokens` nodes.
            A list of paths is a fixed tree of your own; each path is a list of child ranks from the root.
        assistant_confidence_threshold (`float`, *optional*, defaults to 0.05):
            With the schedule "constant": no further draft pass runs once the most probable path has a lower
            probability. With 0, and on a device other than a CPU, all passes run.
        prompt_lookup_num_tokens (`int`, *optional*, defaults to 32):
            The largest number of prompt lookup tokens in a dynamic tree: if the latest tokens occurred earlier, the
            tokens that followed them are added to the tree. They count as nodes. 0 turns prompt lookup off, and so
            does code from the Hub, without the package.
        context_bonuses (`list[float]`, *optional*, defaults to `()`):
            What is added to the drafter's logit of a token that occurred earlier in the sequence, if the token
            followed the latest 0, 1, 2, ... tokens there, too; the last number is also for more tokens. With any, a
            Falcon drafter also scores the tokens of the sequence that its draft vocabulary lacks. The drafter for
            SmolLM2 has `[0.5, 0.8, 1.8, 2.8, 5.0]`; `examples/context_bonuses.py` fits them to a drafter.
        verification (`str`, *optional*, defaults to `"exact"`):
            How drafts are verified when sampling. "exact": the text is the text of plain decoding under the same seed.
            "speculative": candidates are drawn from the drafter and accepted by the ratio of probabilities. The text
            has the distribution of plain decoding, but differs under the same seed; at high temperature, a good
            drafter gets more tokens accepted. "multi_root": **biased**, the text does not have the distribution of
            plain decoding. `draft_top_k` tokens start trees: the token that the target drew, and the most probable
            others. The tree with the most accepted tokens is kept. Both draft `num_assistant_tokens` nodes without
            prompt lookup: "speculative" in a static tree, "multi_root" in dynamic ones. Greedy decoding and batches
            are always verified as with "exact".
        draft_calibration (`list[float]`, *optional*, defaults to `()`):
            A calibration of the drafter's probabilities: for depth 1, 2, ..., the measured acceptance rate over the
            drafter's own probability. `hf-falcon tune` measures it. "heuristic" starts from it and updates it.

    Raises:
        `ValueError`: for a value out of range; it names the field, the value and the allowed values.
    """

    num_assistant_tokens: int = 32
    num_assistant_tokens_schedule: str = "heuristic"
    num_draft_passes: int = 6
    draft_top_k: int = 8
    draft_width: int = 6
    draft_tree: str | Sequence[Sequence[int]] = "dynamic"
    assistant_confidence_threshold: float = 0.05
    prompt_lookup_num_tokens: int = 32
    context_bonuses: Sequence[float] = ()
    verification: str = "exact"
    draft_calibration: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name, (least, largest) in _RANGES.items():
            value = getattr(self, name)
            is_wrong = isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest
            self._refuse(is_wrong, name, f"set it to an integer of at least {least} and at most {largest}")
        for name, known in _WORDS.items():
            self._refuse(getattr(self, name) not in known, name, f"set it to one of {', '.join(map(repr, known))}")
        threshold = self.assistant_confidence_threshold
        is_wrong = not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1
        self._refuse(is_wrong, "assistant_confidence_threshold", "set it between 0 and 1")
        self._refuse(
            not _are_numbers(self.draft_calibration, _DEEPEST, lambda share: 0 < share <= _LARGEST_CALIBRATION),
            "draft_calibration",
            f"set it to a list of at most {_DEEPEST} numbers, each above 0 and at most {_LARGEST_CALIBRATION}",
        )
        self._refuse(
            not _are_numbers(self.context_bonuses, _MOST_BONUSES, lambda bonus: 0 <= bonus <= _LARGEST_BONUS),
            "context_bonuses",
            f"set it to a list of at most {_MOST_BONUSES} numbers, each of at least 0 and at most {_LARGEST_BONUS}",
        )
        tree = self.draft_tree
        is_paths = isinstance(tree, (list, tuple)) and all(isinstance(path, (list, tuple)) for path in tree)
        is_wrong = not is_paths and tree not in ("dynamic", "static")
        self._refuse(is_wrong, "draft_tree", "set it to 'dynamic', 'static' or a list of paths")
        most = _RANGES["num_assistant_tokens"][1]
        nodes, depth = (len(tree), max(map(len, tree), default=0)) if is_paths else (0, 0)
        if nodes > most or depth > _DEEPEST:
            raise ValueError(
                f"`draft_tree` has {nodes} paths and is {depth} deep: give at most {most} paths and {_DEEPEST} levels."
            )

    def _refuse(self, is_wrong: bool, name: str, remedy: str) -> None:
        if is_wrong:
            raise ValueError(f"`{name}` is {getattr(self, name)!r:.200}: {remedy}.")

    def check_round(self, block_size: int, vocab_size: int) -> None:
        """
        Checks what a round may cost. The limits are far beyond what pays with any model.

        Args:
            block_size (`int`): tokens of a draft pass.
            vocab_size (`int`): tokens of the target's vocabulary.

        Raises:
            `ValueError`: for a product of options out of range; it names the fields, their values and the limit.
        """
        nodes = {"`num_assistant_tokens`": self.num_assistant_tokens}
        if not isinstance(self.draft_tree, str):
            nodes = {"paths of `draft_tree`": len(self.draft_tree)}
        block, passes = {"`block_size`": block_size}, {"`num_draft_passes`": self.num_draft_passes}
        check_product("scores of the target", _MOST_SCORES, nodes | {"`vocab_size`": vocab_size})
        check_product("levels of a tree", _DEEPEST, passes | block)
        if self.draft_tree != "dynamic" or self.verification == "speculative":
            check_product("positions drafted in a round", _MOST_ROWS, nodes | block)
        if self.draft_tree == "dynamic" or self.verification == "multi_root":
            rows = {"`draft_width`": self.draft_width} | block
            # The first pass drafts one block.
            if self.num_draft_passes > 1:
                check_product("positions drafted in a pass", MOST_ROWS_OF_A_PASS, rows)
            check_product("positions drafted in a round", _MOST_ROWS, passes | rows)
            children = {"`draft_top_k`": min(self.draft_top_k, self.num_assistant_tokens)}
            check_product("candidates of a round", MOST_CANDIDATES, passes | rows | children)

    @classmethod
    def from_generation_config(
        cls, generation_config: GenerationConfig | None, call: GenerationConfig | None = None
    ) -> DraftOptions:
        """
        The options of a drafter, or of one call. A field that is missing or `None` has its default.

        Args:
            generation_config ([`GenerationConfig`] or `None`): the configuration of the drafter.
            call ([`GenerationConfig`], *optional*):
                The configuration of a `generate` call. Fields that the user set for the call replace the drafter's;
                see [`set_by_call`].

        Returns:
            [`DraftOptions`]: the options.
        """
        given = {field.name: getattr(generation_config, field.name, None) for field in fields(cls)}
        given |= {name: value for name in given if (value := set_by_call(call, name)) is not None}
        return cls(**{name: value for name, value in given.items() if value is not None})


def check_product(what: str, limit: int, factors: dict[str, int]) -> None:
    """Raises a `ValueError` if the product of some values, by their names, is above a limit."""
    found = math.prod(factors.values())
    if found > limit:
        named = " times ".join(f"{name} ({value})" for name, value in factors.items())
        raise ValueError(f"{named} makes {found:,} {what}: set lower values, that make at most {limit:,}.")


def _are_numbers(values: Any, most: int, is_allowed: Callable[[float], bool]) -> bool:
    return (
        isinstance(values, (list, tuple))
        and len(values) <= most
        and all(isinstance(each, (int, float)) and not isinstance(each, bool) and is_allowed(each) for each in values)
    )


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
