# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The files of a model's folder or repository, as far as they can be read without torch and without weights."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import EntryNotFoundError

from ..drafters.stored_tensors import LARGEST_CONFIG, stored_tensors
from ..json_files import read_json
from .card import read_card

# Of each tensor of a checkpoint its dtype, in the words of safetensors, and its shape.
Headers = dict[str, tuple[str, tuple[int, ...]]]
# The files that are read of a checkpoint, in their order of preference: one, several, or a pickled one.
_PICKLED = "pytorch_model.bin"
_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", _PICKLED)


class CheckpointListing:
    """
    The files of a model.

    Args:
        repository (`str`): a folder, or a repository of the Hub, all of whose files are read of one commit.
        revision (`str`, *optional*): branch, tag or commit of a repository.
    """

    def __init__(self, repository: str, revision: str | None = None):
        self.repository, self.commit = repository, None
        if Path(repository).is_dir():
            self._sizes = {file.name: file.stat().st_size for file in Path(repository).iterdir() if file.is_file()}
        else:
            found = HfApi().model_info(repository, revision=revision, files_metadata=True)
            self._sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
            self.commit = found.sha

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(self._sizes[name] for name in _weight_files(self._sizes))

    def fields(self) -> Any:
        """What `config.json` holds."""
        return read_json(self._file("config.json"), max_bytes=LARGEST_CONFIG)

    def card(self) -> ModelCardData | None:
        """The metadata of the card, or `None` without one."""
        try:
            file = self._file("README.md")
        except EntryNotFoundError:
            return None
        return read_card(file) if file.is_file() else None

    def headers(self) -> Headers:
        """
        What the headers of safetensors files say of their tensors. Of a file on the Hub, only the header is read.
        """
        found: Headers = {}
        for name in _weight_files(self._sizes):
            if name == _PICKLED:
                continue
            if self.commit is None:
                stored = stored_tensors([Path(self.repository, name)])
                found |= {tensor: (each.dtype, each.shape) for tensor, each in stored.items()}
            else:
                metadata = HfApi().parse_safetensors_file_metadata(self.repository, name, revision=self.commit)
                found |= {tensor: (each.dtype, tuple(each.shape)) for tensor, each in metadata.tensors.items()}
        return found

    def _file(self, name: str) -> Path:
        if self.commit is None:
            return Path(self.repository, name)
        return Path(HfApi().hf_hub_download(self.repository, name, revision=self.commit))


def _weight_files(files: Iterable[str]) -> list[str]:
    for pattern in _WEIGHTS:
        if found := [name for name in files if fnmatchcase(name, pattern)]:
            return found
    return []
