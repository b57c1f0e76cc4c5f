# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The token file: tokenised dialogues, one after another, in safetensors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from .json_text import parse_json, short

FORMAT_VERSION = 1
# safetensors writes several metadata keys in a random order; one key keeps equal files equal in every byte.
_METADATA_KEY = "hf_falcon"
_DTYPES = {
    "tokens": (torch.uint16, torch.int32),
    "offsets": (torch.int64,),
    "prompt_lengths": (torch.int32,),
    "temperatures": (torch.float32,),
}
_STORED_DTYPES = {"U16": torch.uint16, "I32": torch.int32, "I64": torch.int64, "F32": torch.float32}
# The header has four tensors and the metadata. safetensors reads up to 100 MB, which take gigabytes as objects.
_LARGEST_HEADER = 1 << 20
# What the metadata of these names must be, where there is any.
_METADATA_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "data": ((str, list), "names"),
    "plan": ((dict,), "an object"),
    "target_fingerprint": ((str, NoneType), "a text"),
    "chat_template_kwargs": ((dict,), "an object"),
    "chat_template_sha256": ((str, NoneType), "a text"),
}
# Tokens that are compared at once: a file can be larger than memory.
_CHECKED_AT_ONCE = 1 << 24


@dataclass(eq=False)
class TokenFile:
    """
    Tokenised dialogues, each a prompt (chat template included) followed by its response.

    Args:
        tokens (`torch.Tensor` of shape `(total_tokens,)`, uint16 or int32):
            All dialogues, one after another.
        offsets (`torch.Tensor` of shape `(n + 1,)`, int64):
            Dialogue `i` is `tokens[offsets[i] : offsets[i + 1]]`.
        prompt_lengths (`torch.Tensor` of shape `(n,)`, int32):
            Tokens of the prompt of each dialogue.
        temperatures (`torch.Tensor` of shape `(n,)`, float32):
            Temperature at which the target wrote each response; 0 is greedy, -1 is not recorded (or not the target's).
        metadata (`dict[str, Any]`, *optional*, defaults to `{}`):
            Origin of the file: target, its fingerprint, chat template, data, arguments. JSON values.

    Raises:
        ValueError: the tensors are inconsistent. Names tensor, position and value.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    prompt_lengths: torch.Tensor
    temperatures: torch.Tensor
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtypes in _DTYPES.items():
            tensor = getattr(self, name)
            if tensor.dim() != 1 or tensor.dtype not in dtypes:
                raise ValueError(
                    f"`{name}` has dtype {tensor.dtype} and shape {tuple(tensor.shape)}: it must be one row of "
                    f"{' or '.join(str(dtype) for dtype in dtypes)}."
                )
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            ends = self.offsets[[0, -1]].tolist() if len(self.offsets) else "nothing"
            raise ValueError(
                f"`offsets` begins and ends with {ends}: it must run from 0 to {len(self.tokens)} (tokens)."
            )
        for name in ("prompt_lengths", "temperatures"):
            if len(getattr(self, name)) != len(self):
                raise ValueError(
                    f"`{name}` has {len(getattr(self, name))} entries for {len(self)} dialogues (`offsets` less one): "
                    "the numbers must agree."
                )
        # Compared, not subtracted: a difference of int64 can wrap.
        descending = self.offsets[1:] <= self.offsets[:-1]
        _refuse(descending, "offsets", self.offsets[1:], "each must be greater than the one before")
        lengths = self.offsets.diff()
        wrong = (self.prompt_lengths < 1) | (self.prompt_lengths >= lengths)
        _refuse(wrong, "prompt_lengths", self.prompt_lengths, "prompt and response need at least one token each")
        wrong = ~(self.temperatures.isfinite() & (self.temperatures >= 0)) & (self.temperatures != -1)
        _refuse(wrong, "temperatures", self.temperatures, "use a number >= 0, or -1")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample(self, index: int) -> tuple[torch.Tensor, int]:
        """
        One dialogue.

        Returns:
            `tuple`: its tokens (int64, of shape `(length,)`), and how many of them are the prompt.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"`index` is {index}: the file has dialogues 0 to {len(self) - 1}.")
        start, end = self.offsets[index : index + 2].tolist()
        # Converted after slicing, so that only this part of a mapped file is read.
        return self.tokens[start:end].to(torch.int64), int(self.prompt_lengths[index])

    def first(self, count: int) -> TokenFile:
        """The first `count` dialogues."""
        end = int(self.offsets[count])
        return TokenFile(
            self.tokens[:end],
            self.offsets[: count + 1],
            self.prompt_lengths[:count],
            self.temperatures[:count],
            self.metadata,
        )

    def check_vocabulary(self, vocab_size: int, name: str | Path) -> None:
        """
        Checks that a target has all the tokens.

        Args:
            vocab_size (`int`): the target's.
            name (`str` or `Path`): what the error calls the file.

        Raises:
            `ValueError`: naming file, dialogue, token and remedy.
        """
        for start in range(0, len(self.tokens), _CHECKED_AT_ONCE):
            tokens = self.tokens[start : start + _CHECKED_AT_ONCE].int()
            wrong = (tokens < 0) | (tokens >= vocab_size)
            if wrong.any():
                place = int(wrong.nonzero()[0])
                dialogue = int(torch.searchsorted(self.offsets, start + place, right=True)) - 1
                raise ValueError(
                    f"{name}: `tokens` of dialogue {dialogue} has token {int(tokens[place])}, but the target's "
                    f"`vocab_size` is {vocab_size}: give token files that were made with this target's tokenizer."
                )

    @cached_property
    def sha256(self) -> str:
        """The sha256 of the tokens, in hexadecimal."""
        return hashlib.sha256(self.tokens.contiguous().view(torch.uint8).numpy().data).hexdigest()

    @property
    def sources(self) -> list[str]:
        """The sources of the dialogues: data sets of the Hub, names of files."""
        recorded = self.metadata.get("data", [])
        return [recorded] if isinstance(recorded, str) else list(recorded)

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[torch.Tensor],
        prompt_lengths: Sequence[int],
        temperatures: Sequence[float],
        vocab_size: int,
        metadata: dict[str, Any] | None = None,
    ) -> TokenFile:
        """
        Args:
            samples (sequence of `torch.Tensor` of shape `(length,)`):
                Tokens of each dialogue, prompt first.
            prompt_lengths, temperatures (sequences of the same length):
                As in [`TokenFile`].
            vocab_size (`int`):
                Decides the width of a token: two bytes if they can hold every id.
        """
        dtype = torch.uint16 if vocab_size <= 1 << 16 else torch.int32
        lengths = torch.tensor([0] + [len(sample) for sample in samples], dtype=torch.int64)
        return cls(
            tokens=torch.cat([torch.empty(0, dtype=dtype)] + [sample.to(dtype) for sample in samples]),
            offsets=lengths.cumsum(0),
            prompt_lengths=torch.tensor(prompt_lengths, dtype=torch.int32),
            temperatures=torch.tensor(temperatures, dtype=torch.float32),
            metadata=metadata or {},
        )

    @classmethod
    def concatenate(cls, files: Sequence[TokenFile]) -> TokenFile:
        """
        Joins the dialogues of several files. Of the metadata, all sources are kept, and the values that are equal in
        all files.

        Raises:
            ValueError: there are no files, or they record different targets.
        """
        if not files:
            raise ValueError("`files` is empty: give at least one token file.")
        fingerprints = {str(f.metadata["target_fingerprint"]) for f in files if f.metadata.get("target_fingerprint")}
        if len(fingerprints) > 1:
            raise ValueError(
                f"`target_fingerprint` differs between the files ({short(sorted(fingerprints))}): they were made "
                "with different targets; train on one target's files only."
            )
        # `torch.cat` does not promote uint16.
        dtype = torch.uint16 if all(file.tokens.dtype == torch.uint16 for file in files) else torch.int32
        lengths = torch.cat([torch.zeros(1, dtype=torch.int64)] + [file.offsets.diff() for file in files])
        first, others = files[0].metadata, [file.metadata for file in files[1:]]
        metadata = {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}
        if sources := list(dict.fromkeys(source for file in files for source in file.sources)):
            metadata["data"] = sources
        return cls(
            tokens=torch.cat([file.tokens.to(dtype) for file in files]),
            offsets=lengths.cumsum(0),
            prompt_lengths=torch.cat([file.prompt_lengths for file in files]),
            temperatures=torch.cat([file.temperatures for file in files]),
            metadata=metadata,
        )

    @classmethod
    def load(cls, path: str | Path) -> TokenFile:
        """
        Maps a token file into memory; tokens are read from disk when they are needed.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a token file, or not a consistent one.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no token file {path}: make one with `hf-falcon prepare`.")
        _check_header_size(path)
        try:
            with safe_open(path, framework="pt") as file:
                _check_header(file, path)
                tensors = {name: file.get_tensor(name) for name in _DTYPES}
                metadata = (file.metadata() or {}).get(_METADATA_KEY, "{}")
        except SafetensorError as error:
            raise ValueError(
                f"{path} is not a safetensors file of tokens ({error}): make it again with `hf-falcon prepare`."
            ) from error
        try:
            found = cls(**tensors, metadata=_read_metadata(metadata))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if len(found) == 0:
            raise ValueError(f"{path} has no dialogues: make it again with `hf-falcon prepare`.")
        return found

    def save(self, path: str | Path) -> None:
        """
        Writes the file. If the process is interrupted, `path` is unchanged or complete. Equal contents give equal
        bytes.
        """
        metadata = json.dumps({"format_version": FORMAT_VERSION, **self.metadata}, sort_keys=True)
        tensors = {name: getattr(self, name).contiguous() for name in _DTYPES}
        write_atomically(path, save(tensors, {_METADATA_KEY: metadata}))


def chat_template_sha256(template: str | dict[str, str] | None) -> str | None:
    """
    The sha256 of a tokenizer's `chat_template`, which token files and the provenance of drafters record; `None`
    without a template, where prompts are plain text.
    """
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: str | Path, data: bytes) -> None:
    """Writes another file, forces it to disk, and renames it: a reader never sees an incomplete file."""
    temporary = Path(f"{path}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        # The disk is full.
        temporary.unlink(missing_ok=True)
        raise


def _check_header_size(path: str | Path) -> None:
    with Path(path).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > _LARGEST_HEADER:
        raise ValueError(
            f"{path} is not a safetensors file of tokens: its header has {size} bytes, more than {_LARGEST_HEADER}. "
            "Make it again with `hf-falcon prepare`."
        )


def _check_header(file: Any, path: str | Path) -> None:
    """Checks names, dtypes and shapes before a tensor is read."""
    missing = sorted(set(_DTYPES) - set(file.keys()))
    if missing:
        raise ValueError(f"{path} has no tensors {', '.join(missing)}: a token file holds {', '.join(_DTYPES)}.")
    for name, dtypes in _DTYPES.items():
        stored = file.get_slice(name)
        dtype, shape = _STORED_DTYPES.get(stored.get_dtype(), stored.get_dtype()), stored.get_shape()
        if len(shape) != 1 or dtype not in dtypes:
            raise ValueError(
                f"{path}: `{name}` has dtype {dtype} and shape {tuple(shape)}: it must be one row of "
                f"{' or '.join(str(known) for known in dtypes)}."
            )


def _read_metadata(text: str) -> dict[str, Any]:
    try:
        metadata = parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"`{_METADATA_KEY}` of its metadata is refused: {error}. Make the file again with `hf-falcon prepare`."
        ) from error
    if not isinstance(metadata, dict):
        raise ValueError(f"`{_METADATA_KEY}` of its metadata is {short(metadata)}: it must be an object.")
    version = metadata.get("format_version", FORMAT_VERSION)
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"`format_version` is {short(version)}, this hf-falcon reads {FORMAT_VERSION}: upgrade it, or make the "
            "file again with `hf-falcon prepare`."
        )
    for name, (kinds, words) in _METADATA_KINDS.items():
        value = metadata.get(name)
        items = value if isinstance(value, list) else []
        if name in metadata and not (isinstance(value, kinds) and all(isinstance(item, str) for item in items)):
            raise ValueError(f"`{name}` of its metadata is {short(value)}: it must be {words}.")
    return metadata


def _refuse(wrong: torch.Tensor, name: str, values: torch.Tensor, rule: str) -> None:
    if wrong.any():
        index = int(wrong.nonzero()[0])
        raise ValueError(f"`{name}` of dialogue {index} is {values[index].item():g}: {rule}.")
