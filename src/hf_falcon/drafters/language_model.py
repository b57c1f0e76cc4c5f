# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A smaller language model as the drafter (speculative sampling, arXiv 2302.01318; speculative decoding, arXiv
2211.17192). It reads the text alone, and nothing of the target, so any causal language model of transformers drafts.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..core.draft_options import MOST_PASSES, set_by_call
from ..core.drafter import DraftModel
from ..core.hook import call_settings, is_drafter, keep_custom_fields
from ..core.interfaces import DraftedBlocks, DrafterAcceleration
from ..core.probe import TREES
from ..core.target_parts import CACHE_NAMES
from ..core.tree import to_device, to_host
from .files import LOADING, refuse_adapter
from .language_model_runs import LanguageModelRun, most_positions, run_of, way_of
from .vocabularies import Vocabulary, vocab_size, vocabulary_of


class CausalLMDraftConfig(PreTrainedConfig):
    """
    What the decoding loop asks of the configuration of a drafter; see [`Drafter`].

    Args:
        vocab_size (`int`, *optional*): tokens of the language model's vocabulary.
        kwargs: fields of [`~transformers.PreTrainedConfig`].
    """

    model_type = "hf_falcon_causal_lm"
    # A pass proposes the next token of each path. There is no layer of the target to read.
    block_size = 1
    feature_layers = None
    target_name_or_path = None
    target_fingerprint = None

    def __init__(self, vocab_size: int = 0, **kwargs: Any):
        self.vocab_size = vocab_size
        super().__init__(**kwargs)


class CausalLMHead:
    """
    The head of a [`CausalLMDrafter`]: states are the language model's own logits. It is a [`DraftHead`].

    Args:
        drafter ([`CausalLMDrafter`]): the drafter.
        target ([`PreTrainedModel`]): the target.
    """

    linear: nn.Linear | None = None

    def __init__(self, drafter: CausalLMDrafter, target: PreTrainedModel):
        self.vocabulary = vocabulary = drafter.vocabulary_of(target)
        self.draft_vocab_size = vocabulary.size
        self.vocab_ids: Tensor | None = None
        # The shared tokens among the language model's, and the language model's id of each of the target's tokens.
        self._columns: Tensor | None = None
        self._own_ids: Tensor | None = None
        if vocabulary.target_ids is not None:
            self.vocab_ids = to_device(vocabulary.target_ids, drafter.device)
        if vocabulary.draft_ids is not None and vocabulary.target_ids is not None:
            self._columns = to_device(vocabulary.draft_ids, drafter.device)
            own_ids = torch.zeros(vocab_size(target), dtype=torch.long, device="cpu")
            own_ids[vocabulary.target_ids] = vocabulary.draft_ids
            self._own_ids = to_device(own_ids, drafter.device)

    def logits(self, states: Tensor) -> Tensor:
        """See [`DraftHead.logits`]."""
        return states[..., : self.draft_vocab_size] if self._columns is None else states[..., self._columns]

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """See [`DraftHead.to_target_ids`]."""
        return draft_ids if self.vocab_ids is None else self.vocab_ids[draft_ids]

    def to_own_ids(self, target_ids: Tensor) -> Tensor:
        """The language model's ids of tokens that both have, of any shape."""
        return target_ids if self._own_ids is None else self._own_ids[target_ids]

    def for_tokens(self, token_ids: Tensor) -> None:
        """See [`DraftHead.for_tokens`]. The language model knows no other tokens."""


