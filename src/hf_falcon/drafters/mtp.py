# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The multi-token-prediction head that a target's own checkpoint has, as its drafter (DeepSeek-V3, arXiv 2412.19437,
section 2.2). transformers loads it as `MtpModel`; its `use_mtp` drafts one token for one sequence.
"""

from __future__ import annotations

import os
import weakref
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from ..core.draft_session import TargetHead
from ..core.drafter import DraftModel
from ..core.hook import attention_implementation
from ..core.interfaces import DraftedBlocks, DrafterAcceleration
from ..core.probe import MASKED_ATTENTION
from ..core.target_parts import FULL, SLIDING, decoder_layers, layer_kinds
from ..core.tree import to_device
from .language_model_runs import TreeRun

# What `assistant_model` and `attach` take for it; a folder of this name is "./mtp".
MTP = "mtp"


class MtpDraftConfig(PreTrainedConfig):
    """The configuration of an [`MtpDrafter`], with the fields that [`Drafter`] names."""

    model_type = "hf_falcon_mtp"
    block_size = 1
    # The last hidden state is enough.
    feature_layers = ()
    draft_vocab_size = None
    target_name_or_path = None
    target_fingerprint = None


class MtpStep:
    """
    A forward of the head, in the form of a language model: its "logits" are states, which the target's LM head reads.

    Args:
        mtp ([`~transformers.modeling_layers.MtpModel`]): the head.
    """

    def __init__(self, mtp: Any):
        self._mtp = mtp
        self.config, self.dtype = mtp.config, mtp.layers[0].eh_proj.weight.dtype
        self.device = mtp.layers[0].eh_proj.weight.device

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        use_cache: bool = True,
        return_dict: bool = True,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **cache: Any,
    ) -> SimpleNamespace:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(1, new, hidden_size)`): the last hidden state of each position.
            attention_mask (`torch.Tensor` of shape `(1, 1, new, slots)`): an additive mask.
            position_ids (`torch.LongTensor` of shape `(1, new)`): positions of the tokens.
            use_cache, return_dict (`bool`): not used.
            input_ids (`torch.LongTensor` of shape `(1, new)`, *optional*): the token behind each position.
            inputs_embeds (`torch.Tensor` of shape `(1, new, hidden_size)`, *optional*): in place of the tokens.
            cache (`dict`): the [`~transformers.Cache`] of keys and values, by the name that layers have for it.

        Returns:
            A namespace whose `logits` are the states behind the tokens, of shape `(1, new, hidden_size)`.
        """
        mtp, embeds = self._mtp, inputs_embeds
        if embeds is None:
            assert input_ids is not None
            embeds = mtp.embed_tokens(input_ids.to(mtp.embed_tokens.weight.device))
        embeds = embeds.to(self.device, self.dtype)
        rotary = None
        if mtp.rotary_emb is not None:
            of_layer = {"layer_type": mtp.config.layer_types[0]} if mtp.has_per_layer_rope else {}
            rotary = mtp.rotary_emb(embeds, position_ids=position_ids, **of_layer)
        states = mtp.layers[0](
            embeds,
            hidden_states.to(self.dtype),
            position_embeddings=rotary,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache,
        )
        return SimpleNamespace(logits=mtp.shared_post_norm(states) if mtp.use_shared_post_norm else states)

    __call__ = forward


class MtpSession(TreeRun):
    """
    The [`DraftSession`] of an [`MtpDrafter`]. A row is of a position and the token behind it. Drafted rows come from
    the head's own states, and run again once the target's are known.

    Args:
        drafter ([`MtpDrafter`]): the drafter.
        head ([`TargetHead`]): the target's head.
        acceleration ([`DrafterAcceleration`]): how its layers run.
    """

    is_conditional = False

    def __init__(self, drafter: MtpDrafter, head: TargetHead, acceleration: DrafterAcceleration):
        super().__init__(MtpStep(drafter.mtp))
        self._head, self._acceleration = head, acceleration

    def condition(self, states: Tensor, previous_token_ids: Tensor) -> Tensor:
        """See [`DraftSession.condition`]."""
        return states

    def commit(
        self, features: Tensor, next_token_ids: Tensor, first_position: int = 0, prompt_embeds: Tensor | None = None
    ) -> Tensor:
        """See [`DraftSession.commit`]. Positions count from the text's first: rotary positions are relative."""
        tokens = to_device(next_token_ids, self._device)
        embeds = self._head.embed(tokens)
        if prompt_embeds is not None and (missing := features.shape[1] - embeds.shape[1]) > 0:
            embeds = torch.cat((prompt_embeds[:, -missing:].to(embeds), embeds), dim=1)
        with self._acceleration.drafting(self._head):
            return self.read_inputs(inputs_embeds=embeds, hidden_states=features.to(self._device))[None]

    def rewind(self) -> None:
        """See [`DraftSession.rewind`]."""
        self._drop_drafted()

    def extend(self, drafted: DraftedBlocks) -> Tensor:
        """See [`DraftSession.extend`]. A state takes the place of the target's last hidden state."""
        tokens, states = drafted.token_ids[:, -1], drafted.states[:, -1]
        with self._acceleration.drafting(self._head):
            return self.draft(tokens, drafted.blocks, hidden_states=states[None])[:, None]


