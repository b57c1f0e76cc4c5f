# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Reads checkpoints of other methods: the fields of `config.json`, weights from safetensors files or from one
pickled file, and drafting options.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import WEIGHTS_NAME, cached_file

from ..checkpoint_files import reading, refuse_other_tensors
from ..core.candidate_generator import limited_options
from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.draft_options import DraftOptions
from ..core.drafter import DraftModel
from .files import LOADING, check_digests, read_object, refuse_adapter, weight_files
from .stored_tensors import stored_tensors

# Copies of the target's own weights, and tables that follow from the configuration.
_NOT_OF_NETWORK = (
    "verifier_lm_head.weight",
    "verifier_norm.weight",
    "rotary_emb.inv_freq",
    "rotary_emb.original_inv_freq",
)
# Of the parameters: networks do not compute in others.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def read_fields(repository: str, **loading: Any) -> dict[str, Any]:
    """
    The fields of a `config.json`.

    Args:
        repository (`str`): a folder, or a repository of the Hub.
        loading: `cache_dir`, `force_download`, `local_files_only`, `proxies`, `revision`, `subfolder` and `token`, as
            in [`~transformers.PreTrainedModel.from_pretrained`].

    Raises:
        `OSError`: if there is none, or it cannot be downloaded.
        `ValueError`: if it is damaged.
        `TypeError`: for another argument.
    """
    unknown = loading.keys() - set(LOADING)
    if unknown:
        raise TypeError(f"`from_pretrained` got {sorted(unknown)}: it takes `dtype`, {', '.join(LOADING)}.")
    return FalconDraftConfig.get_config_dict(repository, **loading)[0]


def read_weights(repository: str, digests: Mapping[str, str] | None = None, **loading: Any) -> dict[str, Tensor]:
    """
    The weights of a checkpoint, on the CPU: from its safetensors files, or, if it has none, from `pytorch_model.bin`,
    of which only tensors are read.

    Args:
        repository (`str`): a folder, or a repository of the Hub.
        digests (mapping of `str` to `str`, *optional*): sha256 of each file; see [`check_digests`].
        loading: arguments of [`~transformers.utils.cached_file`], such as `revision` and `token`.

    Raises:
        `OSError`: if there are no weights, or a file is damaged.
        `ValueError`: if `pytorch_model.bin` holds more than tensors.
    """
    refuse_adapter(repository, **loading)
    try:
        files = weight_files(repository, **loading)
    except OSError as error:
        pickled = cached_file(repository, WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False, **loading)
        if pickled is None:
            raise error
        check_digests([Path(pickled)], digests or {})
        return _read_pickled(Path(pickled))
    check_digests(files, digests or {})
    stored_tensors(files)
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= _read_safetensors(file)
    return weights


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise OSError(
            f"The weight file `{file.name}` in {file.parent} is not a whole safetensors file of torch's dtypes "
            f"({reason}): download it again."
        ) from error


def _read_pickled(file: Path) -> dict[str, Tensor]:
    remedy = "Convert it to safetensors where you trust it."
    try:
        _refuse_compression(file)
        weights = torch.load(file, map_location="cpu", weights_only=True)
    # Any file may have this name, and `torch.load` raises an error of any kind for it.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"`{file.name}` in {file.parent} cannot be read with `weights_only=True` ({reason}), and other code in it "
            f"is not run. {remedy}"
        ) from error
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(each, Tensor) for name, each in weights.items()
    ):
        raise ValueError(f"`{file.name}` in {file.parent} holds more than tensors: it is no checkpoint. {remedy}")
    # A pickled tensor can repeat a few values without an end, by its strides, or have no values at all.
    has_values = all(each.layout == torch.strided and not each.is_meta for each in weights.values())
    if not has_values or sum(each.nbytes for each in weights.values()) > 2 * file.stat().st_size:
        raise ValueError(f"`{file.name}` in {file.parent} has tensors larger than the file. {remedy}")
    return weights


