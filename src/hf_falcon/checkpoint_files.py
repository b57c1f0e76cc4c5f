# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A checkpoint's weight files, looked at before any of their weights takes memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    find_adapter_config_file,
    is_peft_available,
)

Shapes = dict[str, tuple[int, ...]]


@contextmanager
def reading(name: str) -> Iterator[None]:
    """
    Makes whatever error a damaged file causes inside transformers one that names the file.

    Raises:
        `ValueError`: instead of any error but this and `OSError`.
    """
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(
            f"`{name}` cannot be read ({type(error).__name__}: {error}): download it again, or save the drafter again "
            "with `save_pretrained`."
        ) from error


def digests(folder: str | Path) -> dict[str, str]:
    """The sha256 of each weight file in a folder, by the file's name."""
    return {file.name: _sha256(file) for file in sorted(Path(folder).glob("*.safetensors"))}


def is_weight_file_name(name: Any) -> bool:
    """Whether this names a safetensors file that lies beside its config.json."""
    return isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\\0")


def weight_files(repository: str, variant: str | None = None, **loading: Any) -> list[Path]:
    """
    The files that hold a checkpoint's weights, downloaded where need be.

    Args:
        repository (`str`): a folder, or a repository of the Hub.
        variant (`str`, *optional*): as in `from_pretrained`.
        loading: arguments of [`~transformers.utils.cached_file`], such as `revision` and `token`.

    Raises:
        `OSError`: if there are none, or their index is not one.
    """
    single, index = (
        name if variant is None else f"{name[: -len(end)]}.{variant}{end}"
        for name, end in ((SAFE_WEIGHTS_NAME, ".safetensors"), (SAFE_WEIGHTS_INDEX_NAME, ".safetensors.index.json"))
    )
    found = _fetch(repository, single, loading)
    if found is not None:
        return [found]
    found = _fetch(repository, index, loading)
    if found is None:
        raise OSError(f"`{repository}` has no `{single}`: a drafter's weights are kept in safetensors files only.")
    paths = []
    for name in _shard_names(found):
        path = _fetch(repository, name, loading)
        if path is None:
            raise OSError(f"`{repository}` has no `{name}`, which its `{index}` names: download it again.")
        paths.append(path)
    return paths


def refuse_adapter(repository: str, adapter: str | None = None, **loading: Any) -> None:
    """
    Refuses a checkpoint with a PEFT adapter: where peft is installed, transformers loads the weights of whatever model
    the adapter names in place of those that were looked at, and the adapter's own, pickled or not, into them.

    Args:
        repository, loading: see [`weight_files`].
        adapter (`str`, *optional*): where `AutoModel` found an adapter already.

    Raises:
        `ValueError`: naming the file and where it is.
    """
    if adapter is None and is_peft_available() and find_adapter_config_file(repository, **loading) is not None:
        adapter = repository
    if adapter is not None:
        raise ValueError(
            f"`{adapter}` has an `{ADAPTER_CONFIG_NAME}`: a drafter takes no adapter, which would change what weights "
            "are loaded. Remove that file, or give the folder or the repository of a Falcon drafter."
        )


def check_digests(files: Iterable[Path], expected: Mapping[str, str]) -> None:
    """
    Refuses files that are not those that were saved.

    Raises:
        `OSError`: naming the file, and both digests.
    """
    for file in files:
        wanted = expected.get(file.name)
        found = wanted if wanted is None else _sha256(file)
        if found != wanted:
            raise OSError(
                f"The weight file `{file.name}` in {file.parent} is damaged or was changed: its sha256 is {found}, "
                f"but config.json says {wanted}. Download it again, or save the drafter again with `save_pretrained`."
            )


def stored_shapes(files: Iterable[Path]) -> Shapes:
    """
    The shape of every tensor in these files, read from their headers.

    Raises:
        `OSError`: naming a file that is no whole safetensors file.
    """
    shapes: Shapes = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        except SafetensorError as error:
            raise OSError(
                f"The weight file `{file.name}` in {file.parent} is not a whole safetensors file ({error}): download "
                "it again, or save the drafter again with `save_pretrained`."
            ) from error
    return shapes


def _fetch(repository: str, name: str, loading: Mapping[str, Any]) -> Path | None:
    try:
        found = cached_file(repository, name, _raise_exceptions_for_missing_entries=False, **loading)
    except OSError:
        raise
    except Exception as error:
        # A transfer that breaks off raises errors of whatever library the Hub's client uses for it.
        raise OSError(f"`{name}` of `{repository}` could not be downloaded ({error}): try again.") from error
    return None if found is None else Path(found)


def _shard_names(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names = set()
    if not names or not all(map(is_weight_file_name, names)):
        raise OSError(f"`{index.name}` in {index.parent} is no index of safetensors files: download it again.")
    return sorted(names)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        # `hashlib.file_digest` is newer than Python 3.10.
        digest = hashlib.sha256()
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
