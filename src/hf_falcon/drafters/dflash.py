# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The DFlash drafter (arXiv 2602.06036): one pass over a block of an anchor token and mask tokens gives all tokens of the
block. Its layers read the target's hidden states of the text as keys and values. DSpark adds a Markov head: a bias of
the logits that depends on the token before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.caches import DraftCache
from ..core.draft_session import TargetHead
from ..core.interfaces import DraftedBlocks, DrafterAcceleration
from ..core.modeling_falcon_draft import FalconDecoderLayer, FalconRMSNorm, KeyValueCache, additive_mask, rotate
from ..core.tree import to_device
from .dflash_config import DFlashDraftConfig
from .dflash_files import dflash_fields
from .layers import LayerAttention
from .speculators_model import SpeculatorsDraftModel

# The confidence head predicts which tokens are accepted. The policy does so from the drafter's probabilities.
_CONFIDENCE_HEAD = "confidence_head."


class DFlashAttention(LayerAttention):
    """Self-attention of a block, which also sees the positions of the text whose keys and values are in the cache."""

    def write_context(self, hidden: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache) -> None:
        """
        Writes keys and values of positions of the text into the cache.

        Args:
            hidden (`torch.Tensor` of shape `(batch * positions, hidden_size)`): the fused hidden states.
            cos, sin (`torch.Tensor` of shape `(batch, positions, 1, head_dim)`): see [`RotaryEmbedding`].
            cache ([`KeyValueCache`]): the cache.
        """
        shape = (*cos.shape[:2], self.kv_heads, self.head_dim)
        keys = rotate(self.keys(hidden).view(shape), cos, sin).transpose(1, 2)
        cache.update(self.layer, keys, self.v_proj(hidden).view(shape).transpose(1, 2))


class DFlashLayer(FalconDecoderLayer):
    """A decoder layer over the rows of a block."""

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.self_attn = DFlashAttention(config, layer, has_norms=True)


class MarkovHead(nn.Module):
    """
    A bias of the logits that depends on the token before (DSpark): an embedding of that token, and a projection.

    Args:
        config ([`DFlashDraftConfig`]): the drafter's configuration.
    """

    def __init__(self, config: DFlashDraftConfig):
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj = None
        if config.markov_head_type == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def forward(self, hidden: Tensor, embeds: Tensor) -> Tensor:
        """
        The bias, of shape `(..., draft_vocab_size)`.

        Args:
            hidden (`torch.Tensor` of shape `(..., hidden_size)`): hidden states of the rows.
            embeds (`torch.Tensor` of shape `(..., markov_rank)`): `markov_w1` of the tokens before.
        """
        if self.gate_proj is not None:
            embeds = embeds * self.gate_proj(torch.cat((hidden, embeds), dim=-1)).sigmoid()
        return self.markov_w2(embeds)


class DFlashHead(TargetHead):
    """
    The drafter's own head, or the target's where it has none, with the bias of its Markov head; and its own embedding,
    or the target's.

    Args:
        drafter ([`DFlashDraftModel`]): the drafter.
        target ([`PreTrainedModel`]): its target.
    """

    def __init__(self, drafter: DFlashDraftModel, target: PreTrainedModel):
        super().__init__(drafter, target)
        self._is_own = drafter.lm_head is not None
        if drafter.lm_head is not None:
            # The target's post-processing of logits is for the target's own head.
            self.linear, self._scale, self._softcap = drafter.lm_head, 1.0, None
        if drafter.embed_tokens is not None:
            self._embedding = drafter.embed_tokens
        self._markov_head, self._hidden_size = drafter.markov_head, drafter.config.hidden_size

    def embed(self, token_ids: Tensor) -> Tensor:
        """See [`TargetHead.embed`]."""
        # Drafters are trained with the weight alone. The embeddings of some targets (Gemma) multiply it by a factor.
        weight = self._embedding.weight
        return F.embedding(token_ids.to(weight.device), weight.detach()).to(self._example.device)

    def logits(self, states: Tensor) -> Tensor:
        """See [`DraftHead.logits`]."""
        if self._markov_head is None:
            return super().logits(states)
        hidden, embeds = states.tensor_split((self._hidden_size,), dim=-1)
        return super().logits(hidden) + self._markov_head(hidden, embeds)

    def for_tokens(self, token_ids: Tensor) -> TargetHead | None:
        """See [`DraftHead.for_tokens`]. Heads of the drafter have weights for the draft vocabulary alone."""
        return None if self._is_own or self._markov_head is not None else super().for_tokens(token_ids)


