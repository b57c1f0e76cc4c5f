# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Drafters as transformers models: they are loaded, saved, pushed to the Hub, and passed to `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from .candidate_generator import limited_options
from .checkpoint_files import (
    FLOATING_DTYPES,
    LOADING,
    check_digests,
    digests,
    pinned,
    printable,
    read_object,
    reading,
    refuse_adapter,
    stored_tensors,
    upload,
    weight_files,
    write_code,
)
from .configuration_falcon_draft import FalconDraftConfig
from .decoding import assisted_decoding
from .draft_options import DraftOptions
from .draft_session import BlockSession, TargetHead, check_embedding, check_target
from .hook import install, keep_custom_fields, read_logits_to_keep
from .interfaces import DrafterAcceleration, DraftSession
from .modeling_falcon_draft import FalconDraftNetwork

# Newest positions of a prompt that the drafter reads: with these the shipped one accepts as much as with all of 1,000.
_PROMPT_ROWS = 128

_DRAFT_VOCABULARY = "draft_vocab_ids"

# Names of weights in an error, at most: a hostile file can have hundreds of thousands.
_MOST_SHOWN = 20


class DraftModel(PreTrainedModel):
    """
    A drafter that transformers takes as an assistant: `target.generate(assistant_model=drafter)`. A subclass adds what
    [`Drafter`] asks for, `make_head` and `start_session`. To construct one, also from custom code of the Hub, installs
    the hook.

    Args:
        config ([`~transformers.PreTrainedConfig`]): has the fields that [`Drafter`] names, and the target's
            `vocab_size`.
    """

    # The hook recognises a drafter by this attribute. The class differs: code loaded from the Hub is another module.
    is_falcon_drafter = True
    # The hook passes these arguments of `generate` on to the decoding loop.
    draft_option_names = tuple(field.name for field in fields(DraftOptions))
    # See [`Drafter`].
    max_draft_passes: int | None = None

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
            args, kwargs: the arguments of [`~decoding.assisted_decoding`], which `generate` prepared.

        Returns:
            `torch.LongTensor` of shape `(batch, length)`, or a [`FalconGenerateOutput`] with
            `return_dict_in_generate=True`.
        """
        return assisted_decoding(target, self, *args, **kwargs)

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """
        As [`PreTrainedModel.adjust_generation_fn`]: loads the drafting options. The repository's `custom_generate` is
        for targets, and is not loaded.
        """
        with reading("generation_config.json"):
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

    def make_head(self, target: PreTrainedModel) -> TargetHead:
        """See [`Drafter.make_head`]."""
        return TargetHead(self, target)

    def start_session(self, head: TargetHead, acceleration: DrafterAcceleration) -> DraftSession:
        """See [`Drafter.start_session`]."""
        return BlockSession(self, head, acceleration, _PROMPT_ROWS)

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
        kwargs["use_safetensors"] = True
        if pretrained_model_name_or_path is not None:
            repository = str(pretrained_model_name_or_path)
            # transformers then reads the files that were checked.
            kwargs = pinned(repository, **kwargs)
            cls._check_files(repository, kwargs)
        # transformers' own error for a shape does not name the weight.
        kwargs["ignore_mismatched_sizes"] = True
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        refuse_problems(pretrained_model_name_or_path, info)
        limited_options(DraftOptions.from_generation_config(model.generation_config), model, model)
        return (model, info) if output_loading_info else model

    @classmethod
    def _check_files(cls, repository: str, kwargs: Mapping[str, Any]) -> None:
        """Compares the tensors in a checkpoint's files with the tensors that its configuration requires."""
        loading = {name: kwargs[name] for name in LOADING if kwargs.get(name) is not None}
        adapter = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
        refuse_adapter(repository, adapter, **loading)
        config = kwargs.get("config")
        if not isinstance(config, PreTrainedConfig):
            config = cls.config_class.from_pretrained(config or repository, **loading)
        # transformers would take its defaults in place of a damaged file.
        read_object(repository, "generation_config.json", **loading)
        files = weight_files(repository, kwargs.get("variant"), **loading)
        check_digests(files, config.weights_sha256)
        stored = stored_tensors(files)
        # An invalid value in a field of transformers may only fail when the network is built.
        with reading("config.json"), torch.device("meta"), init.no_init_weights():
            wanted = cls(config).state_dict()
        refuse_problems(
            repository,
            {
                "missing_keys": wanted.keys() - stored.keys(),
                "unexpected_keys": stored.keys() - wanted.keys(),
                "mismatched_keys": [
                    (name, stored[name].shape, tuple(wanted[name].shape))
                    for name in wanted.keys() & stored.keys()
                    if stored[name].shape != tuple(wanted[name].shape)
                ],
            },
        )
        for name, (file, dtype, _) in stored.items():
            dtypes = FLOATING_DTYPES if wanted[name].is_floating_point() else ("I64",)
            if dtype not in dtypes:
                raise ValueError(
                    f"`{name}` in `{file.name}` of `{repository}` is {dtype}, not {' or '.join(dtypes)}: quantised "
                    "drafters cannot be read. Download it again, or save it again with `save_pretrained`."
                )
        if config.draft_vocab_size is not None:
            _check_draft_vocabulary(stored[_DRAFT_VOCABULARY].file, config.vocab_size)

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
        # The code of a subclass may be anywhere, and one folder could not hold it.
        has_code = type(self).__module__ == __name__
        if has_code:
            self.config.auto_map = {
                "AutoConfig": f"{FalconDraftConfig.__module__.rpartition('.')[2]}.{FalconDraftConfig.__name__}",
                "AutoModel": f"{__name__.rpartition('.')[2]}.{FalconDraftModel.__name__}",
            }
        else:
            self.config.__dict__.pop("auto_map", None)
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if not is_main_process:
            return
        if has_code:
            write_code(__file__, save_directory)
        # The digests of the files, which exist only now.
        self.config.weights_sha256 = digests(save_directory)
        self.config.save_pretrained(save_directory)
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
        card = Path(self.name_or_path, "README.md")
        if self.name_or_path and card.is_file():
            kwargs.setdefault("card", card.read_text(encoding="utf-8"))
        return upload(self.save_pretrained, repo_id, **kwargs)


def _check_draft_vocabulary(file: Path, vocab_size: int) -> None:
    """Refuses ids of a draft vocabulary that a head could not look up: on a GPU that would end the process."""
    with safe_open(file, framework="pt") as weights:
        ids = weights.get_tensor(_DRAFT_VOCABULARY)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(
            f"`{_DRAFT_VOCABULARY}` in `{file.name}` of {file.parent} are no ascending ids of the target's "
            f"{vocab_size} tokens: the file is damaged. Download it again, or save the drafter again with "
            "`save_pretrained`."
        )


def refuse_problems(repository: Any, problems: Mapping[str, Any]) -> None:
    """
    Refuses a checkpoint whose weights do not belong to its configuration.

    Args:
        repository: its folder or name.
        problems (`dict`): names of weights by the kind of problem, as transformers' loading reports them.

    Raises:
        `ValueError`: if there are any; it names the weights.
    """
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found := sorted(map(str, problems.get(problem) or ())):
            shown, more = [printable(each) for each in found[:_MOST_SHOWN]], len(found) - _MOST_SHOWN
            raise ValueError(
                f"The checkpoint `{repository}` has {problem.replace('_', ' ')}: {shown}"
                f"{f' and {more:,} more' if more > 0 else ''}. Its weights do not belong to its config.json: download "
                "it again, or save it again with `save_pretrained`."
            )
