# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The target's features in training: computed on the fly, or stored on disk."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..checkpoint_files import exact_fingerprint
from ..core.target_parts import FeatureTap
from ..json_files import read_own_object
from .token_file import TokenFile, write_atomically

logger = logging.getLogger(__name__)

_SHARD_TOKENS = 65536
# Tokens of a sample that statistics and a drafter's start read: their memory grows with all of them.
_LONGEST = 1024
_MANIFEST = "features.json"


@torch.no_grad()
def target_features(target: PreTrainedModel, token_ids: Tensor, valid: Tensor, layers: Sequence[int] = ()) -> Tensor:
    """
    The target's last hidden states, after its final norm, followed by the outputs of some of its layers.

    Args:
        target ([`PreTrainedModel`]): a causal language model.
        token_ids (`torch.LongTensor` of shape `(batch, length)`): right-padded sequences.
        valid (`torch.BoolTensor` of shape `(batch, length)`): `False` on padding.
        layers (sequence of `int`, *optional*): the drafter's `feature_layers`.

    Returns:
        `torch.Tensor` of shape `(batch, length, (1 + layers) * hidden_size)`, in the target's dtype.
    """
    with FeatureTap(target, layers) as tap:
        target.base_model(input_ids=token_ids, attention_mask=valid.long(), use_cache=False)
    return tap.take()


