# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Drafters as transformers models: they are loaded, saved, pushed to the Hub, and passed to `generate`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from transformers import GenerationMixin, PreTrainedModel

from .candidate_generator import limited_options
from .decoding import assisted_decoding
from .draft_options import DraftOptions
from .draft_session import BlockSession, TargetHead, check_embedding, check_target
from .hook import install, keep_custom_fields, read_logits_to_keep
from .interfaces import DrafterAcceleration, DraftSession, drafter_files, part
from .modeling_falcon_draft import FalconDraftNetwork
from .target_parts import wanted_layers

# Newest positions of a prompt that the drafter reads: with these the shipped one accepts as much as with all of 1,000.
_PROMPT_POSITIONS = 128


class DraftModel(PreTrainedModel):
    """
    A drafter that transformers takes as an assistant: `target.generate(assistant_model=drafter)`. A subclass adds what
    [`Drafter`] asks for, `make_head` and `start_session`. To construct one, also from custom code of the Hub, installs
    the hook.

    Args:
        config ([`~transformers.PreTrainedConfig`]): has the fields that [`Drafter`] names.
    """

    # The hook recognises a drafter by this attribute. The class differs: code loaded from the Hub is another module.
    is_falcon_drafter = True
    # The hook passes these arguments of `generate` on to the decoding loop.
    draft_option_names = tuple(field.name for field in fields(DraftOptions))
    # See [`Drafter`].
    max_draft_passes: int | None = None
    # Whether it reads the `tokenizer` and the `assistant_tokenizer` of a call.
    reads_tokenizers = False

    _supports_logits_to_keep = read_logits_to_keep

    def __init__(self, config: Any):
        super().__init__(config)
        install()

    @classmethod
    def can_generate(cls) -> bool:
        """`True`: transformers then saves and loads `generation_config`, which has the drafting options."""
        return True

    def check_target(self, target: PreTrainedModel) -> None:
        """See [`Drafter.check_target`]."""
        check_target(self, target)

    def make_head(self, target: PreTrainedModel) -> Any:
        """See [`Drafter.make_head`]."""
        raise NotImplementedError(f"{type(self).__name__} has no `make_head`.")

    def start_session(self, head: Any, acceleration: DrafterAcceleration) -> DraftSession:
        """See [`Drafter.start_session`]."""
        raise NotImplementedError(f"{type(self).__name__} has no `start_session`.")

    def assisted_decoding(self, target: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        """
        Runs the decoding loop of this drafter's own code. The hook calls it for
        `target.generate(assistant_model=drafter)`.

        Args:
            target ([`PreTrainedModel`]): the target, whose `generate` was called.
            args, kwargs:
                The arguments of [`~decoding.assisted_decoding`], which `generate` prepared, and the call's tokenizers.

        Returns:
            `torch.LongTensor` of shape `(batch, length)`, or a [`FalconGenerateOutput`] with
            `return_dict_in_generate=True`.
        """
        kwargs = {name: value for name, value in kwargs.items() if name not in ("tokenizer", "assistant_tokenizer")}
        observe = part("learning")
        with nullcontext() if observe is None else observe(self, target) as observer:
            return assisted_decoding(target, self, *args, observer=observer, **kwargs)

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """
        As [`PreTrainedModel.adjust_generation_fn`]: loads the drafting options. The repository's `custom_generate` is
        for targets, and is not loaded.
        """
        with drafter_files().reading("generation_config.json"):
            GenerationMixin.adjust_generation_fn(self, *args, **{**kwargs, "trust_remote_code": False})

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """As [`PreTrainedModel.save_pretrained`], with the drafting options."""
        keep_custom_fields(self.generation_config)
        super().save_pretrained(save_directory, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """
        A drafter proposes tokens to a target, and generates no text by itself.

        Args:
            args, kwargs: not used.

        Raises:
            `TypeError`: always; it names the call to use.
        """
        raise TypeError(
            "A Falcon drafter generates nothing by itself: call `target.generate(**inputs, assistant_model=drafter)`, "
            "after `hf_falcon.enable()` if it was disabled."
        )


class FalconDraftModel(DraftModel, FalconDraftNetwork):
    """
    The Falcon drafter (arXiv 2412.12639): its network, as a model that transformers loads, saves, pushes to the Hub
    and takes as an assistant.

    Args:
        config ([`FalconDraftConfig`]): its configuration. The weights are new;
            [`FalconDraftModel.from_pretrained`] loads trained weights.
    """

    def check_target(self, target: PreTrainedModel) -> None:
        """See [`Drafter.check_target`]."""
        super().check_target(target)
        check_embedding(self, target)
        wanted_layers(target, self.config.feature_layers or ())

    def make_head(self, target: PreTrainedModel) -> TargetHead:
        """See [`Drafter.make_head`]."""
        return TargetHead(self, target)

    def start_session(self, head: TargetHead, acceleration: DrafterAcceleration) -> DraftSession:
        """See [`Drafter.start_session`]."""
        return BlockSession(self, head, acceleration, _PROMPT_POSITIONS)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """
        As [`PreTrainedModel.from_pretrained`], but from safetensors files only. Incomplete checkpoints are refused
        before their weights take memory.

        Raises:
            `ValueError`: if weights are missing, unexpected or of another shape. A drafter with missing weights would
                still generate the right text, only without a speed-up, so nobody would notice. Also for a
                configuration or drafting options out of range.
            `OSError`: if a weight file is missing, damaged, or not a file that was saved with the drafter.
        """
        kwargs = drafter_files().check(cls, pretrained_model_name_or_path, kwargs)
        kwargs["use_safetensors"] = True
        # transformers' own error for a shape does not name the weight.
        kwargs["ignore_mismatched_sizes"] = True
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        drafter_files().check_loaded(pretrained_model_name_or_path, info)
        limited_options(DraftOptions.from_generation_config(model.generation_config), model, model)
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """
        As [`PreTrainedModel.save_pretrained`]. The folder is self-contained: it includes the drafting options and the
        code of the drafter, so `AutoModel.from_pretrained(folder, trust_remote_code=True)` needs no `hf_falcon`.
        """
        hub = {
            name: kwargs.pop(name) for name in ("repo_id", "commit_message", "private", "create_pr") if name in kwargs
        }
        # Those of other files.
        self.config.weights_sha256 = {}
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if not is_main_process:
            return
        drafter_files().complete(self, save_directory)
        if push_to_hub:
            repo_id = hub.pop("repo_id", None) or Path(save_directory).name
            self.push_to_hub(repo_id, token=kwargs.get("token"), **hub)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """
        Uploads the files of [`FalconDraftModel.save_pretrained`] in one commit, with the card (`README.md`) of the
        folder that the drafter was loaded from.

        Args:
            repo_id (`str`): the repository, `"user/name"`. It is created if it does not exist.
            kwargs: `commit_message`, `commit_description`, `private`, `token`, `revision`, `create_pr`, as in
                [`PreTrainedModel.push_to_hub`], and `card` (`str`), the text of another card.

        Returns:
            `str`: the address of the commit.
        """
        return drafter_files().push(self, repo_id, **kwargs)
