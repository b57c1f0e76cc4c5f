# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompt lookup alone, as a drafter for any target: no network, no files and no training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..core.drafter import DraftModel
from ..core.interfaces import DrafterAcceleration
from ..lookup import LookupMemory

# What `assistant_model`, `attach` and the commands take for it; a folder of this name is "./lookup".
LOOKUP = "lookup"


class LookupConfig(PreTrainedConfig):
    """The configuration of a [`LookupDrafter`], with the fields that [`Drafter`] names."""

    model_type = "lookup_draft"
    block_size = 1
    feature_layers: Sequence[int] = ()
    target_name_or_path: str | None = None
    target_fingerprint: str | None = None


class LookupDrafter(DraftModel):
    """
    A drafter without a network, for every target: the tokens that followed earlier occurrences of the latest tokens
    are the draft. Its name is "lookup": `target.generate(**inputs, assistant_model="lookup")`. It runs no draft passes
    and reads no features of the target.

    Args:
        memory (`int`, *optional*, defaults to 0):
            Tokens of earlier calls and of added texts that are looked up, too, at most; those that were not used for
            the longest time leave first. With a memory the time that a text takes can show what others wrote. 0
            remembers nothing.

    Raises:
        `ValueError`: if `memory` is not an integer of at least 0.
    """

    config_class = LookupConfig
    max_draft_passes = 0

    def __init__(self, memory: int = 0):
        super().__init__(LookupConfig(name_or_path=LOOKUP))
        self.eval()
        self.generation_config.num_draft_passes = 0
        self.lookup_memory = None if memory == 0 else LookupMemory(memory)

    @property
    def device(self) -> torch.device:
        """The host: texts are looked up there."""
        return torch.device("cpu")

    def check_target(self, target: PreTrainedModel) -> None:
        """See [`Drafter.check_target`]; any target will do."""

    def make_head(self, target: PreTrainedModel) -> Any:
        """See [`Drafter.make_head`]; the head of a drafter without passes scores nothing."""
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        return SimpleNamespace(draft_vocab_size=vocab_size, vocab_ids=None, linear=None)

    def start_session(self, head: Any, acceleration: DrafterAcceleration) -> Any:
        """See [`Drafter.start_session`]; no session is asked for anything."""

    def assisted_decoding(
        self,
        target: PreTrainedModel,
        input_ids: Tensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """See [`DraftModel.assisted_decoding`]. The texts of the call are remembered at its end."""
        output = super().assisted_decoding(target, input_ids, *args, attention_mask=attention_mask, **kwargs)
        if self.lookup_memory is not None:
            # Targets that write speech return more than texts.
            texts = output if isinstance(output, Tensor) else getattr(output, "sequences", None)
            if isinstance(texts, Tensor) and texts.dim() == 2:
                for text, padding in zip(texts.tolist(), _padding(input_ids, attention_mask)):
                    self.lookup_memory.add(text[padding:])
        return output

    def add(self, token_ids: Sequence[int]) -> None:
        """
        Adds a text to the memory.

        Args:
            token_ids (sequence of `int`): its tokens.

        Raises:
            `ValueError`: if there is no memory.
        """
        if self.lookup_memory is None:
            raise ValueError("`memory` is 0, so no text can be added: make a `LookupDrafter(memory=100_000)`.")
        self.lookup_memory.add(list(token_ids))

    def read(self, file: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase) -> None:
        """
        Adds the text of a file to the memory.

        Args:
            file (`str` or `os.PathLike`): a text file in UTF-8.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the target's.

        Raises:
            `ValueError`: if there is no memory, or if the file is no text in UTF-8.
        """
        self.add(file_tokens(file, tokenizer))


def file_tokens(file: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of a text file in UTF-8, without special tokens; see [`LookupDrafter.read`]."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{os.fspath(file)}` is no text in UTF-8 ({error}): give a text file.") from error
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def _padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Padding tokens before each prompt."""
    rows, tokens = input_ids.shape
    if attention_mask is None or tokens == 0 or attention_mask.dim() != 2:
        return [0] * rows
    return (attention_mask[:, -tokens:].cumsum(dim=1) == 0).sum(dim=1).tolist()
