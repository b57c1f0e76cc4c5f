# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The target's features in training: computed on the fly, or stored on disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..core.checkpoint_files import weights_fingerprint
from ..core.target_parts import FeatureTap
from .token_file import TokenFile

_SHARD_TOKENS = 65536


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
    target: PreTrainedModel, data: TokenFile, layers: Sequence[int] = (), samples: int = 64
) -> list[tuple[Tensor, Tensor]]:
    """Tokens and features of samples spread over the data; features as [`target_features`], in float32 on the CPU."""
    found = []
    for index in range(0, len(data), max(1, len(data) // samples)):
        token_ids = data.sample(index)[0]
        row = token_ids[None].to(target.device)
        features = target_features(target, row, torch.ones_like(row, dtype=torch.bool), layers)
        found.append((token_ids, features[0].float().cpu()))
    return found


def feature_statistics(target: PreTrainedModel, data: TokenFile) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each of the target's features, of shape `(hidden_size,)`, over some samples."""
    features = torch.cat([features for _, features in some_features(target, data)])
    return features.mean(dim=0), features.std(dim=0).clamp_min(1e-4)


class StoredFeatures:
    """
    Features of a token file on disk, as bfloat16 safetensors shards. Each shard is complete or absent.

    Args:
        folder (`str` or `Path`): the folder of the shards, which may be empty.
        target ([`PreTrainedModel`]): the target, which computes missing shards.
        data ([`TokenFile`]): the token file.
        layers (sequence of `int`, *optional*): the drafter's `feature_layers`.

    Raises:
        `OSError`: if the disk has not enough space.
        `ValueError`: if the folder holds the features of other tokens or of another target.
    """

    def __init__(self, folder: str | Path, target: PreTrainedModel, data: TokenFile, layers: Sequence[int] = ()):
        self._layers = layers
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._shards = _plan_shards(data)
        self._shard_of = {index: s for s, shard in enumerate(self._shards) for index in shard}
        identity = _identity(target, data, layers)
        manifest = self._folder / "features.json"
        if not manifest.exists():
            manifest.write_text(json.dumps(identity))
        elif json.loads(manifest.read_text()) != identity:
            raise ValueError(
                f"`{folder}` holds features of {manifest.read_text()}, but this run needs {json.dumps(identity)}: "
                "give another folder, or delete this one."
            )
        missing = [s for s in range(len(self._shards)) if not self._path(s).exists()]
        self._check_room(missing, data, target.config.get_text_config().hidden_size)
        for shard in tqdm(missing, desc="features", unit="shard", disable=not missing):
            self._compute(shard, target, data)
        self._open = [safe_open(self._path(s), framework="pt") for s in range(len(self._shards))]

    def sample(self, index: int) -> Tensor:
        """Features of sample `index`, of shape `(length, (1 + layers) * hidden_size)`, in bfloat16."""
        return self._open[self._shard_of[index]].get_tensor(str(index))

    def _path(self, shard: int) -> Path:
        return self._folder / f"features-{shard:05d}.safetensors"

    def _check_room(self, missing: list[int], data: TokenFile, hidden_size: int) -> None:
        tokens = sum(len(data.sample(index)[0]) for s in missing for index in self._shards[s])
        needed, free = 2 * (1 + len(self._layers)) * hidden_size * tokens, shutil.disk_usage(self._folder).free
        if missing:
            print(f"features of {tokens:,} tokens: {needed / 1e9:.2f} GB on disk ({free / 1e9:.0f} GB free)")
        if needed > 0.9 * free:
            raise OSError(
                f"`{self._folder}` has {free / 1e9:.1f} GB free and the features need {needed / 1e9:.1f} GB: free "
                "some space, or leave out `features_dir` to compute features on the fly."
            )

    def _compute(self, shard: int, target: PreTrainedModel, data: TokenFile) -> None:
        tensors: dict[str, Tensor] = {}
        # Sorted by length, so that a batch has hardly any padding.
        order = sorted(self._shards[shard], key=lambda index: len(data.sample(index)[0]))
        for start in range(0, len(order), 16):
            samples = [data.sample(index)[0] for index in order[start : start + 16]]
            token_ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True).to(target.device)
            lengths = torch.tensor([len(sample) for sample in samples], device=target.device)
            valid = torch.arange(token_ids.shape[1], device=target.device)[None] < lengths[:, None]
            features = target_features(target, token_ids, valid, self._layers).to("cpu", torch.bfloat16)
            for index, row, length in zip(order[start : start + 16], features, lengths.tolist(), strict=True):
                tensors[str(index)] = row[:length].clone()
        temporary = self._path(shard).with_suffix(".tmp")
        save_file(tensors, temporary)
        os.replace(temporary, self._path(shard))


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


def _identity(target: PreTrainedModel, data: TokenFile, layers: Sequence[int]) -> dict[str, Any]:
    digest = hashlib.sha256(data.tokens.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    identity = {"target": str(weights_fingerprint(target)), "tokens": digest, "samples": len(data)}
    return {**identity, "layers": list(layers)} if layers else identity