class CausalLMSession:
    """
    The [`DraftSession`] of a [`CausalLMDrafter`]. Its cache lives as long as the call. Drafted tokens that were
    accepted stay in it.

    Args:
        drafter ([`CausalLMDrafter`]): the drafter.
        head ([`CausalLMHead`]): its head.
        acceleration ([`DrafterAcceleration`]): how its layers run.
    """

    is_conditional = False

    def __init__(self, drafter: CausalLMDrafter, head: CausalLMHead, acceleration: DrafterAcceleration):
        self._drafter, self._head, self._acceleration = drafter, head, acceleration
        self._run: LanguageModelRun | None = None
        # The text in the language model's tokens.
        self._translation, self._text = head.vocabulary.translate(), list[int]()
        # Of each pass since the last commit: the paths that it continued, their tokens, and the states after these.
        self._passes: list[tuple[Tensor, Tensor, Tensor]] = []
        # Tokens of the longest text that leaves room for drafts.
        most = most_positions(drafter.model)
        self._longest = math.inf if most is None else most - MOST_PASSES

    def condition(self, states: Tensor, previous_token_ids: Tensor) -> Tensor:
        """See [`DraftSession.condition`]."""
        return states

    def commit(
        self, features: Tensor, next_token_ids: Tensor, first_position: int = 0, prompt_embeds: Tensor | None = None
    ) -> Tensor | None:
        """See [`DraftSession.commit`]. Tokens that were drafted on this path do not run again."""
        if self._run is None:
            self._run = run_of(self._drafter.model)
        # One transfer to the host: the new tokens, then parents and tokens of each pass.
        passes = (each for parents, tokens, _ in self._passes for each in (parents, tokens))
        new, *drafted = (each.tolist() for each in to_host(next_token_ids[0], *passes))
        run, (kept, tokens) = self._run, self._translation.extend(new)
        self._text[kept:] = tokens
        if len(self._text) > self._longest:
            self.rewind()
            return None
        states: Tensor | None = None
        if kept < run.length:
            run.cut(kept)
        else:
            path, states = self._drafted_path(tokens, drafted)
            run.keep(path)
        self._passes = []
        if states is None and run.length == len(self._text):
            # The new tokens have changed nothing, or taken a token away: the last one runs again, for its logits.
            run.cut(max(0, len(self._text) - 1))
        if run.length < len(self._text):
            with self._acceleration.drafting(self._head):
                states = run.read(self._text[run.length :])
        return None if states is None else states[None]

    def rewind(self) -> None:
        """See [`DraftSession.rewind`]."""
        self._passes = []
        if self._run is not None:
            self._run.keep([])

    def extend(self, drafted: DraftedBlocks) -> Tensor:
        """See [`DraftSession.extend`]. A state is the logits after a token; what led to it is in the cache."""
        assert self._run is not None
        parents, tokens = drafted.blocks, self._head.to_own_ids(drafted.token_ids[:, -1])
        with self._acceleration.drafting(self._head):
            states = self._run.draft(tokens, parents)
        self._passes.append((parents, tokens, states))
        return states[:, None]

    def _drafted_path(self, tokens: list[int], drafted: list[list[int]]) -> tuple[list[int], Tensor | None]:
        """The drafted tokens, by their passes, that begin `tokens`; and the states after the last of them."""
        path: list[int] = []
        states: Tensor | None = None
        for token, parents, drafted_tokens, (_, _, after) in zip(tokens, drafted[::2], drafted[1::2], self._passes):
            rows = zip(parents, drafted_tokens)
            # All paths of the first pass continue the text.
            row = next((row for row, each in enumerate(rows) if each == (path[-1] if path else each[0], token)), None)
            if row is None:
                break
            path.append(row)
            states = after[row : row + 1]
        return path, states