def _refuse_compression(file: Path) -> None:
    """`torch.save` does not compress. A compressed file may be a thousand times as large in memory."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as opened:
            if any(each.compress_type != zipfile.ZIP_STORED for each in opened.infolist()):
                raise ValueError("it is compressed")


def load_weights(
    drafter: DraftModel, repository: str, weights: Mapping[str, Tensor], dtype: str | torch.dtype | None = None
) -> None:
    """
    Gives a drafter on the meta device its weights.

    Args:
        drafter ([`DraftModel`]): the drafter. Its buffers keep their own dtypes.
        repository (`str`): the checkpoint's name, for errors.
        weights (mapping of `str` to `torch.Tensor`): the weights.
        dtype (`str` or `torch.dtype`, *optional*): dtype of the parameters; by default, or for "auto", as stored.

    Raises:
        `ValueError`: if weights are missing, unexpected, of another shape, or quantised; it names them.
    """
    wanted = drafter.state_dict()
    refuse_other_tensors(repository, weights, wanted)
    parameters = dict(drafter.named_parameters())
    strange = {name: weights[name].dtype for name in parameters if weights[name].dtype not in _DTYPES}
    if strange:
        name, found = next(iter(strange.items()))
        raise ValueError(
            f"`{name}` of the checkpoint `{repository}` is {found}: quantised drafters cannot be read, give one in "
            "float32, bfloat16 or float16."
        )
    of_parameters = _dtype(dtype) or next(weights[name].dtype for name in parameters)
    drafter.load_state_dict(
        {
            name: weights[name].to(of_parameters if name in parameters else wanted[name].dtype).contiguous()
            for name in wanted
        },
        assign=True,
    )
    # Weights on the meta device take the other attributes of the tensors that they get.
    drafter.requires_grad_()
    drafter.name_or_path = drafter.config.name_or_path = repository


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found not in _DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}: give one of float32, bfloat16, float16 and float64.")
    return found


def read_options(drafter: DraftModel, repository: str, **loading: Any) -> None:
    """
    Takes the drafting options of the checkpoint's `generation_config.json`, if it has one.

    Args:
        drafter ([`DraftModel`]): the drafter.
        repository, loading: see [`read_fields`].

    Raises:
        `ValueError`: for an option out of range.
    """
    with reading("generation_config.json"):
        fields = read_object(repository, "generation_config.json", **loading)
        if fields is not None:
            found = GenerationConfig.from_dict(fields)
            limited_options(DraftOptions.from_generation_config(found), drafter, drafter)
            drafter.generation_config = found


def network_weights(repository: str, weights: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """
    The weights of a drafter's network, with the tables of its vocabulary.

    Args:
        repository (`str`): the checkpoint's name, for errors.
        weights (`dict`): the checkpoint's tensors.
        config ([`SpeculatorsDraftConfig`]): the drafter's configuration.

    Raises:
        `ValueError`: see [`check_vocabulary`].
    """
    weights = {name: weight for name, weight in weights.items() if name not in _NOT_OF_NETWORK}
    if config.draft_vocab_size == config.vocab_size:
        # A whole vocabulary needs no tables.
        return {name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")}
    check_vocabulary(repository, weights, config.vocab_size)
    return weights


def check_vocabulary(repository: str, weights: dict[str, Tensor], vocab_size: int) -> None:
    """
    Checks the tables of a draft vocabulary, and brings them into the dtypes that a drafter has.

    Args:
        repository (`str`): the checkpoint's name, for errors.
        weights (`dict`):
            The checkpoint's tensors. Of these, token i of the draft vocabulary is token `i + d2t[i]` of the target's;
            `t2d` of shape `(vocab_size,)` marks the target's tokens, and is added where it is missing.
        vocab_size (`int`): tokens of the target.

    Raises:
        `ValueError`: if a token is not in the target's vocabulary, or the tables differ.
    """
    if "d2t" not in weights:
        return
    d2t = weights["d2t"]
    if d2t.dim() != 1 or d2t.is_floating_point() or d2t.is_complex():
        raise ValueError(
            f"`d2t` of `{repository}` has shape {tuple(d2t.shape)} and dtype {d2t.dtype}: a drafter has one integer "
            "for each token of its vocabulary."
        )
    weights["d2t"] = d2t = d2t.long()
    ids = torch.arange(len(d2t)) + d2t
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(
            f"`d2t` of `{repository}` names tokens twice, or outside the target's vocabulary of {vocab_size}: its "
            "weights do not belong to its config.json, download it again."
        )
    marked = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    weights["t2d"] = weights.get("t2d", marked).bool()
    if not torch.equal(weights["t2d"], marked):
        raise ValueError(
            f"`d2t` and `t2d` of `{repository}` name different tokens: its weights are damaged, download it again."
        )
