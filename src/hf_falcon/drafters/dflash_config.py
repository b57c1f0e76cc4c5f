# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Configuration of a DFlash or DSpark drafter, in the layout of the package `speculators`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from .speculators_config import SpeculatorsDraftConfig

# A deeper tree never pays.
_MOST_ROWS = 1024
_MOST_RANK = 2**14
_MARKOV_HEADS = ("vanilla", "gated")


class DFlashDraftConfig(SpeculatorsDraftConfig):
    r"""
    Configuration of a [`DFlashDraftModel`]: DFlash (arXiv 2602.06036), and DSpark, which has a Markov head beside. It
    is saved in the layout of the package `speculators`, with its field names.

    Its attribute `block_size` is what [`Drafter`] calls so: the tokens that a block proposes. The field of the file is
    in `block_rows`.

    Args:
        transformer_layer_config, kwargs:
            See [`SpeculatorsDraftConfig`]. The layers always have Qwen3's norms of queries and keys.
        block_size (`int`, *optional*, defaults to 8): rows of a block, the anchor's included.
        aux_hidden_state_layer_ids (`list[int]`):
            The target's hidden states that the drafter reads: id n is the hidden state after n layers.
        mask_token_id (`int`): the token that the rows behind the anchor's read.
        sample_from_anchor (`bool`, *optional*, defaults to `False`):
            Whether the anchor's row proposes a token, too. Each row then proposes the token behind its own position;
            otherwise the token at its own position.
        sliding_window_non_causal (`bool`, *optional*, defaults to `False`):
            Whether a row also sees later rows of its block in a layer with a sliding window. Without a window it does.
        markov_rank (`int`, *optional*, defaults to 0):
            Width of the Markov head's embeddings; 0 is no Markov head (DFlash).
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`):
            `"gated"` weighs the embedding by a gate that depends on the hidden state.
        num_target_layers (`int`, *optional*): layers of the target, if the file names them.

    Raises:
        `ValueError`: for a field out of range or of another type; it names the field, its value and the allowed
            values.
    """

    model_type = "dflash_draft"

    def __init__(
        self,
        transformer_layer_config: dict[str, Any] | PreTrainedConfig | None = None,
        block_size: int = 8,
        aux_hidden_state_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        sample_from_anchor: bool = False,
        sliding_window_non_causal: bool = False,
        markov_rank: int = 0,
        markov_head_type: str = "vanilla",
        num_target_layers: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(transformer_layer_config, **kwargs)
        self.block_rows = block_size
        self.aux_hidden_state_layer_ids = aux_hidden_state_layer_ids
        self.mask_token_id = mask_token_id
        self.sample_from_anchor = sample_from_anchor
        self.sliding_window_non_causal = sliding_window_non_causal
        self.markov_rank = markov_rank
        self.markov_head_type = markov_head_type
        self.num_target_layers = num_target_layers
        self._validate()
        self.block_size = block_size if sample_from_anchor else block_size - 1

    def to_dict(self) -> dict[str, Any]:
        """See [`SpeculatorsDraftConfig.to_dict`]."""
        fields = {
            **super().to_dict(),
            "architectures": ["DFlashSpeculator"],
            "block_size": self.block_rows,
            "mask_token_id": self.mask_token_id,
            "num_target_layers": self.num_target_layers,
            "sample_from_anchor": self.sample_from_anchor,
            "sliding_window_non_causal": self.sliding_window_non_causal,
            "speculators_model_type": "dflash",
        }
        if self.markov_rank == 0:
            return fields
        return {
            **fields,
            "architectures": ["DSparkSpeculator"],
            # Its weights are not kept.
            "enable_confidence_head": False,
            "markov_head_type": self.markov_head_type,
            "markov_rank": self.markov_rank,
            "speculators_model_type": "dspark",
        }

    def _validate(self) -> None:
        super()._validate()
        self._validate_flags("sample_from_anchor", "sliding_window_non_causal")
        if self.aux_hidden_state_layer_ids is None:
            raise ValueError(
                "`aux_hidden_state_layer_ids` is None: give the target's hidden states that the drafter reads, for "
                "example as `layer_ids` to `from_pretrained`."
            )
        ranges = {
            "block_size": (self.block_rows, 1 if self.sample_from_anchor else 2, _MOST_ROWS),
            "mask_token_id": (self.mask_token_id, 0, self.vocab_size - 1),
            "markov_rank": (self.markov_rank, 0, _MOST_RANK),
            "num_target_layers": (1 if self.num_target_layers is None else self.num_target_layers, 1, 2**16),
        }
        for name, (value, smallest, largest) in ranges.items():
            if type(value) is not int or not smallest <= value <= largest:
                raise ValueError(f"`{name}` is {value!r:.200}: set it to an integer from {smallest} to {largest}.")
        if self.markov_rank > 0 and self.markov_head_type == "rnn":
            raise ValueError(
                "`markov_head_type` is 'rnn': the state of a recurrent head depends on all tokens of the block so "
                "far, but a draft state knows the token before alone. Drafters with the heads "
                f"{', '.join(_MARKOV_HEADS)} can be read."
            )
        if self.markov_head_type not in _MARKOV_HEADS:
            raise ValueError(
                f"`markov_head_type` is {self.markov_head_type!r:.200}: it must be one of {', '.join(_MARKOV_HEADS)}."
            )