class CausalLMDrafter(DraftModel):
    """
    A language model that drafts for a larger one: `target.generate(**inputs, assistant_model=drafter)`. It drafts
    trees, for one sequence or several, as every drafter does. A model that takes no trees, such as one that keeps a
    recurrent state, drafts one path.

    Args:
        model ([`PreTrainedModel`]): a causal language model. It is used as it is, not copied.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Its tokenizer. It is needed if the target has other tokens, and by default found by the model's
            `name_or_path`. A call's `assistant_tokenizer` counts before it, and its `tokenizer` is the target's.

    Raises:
        `TypeError`: if the model is no causal language model.
    """

    config_class = CausalLMDraftConfig

    reads_tokenizers = True

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None):
        if not isinstance(model, PreTrainedModel) or is_drafter(model) or not model.can_generate():
            raise TypeError(f"`model` is a {type(model).__name__}: give a causal language model of transformers.")
        if model.config.is_encoder_decoder:
            raise TypeError(
                f"`model` is a {type(model).__name__}, which has an encoder: give a causal language model, of a "
                "decoder alone."
            )
        if not any(name in inspect.signature(model.forward).parameters for name in CACHE_NAMES):
            raise TypeError(f"`model` is a {type(model).__name__}, which keeps no cache: give a model that does.")
        super().__init__(CausalLMDraftConfig(vocab_size(model), name_or_path=model.name_or_path))
        # Dropout would draw random numbers while the target samples.
        self.model, self.tokenizer = model.eval(), tokenizer
        # What it shares with each target, or why nothing is known of that.
        self._vocabularies: weakref.WeakKeyDictionary[PreTrainedModel, Vocabulary | str] = weakref.WeakKeyDictionary()
        # The tokenizers that were given for each target, the target's first, and the size of its vocabulary.
        self._given: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, Any, int]] = weakref.WeakKeyDictionary()
        # Of the language model's options, those of drafting: its own temperature is no matter here.
        given = {name: getattr(model.generation_config, name, None) for name in self.draft_option_names}
        self.generation_config = GenerationConfig(
            **{name: value for name, value in given.items() if value is not None}
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> CausalLMDrafter:
        """
        Loads a language model from safetensors files, in evaluation mode.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): a folder, or a repository of the Hub.
            dtype, kwargs: see [`AutoDrafter.from_pretrained`].

        Returns:
            [`CausalLMDrafter`]: the drafter.

        Raises:
            `TypeError`: for another argument.
            `ValueError`, `OSError`: as [`~transformers.PreTrainedModel.from_pretrained`].
        """
        if unknown := kwargs.keys() - set(LOADING):
            raise TypeError(f"`from_pretrained` got {sorted(unknown)}: it takes `dtype`, {', '.join(LOADING)}.")
        name, dtype = pretrained_model_name_or_path, "auto" if dtype is None else dtype
        refuse_adapter(str(name), **kwargs)
        model, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, use_safetensors=True, output_loading_info=True, **kwargs
        )
        missing = sorted(found["missing_keys"])
        # Its `config.json` is that of a language model of one layer.
        if missing and "fc.weight" in found["unexpected_keys"]:
            raise ValueError(
                f"`{name}` has `fc.weight` and no `{missing[0]}`, as drafters of EAGLE-1 and EAGLE-2 have, which are "
                "not read: use a drafter of another method."
            )
        if missing:
            raise ValueError(
                f"`{name}` lacks {len(missing)} weights of a {type(model).__name__} (such as {missing[0]}): download "
                "it again, or give another language model."
            )
        return cls(model.eval()).eval()

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """
        Saves the language model as it saves itself, with the drafting options.

        Args:
            save_directory (`str` or `os.PathLike`): the folder.
            kwargs: see [`~transformers.PreTrainedModel.save_pretrained`].
        """
        own = self.model.generation_config
        self.model.generation_config = copy.deepcopy(own)
        for name in self.draft_option_names:
            if (value := getattr(self.generation_config, name, None)) is not None:
                setattr(self.model.generation_config, name, value)
        keep_custom_fields(self.model.generation_config)
        try:
            self.model.save_pretrained(save_directory, **kwargs)
        finally:
            self.model.generation_config = own

    def check_target(self, target: PreTrainedModel) -> None:
        """See [`Drafter.check_target`]."""
        self.vocabulary_of(target)

    def vocabulary_of(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Vocabulary:
        """
        The tokens that the language model shares with a target. They are compared once, and again when tokenizers are
        given or the target's vocabulary has another size.

        Args:
            target ([`PreTrainedModel`]): the target.
            tokenizer, assistant_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
                The tokenizers of the target and of the language model; by default those of their checkpoints.

        Returns:
            [`Vocabulary`]: what both share.

        Raises:
            `ValueError`: see [`vocabularies.vocabulary_of`].
        """
        size = vocab_size(target)
        known, given = self._vocabularies.get(target), self._given.get(target, (None, None, size))
        is_other = tokenizer is not given[0] or assistant_tokenizer is not given[1]
        # One tokenizer alone says no more than sizes do.
        are_both = assistant_tokenizer is not None or (tokenizer is not None and self.tokenizer is not None)
        is_other = is_other and (are_both or (tokenizer is not None and isinstance(known, str)))
        if known is None or size != given[2] or is_other:
            try:
                known = vocabulary_of(target, self.model, tokenizer, assistant_tokenizer or self.tokenizer)
            except ValueError as error:
                known = str(error)
            self._vocabularies[target], self._given[target] = known, (tokenizer, assistant_tokenizer, size)
        if isinstance(known, str):
            raise ValueError(known)
        return known

    def make_head(self, target: PreTrainedModel) -> CausalLMHead:
        """See [`Drafter.make_head`]."""
        return CausalLMHead(self, target)

    def start_session(self, head: CausalLMHead, acceleration: DrafterAcceleration) -> CausalLMSession:
        """See [`Drafter.start_session`]."""
        return CausalLMSession(self, head, acceleration)

    def assisted_decoding(self, target: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        """See [`DraftModel.assisted_decoding`]."""
        self.vocabulary_of(target, kwargs.get("tokenizer"), kwargs.get("assistant_tokenizer"))
        # Without trees each path of a pass is a forward of its own. The other candidates of a token are in the tree.
        call = kwargs["generation_config"]
        widths = set_by_call(call, "draft_width"), getattr(self.generation_config, "draft_width", None)
        if widths == (None, None) and way_of(self.model) != TREES:
            settings = call_settings(call)
            (vars(call) if settings is None else settings)["draft_width"] = 1
        return super().assisted_decoding(target, *args, **kwargs)