class MtpDrafter(DraftModel):
    """
    The multi-token-prediction head of a target: `target.generate(**inputs, assistant_model="mtp")`. It drafts trees,
    for one sequence or several: a further pass reads the head's own state in place of the target's.

    Args:
        target ([`PreTrainedModel`]): a causal language model whose configuration has `num_mtp_layers`.
        mtp ([`~transformers.modeling_layers.MtpModel`], *optional*):
            Its head; by default it is loaded from the target's checkpoint. It is used as it is, not copied.

    Raises:
        `ValueError`: if the target has no such head, or one of another kind; or if transformers is too old to load it.
    """

    config_class = MtpDraftConfig

    def __init__(self, target: PreTrainedModel, mtp: Any = None):
        super().__init__(MtpDraftConfig(name_or_path=MTP, target_name_or_path=target.name_or_path or None))
        self.eval()
        if (reason := refusal(target)) is not None:
            raise ValueError(f"`assistant_model` is {MTP!r}, but {reason}.")
        if mtp is None:
            mtp = _load(target)
        if attention_implementation(mtp.config) not in MASKED_ATTENTION:
            mtp.set_attn_implementation("sdpa")
        self._target = weakref.ref(target)
        # No submodule: it has the target's embedding and head, which no `to` of a drafter may move.
        object.__setattr__(self, "mtp", mtp.eval())

    @property
    def norm(self) -> nn.Module:
        """A module on the device and of the dtype that the head runs in."""
        mtp: Any = self.mtp
        norm: nn.Module = mtp.layers[0].hnorm
        return norm

    @property
    def device(self) -> torch.device:
        """Where the head is: where the target's last layer is."""
        return self.norm.weight.device  # type: ignore[return-value]

    def check_target(self, target: PreTrainedModel) -> None:
        """See [`Drafter.check_target`]; it drafts for the target whose head it is."""
        if self._target() is not target:
            raise ValueError(
                f"The drafter is the head of {self.config.target_name_or_path or 'another target'}, and drafts for "
                f"that model alone: give `assistant_model={MTP!r}`, which loads this target's own head."
            )
        mtp: Any = self.mtp
        own: Any = target
        if mtp.embed_tokens is not own.get_input_embeddings() or mtp.shared_head is not own.lm_head:
            raise ValueError(
                "The target's embedding or head was replaced: give "
                '`hf_falcon.AutoDrafter.from_pretrained("mtp", target=target)`.'
            )

    def make_head(self, target: PreTrainedModel) -> TargetHead:
        """See [`Drafter.make_head`]."""
        return TargetHead(self, target)

    def start_session(self, head: TargetHead, acceleration: DrafterAcceleration) -> MtpSession:
        """See [`Drafter.start_session`]."""
        return MtpSession(self, head, acceleration)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> NoReturn:
        """
        A target's head is saved with the target.

        Raises:
            `TypeError`: always.
        """
        raise TypeError("The head is a part of the target's checkpoint: there is nothing to save.")


def refusal(target: PreTrainedModel) -> str | None:
    """
    The reason why no [`MtpDrafter`] is made for a target, or `None`.

    Args:
        target ([`PreTrainedModel`]): the target.
    """
    layers = getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None)
    if not layers:
        return f"the configuration of {type(target).__name__} has no `num_mtp_layers`: its checkpoint has no such head"
    if layers > 1:
        return (
            f"`num_mtp_layers` is {layers}: each layer after the first reads positions that depend on the drafted "
            "path, which is not built; transformers' own `use_mtp=True` drafts chains with them"
        )
    embedding = target.get_input_embeddings()
    if hasattr(embedding, "embed_norm") or not hasattr(target, "lm_head"):
        return f"the head of {type(target).__name__} does not read the target's own embedding and `lm_head`"
    # Earlier versions have a class of that name, or none, that loads no such head.
    if tuple(map(int, transformers_version.split(".")[:2])) < (5, 23):
        return f"transformers {transformers_version} loads no such head: install 5.23 or later"
    try:
        kinds = layer_kinds(target.config.get_mtp_config())
    except ValueError as error:
        return f"transformers does not know its head's layers ({error})"
    if unknown := kinds - {FULL, SLIDING}:
        return f"its head has layers of kind {sorted(unknown)}, which follow no tree"
    return None


def _load(target: PreTrainedModel) -> Any:
    from transformers.modeling_layers import MtpModel

    last = decoder_layers(target)[-1]
    return MtpModel.from_pretrained(target, device_map={"": next(last.parameters()).device})