class DFlashSession:
    """
    The [`DraftSession`] of a [`DFlashDraftModel`]. Its cache has the positions of the text; the rows of a block are
    written behind them, and not kept.

    Args:
        drafter ([`DFlashDraftModel`]): the drafter.
        head ([`DFlashHead`]): its head.
        acceleration ([`DrafterAcceleration`]): how its layers run.
    """

    def __init__(self, drafter: DFlashDraftModel, head: DFlashHead, acceleration: DrafterAcceleration):
        self._drafter, self._head, self._acceleration = drafter, head, acceleration
        self._device: torch.device = drafter.device
        self._cache = DraftCache(drafter.config.num_hidden_layers)
        self._first_position = 0

    @property
    def is_conditional(self) -> bool:
        """See [`DraftSession`]."""
        return self._drafter.markov_head is not None

    def condition(self, states: Tensor, previous_token_ids: Tensor) -> Tensor:
        """See [`DraftSession.condition`]."""
        return self._drafter.condition(states, previous_token_ids)

    def commit(
        self, features: Tensor, next_token_ids: Tensor, first_position: int = 0, prompt_embeds: Tensor | None = None
    ) -> Tensor:
        """See [`DraftSession.commit`]. Of the tokens only the newest is read: the anchor of the block."""
        drafter, start, rows = self._drafter, self._cache.length, self._drafter.config.block_rows
        if start == 0:
            self._first_position = first_position
        end = start + features.shape[1]
        positions = torch.arange(start, end + rows, device=self._device)[None] + self._first_position
        anchor = to_device(next_token_ids[:, -1:], self._device)
        embeds = self._head.embed(F.pad(anchor, (0, rows - 1), value=drafter.config.mask_token_id))
        with self._acceleration.drafting(self._head):
            drafter.read_context(features.to(self._device), positions[:, :-rows], self._cache)
            self._cache.advance(features.shape[1])
            hidden = self._acceleration.run_layers(
                embeds.to(drafter.norm.weight.dtype),
                torch.full_like(positions[:, -rows:], rows - 1),
                positions[:, -rows:],
                drafter.block_mask(end, self._device),
                self._cache,
            )
        return drafter.to_states(hidden)

    def rewind(self) -> None:
        """See [`DraftSession.rewind`]."""

    def extend(self, drafted: DraftedBlocks) -> NoReturn:
        """See [`DraftSession.extend`]; a block has one pass."""
        raise NotImplementedError("A DFlash drafter runs one draft pass a round: its `max_draft_passes` is 1.")