def some_features(
    target: PreTrainedModel,
    data: TokenFile,
    layers: Sequence[int] = (),
    samples: int = 64,
    stored: Features | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """
    Tokens and features of samples spread over the data; features as [`target_features`], in float32 on the CPU. They
    are read from `stored` where it has all the layers. Of a sample the first 1,024 tokens are read, without the last
    position.
    """
    found = []
    for index in range(0, len(data), max(1, len(data) // samples)):
        token_ids = data.sample(index)[0]
        if stored is not None and stored.has(layers):
            features = stored.sample(index, layers)
        else:
            row = token_ids[None, :_LONGEST].to(target.device)
            features = target_features(target, row, torch.ones_like(row, dtype=torch.bool), layers)[0]
        # The target never read the last token, if the features were kept as it wrote.
        token_ids = token_ids[:_LONGEST]
        found.append((token_ids[:-1], features[: len(token_ids) - 1].float().cpu()))
    return found


def feature_statistics(
    target: PreTrainedModel, data: TokenFile, stored: Features | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each of the target's features, of shape `(hidden_size,)`, over some samples."""
    features = torch.cat([features for _, features in some_features(target, data, stored=stored)])
    return features.mean(dim=0), features.std(dim=0).clamp_min(1e-4)


@torch.no_grad()
def set_feature_statistics(drafter: Any, mean: Tensor, std: Tensor) -> None:
    """Gives a drafter mean and standard deviation of its target's features, both of shape `(hidden_size,)`."""
    drafter.feature_mean.copy_(mean)
    drafter.feature_std.copy_(std)


class StoredFeatures:
    """
    Features of a token file on disk, as bfloat16 safetensors files, which are read sample by sample. Each file is
    complete or absent: `hf-falcon prepare --keep_features` writes one for each of its batches, this class the rest.

    Args:
        folder (`str` or `Path`): the folder of the files, which may be empty.
        target ([`PreTrainedModel`]): the target, which computes what is missing.
        data ([`TokenFile`]): the token file.
        layers (sequence of `int`, *optional*): the drafter's `feature_layers`. The files may have more layers.

    Raises:
        `OSError`: if the disk has not enough space.
        `ValueError`: if the folder holds the features of other tokens or of another target, or lacks a layer; or if a
            file is damaged.
    """

    def __init__(self, folder: str | Path, target: PreTrainedModel, data: TokenFile, layers: Sequence[int] = ()):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._width = target.config.get_text_config(decoder=True).hidden_size
        self._wanted = tuple(layers)
        needed = identity(target, data, layers)
        manifest = self._folder / _MANIFEST
        if not manifest.exists():
            record_features(self._folder, needed)
        found = read_own_object(manifest)
        self._layers = tuple(found.get("layers", ()))
        if not self.has(layers) or {**found, "layers": None} != {**needed, "layers": None}:
            raise ValueError(
                f"`{folder}` holds features of {manifest.read_text()}, but this run needs {json.dumps(needed)}: "
                "give another folder, or delete this one."
            )
        self._files: dict[int, Any] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            self._add(path, data)
        missing = [
            (number, absent)
            for number, shard in enumerate(_plan_shards(data))
            if (absent := [index for index in shard if index not in self._files])
        ]
        self._check_room([index for _, absent in missing for index in absent], data)
        for number, absent in tqdm(missing, desc="features", unit="shard", disable=not missing):
            self._compute(number, absent, target, data)

    def has(self, layers: Sequence[int]) -> bool:
        """Whether the outputs of all these layers are stored."""
        return set(layers) <= set(self._layers)

    def sample(self, index: int, layers: Sequence[int] | None = None) -> Tensor:
        """
        Features of sample `index`, of shape `(length, (1 + layers) * hidden_size)`, in bfloat16; by default with the
        layers that the drafter reads. The last row may be zero.
        """
        rows = self._files[index].get_tensor(str(index))
        return _of_layers(rows, self._width, self._layers, self._wanted if layers is None else layers)

    def _add(self, path: Path, data: TokenFile) -> None:
        size = (1 + len(self._layers)) * self._width
        try:
            file = safe_open(path, framework="pt")
            for name in file.keys():
                index = int(name)
                shape = (int(data.offsets[index + 1] - data.offsets[index]), size)
                if tuple(file.get_slice(name).get_shape()) != shape:
                    raise ValueError(f"sample {name} is not of shape {shape}")
                self._files[index] = file
        except (SafetensorError, ValueError, IndexError) as error:
            raise ValueError(
                f"`{path}` holds no features of these tokens ({error}): delete it, and they are computed again."
            ) from error

    def _check_room(self, samples: list[int], data: TokenFile) -> None:
        tokens = sum(len(data.sample(index)[0]) for index in samples)
        needed, free = 2 * (1 + len(self._layers)) * self._width * tokens, shutil.disk_usage(self._folder).free
        if samples:
            print(f"features of {tokens:,} tokens: {needed / 1e9:.2f} GB on disk ({free / 1e9:.0f} GB free)")
        if needed > 0.9 * free:
            raise OSError(
                f"`{self._folder}` has {free / 1e9:.1f} GB free and the features need {needed / 1e9:.1f} GB: free "
                "some space, or leave out `features_dir` to compute features on the fly."
            )

    def _compute(self, number: int, samples: list[int], target: PreTrainedModel, data: TokenFile) -> None:
        tensors: dict[int, Tensor] = {}
        # Sorted by length, so that a batch has hardly any padding.
        order = sorted(samples, key=lambda index: len(data.sample(index)[0]))
        for start in range(0, len(order), 16):
            rows = [data.sample(index)[0] for index in order[start : start + 16]]
            token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(target.device)
            lengths = torch.tensor([len(row) for row in rows], device=target.device)
            valid = torch.arange(token_ids.shape[1], device=target.device)[None] < lengths[:, None]
            features = target_features(target, token_ids, valid, self._layers).to("cpu", torch.bfloat16)
            for index, row, length in zip(order[start : start + 16], features, lengths.tolist(), strict=True):
                tensors[index] = row[:length].clone()
        path = self._folder / f"features-{number:05d}.safetensors"
        save_features(path, tensors)
        self._add(path, data)


class JoinedFeatures:
    """
    The stored features of several token files, as of one. See [`StoredFeatures`] for the methods.

    Args:
        parts (sequence of pairs of [`StoredFeatures`] and `int`): of each file its features and number of samples.
    """

    def __init__(self, parts: Sequence[tuple[StoredFeatures, int]]):
        self._parts = [part for part, _ in parts]
        self._places = [(part, index) for part, count in parts for index in range(count)]

    def has(self, layers: Sequence[int]) -> bool:
        return all(part.has(layers) for part in self._parts)

    def sample(self, index: int, layers: Sequence[int] | None = None) -> Tensor:
        part, place = self._places[index]
        return part.sample(place, layers)


class MemoryFeatures:
    """
    The features of samples in memory. See [`StoredFeatures`] for the methods.

    Args:
        rows (list of `torch.Tensor` of shape `(length, (1 + layers) * hidden_size)`): of each sample.
        layers (sequence of `int`): the layers whose outputs follow the features.
        width (`int`): the hidden size.
    """

    def __init__(self, rows: list[Tensor], layers: Sequence[int], width: int):
        self._rows, self._layers, self._width = rows, tuple(layers), width

    def has(self, layers: Sequence[int]) -> bool:
        return set(layers) <= set(self._layers)

    def sample(self, index: int, layers: Sequence[int] | None = None) -> Tensor:
        return _of_layers(self._rows[index], self._width, self._layers, self._layers if layers is None else layers)


def _of_layers(rows: Tensor, width: int, stored: tuple[int, ...], layers: Sequence[int]) -> Tensor:
    """The features of a sample with the outputs of some of the stored layers."""
    if tuple(layers) == stored:
        return rows
    parts = rows.split(width, dim=-1)
    return torch.cat([parts[0], *(parts[1 + stored.index(layer)] for layer in layers)], dim=-1)


Features: TypeAlias = StoredFeatures | JoinedFeatures | MemoryFeatures


def kept_folder(token_file: str | Path) -> Path:
    """The folder of the features that `hf-falcon prepare --keep_features` keeps beside a token file."""
    return Path(f"{token_file}.features")


def kept_file(token_file: str | Path, batch: int) -> Path:
    """The file of the features of a batch."""
    return kept_folder(token_file) / f"batch-{batch:05d}.safetensors"


def without_kept(paths: Sequence[str]) -> list[str]:
    """The token files that have no kept features."""
    return [path for path in paths if not (kept_folder(path) / _MANIFEST).exists()]


def kept_features(
    paths: Sequence[str], files: Sequence[TokenFile], target: PreTrainedModel, layers: Sequence[int] = ()
) -> JoinedFeatures | None:
    """
    The features that were kept beside token files; `None` if a file has none.

    Args:
        paths (sequence of `str`), files (sequence of [`TokenFile`]): the token files.
        target ([`PreTrainedModel`]), layers (sequence of `int`, *optional*): see [`StoredFeatures`].

    Raises:
        As [`StoredFeatures`].
    """
    if lacking := without_kept(paths):
        if len(lacking) < len(paths):
            logger.warning(
                f"Not all token files have kept features ({', '.join(lacking)} has none), so all features are "
                "computed: make it again with `hf-falcon prepare --keep_features`, or give `features_dir`."
            )
        return None
    stored = [StoredFeatures(kept_folder(path), target, file, layers) for path, file in zip(paths, files, strict=True)]
    return JoinedFeatures([(each, len(file)) for each, file in zip(stored, files, strict=True)])


def save_features(path: Path, samples: dict[int, Tensor]) -> None:
    """Writes the features of samples, by their index in the token file; the file is complete or absent."""
    temporary = path.with_suffix(".tmp")
    try:
        save_file({str(index): rows.contiguous() for index, rows in samples.items()}, temporary)
        os.replace(temporary, path)
    finally:
        # The disk is full.
        temporary.unlink(missing_ok=True)


def record_features(folder: Path, found: dict[str, Any]) -> None:
    """Writes what a folder's features are of ([`identity`])."""
    write_atomically(folder / _MANIFEST, json.dumps(found).encode())


def _plan_shards(data: TokenFile) -> list[list[int]]:
    """Samples of each shard, in order."""
    shards: list[list[int]] = [[]]
    rows = 0
    for index in range(len(data)):
        if rows > _SHARD_TOKENS:
            shards.append([])
            rows = 0
        shards[-1].append(index)
        rows += len(data.sample(index)[0])
    return shards


def identity(target: PreTrainedModel, data: TokenFile, layers: Sequence[int]) -> dict[str, Any]:
    """What features are of, as JSON values."""
    found = {"target": str(exact_fingerprint(target)), "tokens": data.sha256[:16], "samples": len(data)}
    return {**found, "layers": list(layers)} if layers else found