class DFlashDraftModel(SpeculatorsDraftModel):
    """
    The DFlash drafter, also with DSpark's Markov head.

    It reads hidden states of the target at all positions of the text, and a block: the token behind them (the anchor),
    and mask tokens. Every row of the block sees the text and the block. A state is the hidden state of a row and, with
    a Markov head, the head's embedding of the token before the row's token.

    Args:
        config ([`DFlashDraftConfig`]): its configuration. The weights are new; [`AutoDrafter`] loads trained weights.
        has_embedding, has_head (`bool`, *optional*, defaults to `False`):
            Whether it has an embedding and a head of its own.
    """

    config_class = DFlashDraftConfig
    _no_split_modules = ["DFlashLayer"]
    # A second block would have no hidden states of the target for the first.
    max_draft_passes = 1

    def __init__(self, config: DFlashDraftConfig, has_embedding: bool = False, has_head: bool = False):
        super().__init__(config, len(config.feature_layers), has_embedding, has_head)
        self.hidden_norm = FalconRMSNorm(config.hidden_size, eps=config.transformer_layer_config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank > 0 else None
        self.post_init()

    def make_layer(self, index: int) -> DFlashLayer:
        """See [`SpeculatorsDraftModel.make_layer`]."""
        return DFlashLayer(self.config.transformer_layer_config, index)

    @classmethod
    def fields_of(cls, fields: dict[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See [`SpeculatorsDraftModel.fields_of`]."""
        return dflash_fields(fields)

    @classmethod
    def weight_names(cls, fields: dict[str, Any], names: Iterable[str]) -> dict[str, str]:
        """See [`SpeculatorsDraftModel.weight_names`]."""
        return {name: name for name in names if not name.startswith(_CONFIDENCE_HEAD)}

    @classmethod
    def parts_of(cls, config: Any, weights: Mapping[str, Tensor]) -> dict[str, bool]:
        """See [`SpeculatorsDraftModel.parts_of`]."""
        # A drafter of another width than its target cannot use the target's.
        needs_own = config.target_hidden_size != config.hidden_size
        return {
            "has_embedding": needs_own or "embed_tokens.weight" in weights,
            "has_head": needs_own or "lm_head.weight" in weights,
        }

    def check_layers(self, num_layers: int) -> None:
        """See [`SpeculatorsDraftModel.check_layers`]."""
        super().check_layers(num_layers)
        expected = self.config.num_target_layers
        if expected is not None and num_layers != expected:
            raise ValueError(
                f"The drafter's `num_target_layers` is {expected}, but the target has {num_layers} layers: this "
                f"drafter was made for {self.config.target_name_or_path or 'another target'}."
            )

    def make_head(self, target: PreTrainedModel) -> DFlashHead:
        """See [`Drafter.make_head`]."""
        return DFlashHead(self, target)

    def start_session(self, head: DFlashHead, acceleration: DrafterAcceleration) -> DFlashSession:
        """See [`Drafter.start_session`]."""
        return DFlashSession(self, head, acceleration)

    def read_context(self, features: Tensor, position_ids: Tensor, cache: KeyValueCache) -> None:
        """
        Writes keys and values of positions of the text into a cache.

        Args:
            features (`torch.Tensor` of shape `(batch, positions, (1 + layers) * target_hidden_size)`):
                The target's last hidden state, which is not read, and the hidden states of `config.feature_layers`.
            position_ids (`torch.LongTensor` of shape `(batch, positions)`): the positions.
            cache ([`KeyValueCache`]): the cache.
        """
        hidden = features[..., self.config.target_hidden_size :].to(self.fc.weight.dtype)
        hidden = self.hidden_norm(self.fc(hidden.flatten(0, 1)))
        cos, sin = self.rotary(position_ids, hidden.dtype)
        layer: Any
        for layer in self.layers:
            layer.self_attn.write_context(hidden, cos, sin, cache)

    def block_mask(self, known: int, device: torch.device) -> Tensor:
        """
        The additive mask of a block behind `known` positions, of shape `(1, 1, rows, known + rows)`; with a sliding
        window of shape `(1, 2, rows, known + rows)`, see [`FalconDraftNetwork`]. The window of all rows is that of the
        anchor.
        """
        rows = self.config.block_rows
        visible = torch.ones(1, rows, known + rows, dtype=torch.bool, device=device)
        if self.window is not None:
            slots = torch.arange(known + rows, device=device)
            near = (slots >= known - self.window).expand(rows, -1)
            if not self.config.sliding_window_non_causal:
                near = near & (slots <= slots[known:, None])
            visible = torch.cat((visible, near[None]))
        return additive_mask(visible, self.norm.weight.dtype)[None]

    def to_states(self, hidden: Tensor) -> Tensor:
        """
        The states of the rows that propose a token, with no token before them yet.

        Args:
            hidden (`torch.Tensor` of shape `(batch, rows, hidden_size)`): outputs of `run_layers` for a block.

        Returns:
            `torch.Tensor` of shape `(batch, block_size, hidden_size + markov_rank)`.
        """
        return F.pad(hidden[:, -self.config.block_size :], (0, self.config.markov_rank))

    def condition(self, states: Tensor, previous_token_ids: Tensor) -> Tensor:
        """See [`DraftSession.condition`]."""
        if self.markov_head is None:
            return states
        hidden = states[..., : self.config.hidden_size]
        return torch.cat((hidden, self.markov_head.markov_w1(previous_token_ids)), dim=-1)
