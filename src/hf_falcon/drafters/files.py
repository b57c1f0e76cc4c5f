# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The files of a checkpoint. Strangers write them, so they are checked before their content takes time or memory."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    extract_commit_hash,
    find_adapter_config_file,
    is_peft_available,
)

from ..json_files import read_json
from .stored_tensors import LARGEST_CONFIG

# Tensors in other dtypes are quantised, in a way that a drafter does not know.
FLOATING_DTYPES = ("F64", "F32", "F16", "BF16")

_INDEX_DTYPES = (None, "float64", "float32", "float16", "bfloat16")

# Arguments of `from_pretrained` that say where files are.
LOADING = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def digests(folder: str | Path) -> dict[str, str]:
    """The sha256 of each weight file in a folder, by the file's name."""
    return {file.name: _sha256(file) for file in sorted(Path(folder).glob("*.safetensors"))}


def is_weight_file_name(name: Any) -> bool:
    """Whether `name` is the name of a safetensors file in the folder of config.json."""
    return (
        isinstance(name, str) and name.endswith(".safetensors") and name.isprintable() and not set(name) & set("/\\")
    )


def are_digests(value: Any) -> bool:
    """Whether `value` is a `weights_sha256` of config.json: digests of weight files, by their names."""
    return isinstance(value, dict) and all(
        is_weight_file_name(name) and isinstance(digest, str) for name, digest in value.items()
    )


def pinned(repository: str, **loading: Any) -> dict[str, Any]:
    """
    `loading` with a commit in place of a branch: all files that are then read are of one state of the repository.

    Args:
        repository (`str`): a folder, or a repository of the Hub. A folder has no commits, and gets `loading` itself.
        loading: arguments of `from_pretrained`.
    """
    given = {name: loading[name] for name in LOADING if loading.get(name) is not None}
    file = None if Path(repository).exists() else _fetch(repository, CONFIG_NAME, given)
    commit = None if file is None else extract_commit_hash(str(file), None)
    return loading if commit is None else {**loading, "revision": commit}


def read_object(repository: str, name: str, **loading: Any) -> dict[str, Any] | None:
    """
    The fields of a JSON file of a checkpoint, or `None` without the file.

    Args:
        repository, loading: see [`weight_files`].
        name (`str`): the file's name, such as "config.json".

    Raises:
        `ValueError`: if it cannot be read, or is no object; it names the file.
        `OSError`: if it cannot be downloaded.
    """
    # transformers also takes the configuration file itself.
    file = Path(repository) if Path(repository).is_file() else _fetch(repository, name, loading)
    if file is None:
        return None
    fields = read_json(file, max_bytes=LARGEST_CONFIG)
    if not isinstance(fields, dict):
        raise ValueError(f"`{file.name}` in {file.parent} is {fields!r:.80}, not an object: download it again.")
    return fields


def weight_files(repository: str, variant: str | None = None, **loading: Any) -> list[Path]:
    """
    The files with a checkpoint's weights. They are downloaded if they are on the Hub only.

    Args:
        repository (`str`): a folder, or a repository of the Hub.
        variant (`str`, *optional*): as in `from_pretrained`.
        loading: arguments of [`~transformers.utils.cached_file`], such as `revision` and `token`.

    Raises:
        `OSError`: if there are none, or a file of their index is missing.
        `ValueError`: if their index is damaged.
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
        _refuse_if_unreachable(repository, single, loading)
        raise OSError(f"`{repository}` has no `{single}`: a drafter's weights are kept in safetensors files only.")
    paths = []
    for name in _shard_names(found):
        path = _fetch(repository, name, loading)
        if path is None:
            _refuse_if_unreachable(repository, name, loading)
            raise OSError(f"`{repository}` has no `{name}`, which its `{index}` names: download it again.")
        paths.append(path)
    return paths


def refuse_adapter(repository: str, adapter: str | None = None, **loading: Any) -> None:
    """
    Refuses a checkpoint with a PEFT adapter. If peft is installed, transformers loads the model that the adapter names
    instead of the weights that were checked, and then the adapter's own weights, which may be pickled.

    Args:
        repository, loading: see [`weight_files`].
        adapter (`str`, *optional*): the place where `AutoModel` already found an adapter.

    Raises:
        `ValueError`: if there is an adapter; it names the file and its place.
    """
    if adapter is None and is_peft_available() and find_adapter_config_file(repository, **loading) is not None:
        adapter = repository
    if adapter is not None:
        raise ValueError(
            f"`{adapter}` has an `{ADAPTER_CONFIG_NAME}`: a drafter takes no adapter, because it changes which "
            "weights are loaded. Remove that file, or give the folder or the repository of a drafter without one (a "
            "language model with its adapter merged)."
        )


def check_digests(files: Iterable[Path], expected: Mapping[str, str]) -> None:
    """
    Checks that weight files are the files that were saved.

    Args:
        files (iterable of `Path`): the files that are about to be read.
        expected (mapping of `str` to `str`): the sha256 of each file, by its name, from `config.json`. It is empty for
            a drafter that its own code from the Hub saved; its files are not checked.

    Raises:
        `OSError`: if a file has another digest, or none; it names the file.
        `ValueError`: if `expected` is none of these.
    """
    if not are_digests(expected):
        raise ValueError(f"`weights_sha256` is {expected!r:.200}: save the drafter again with `save_pretrained`.")
    if not expected:
        return
    for file in files:
        wanted = expected.get(file.name)
        if wanted is None:
            raise OSError(
                f"The weight file `{file.name}` in {file.parent} is not in the list of config.json (`weights_sha256`: "
                f"{', '.join(sorted(expected))}), so it may belong to another drafter. Load one of these files, or "
                "save the drafter again with `save_pretrained`."
            )
        found = _sha256(file)
        if found != wanted:
            raise OSError(
                f"The weight file `{file.name}` in {file.parent} is damaged or was changed: its sha256 is {found}, "
                f"but config.json says {wanted}. Download it again, or save the drafter again with `save_pretrained`."
            )


def _fetch(repository: str, name: str, loading: Mapping[str, Any]) -> Path | None:
    try:
        found = cached_file(repository, name, _raise_exceptions_for_missing_entries=False, **loading)
    except OSError as error:
        if not isinstance(error.__cause__, HFValidationError):
            raise
        raise OSError(
            f"`{repository}` is no folder that is there, and no valid name of a repository: give the folder of a "
            "drafter, or `user/name`."
        ) from error
    except Exception as error:
        # An interrupted download raises an error of the Hub client's own network library.
        raise OSError(f"`{name}` of `{repository}` could not be downloaded ({error}): try again.") from error
    return None if found is None else Path(found)


def _refuse_if_unreachable(repository: str, name: str, loading: Mapping[str, Any]) -> None:
    """Of a file that is not in the Hub's cache, which may be in the repository."""
    try:
        cached_file(repository, name, **loading)
    except OSError as error:
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            raise OSError(
                f"`{name}` of `{repository}` is not in the Hub's cache, and the Hub is not reached or not asked: "
                "download it without `HF_HUB_OFFLINE` and `local_files_only`."
            ) from error


def _shard_names(index: Path) -> list[str]:
    fields = read_json(index)
    fields = fields if isinstance(fields, dict) else {}
    places, metadata = fields.get("weight_map"), fields.get("metadata")
    # transformers reads both, and the dtype.
    is_index = isinstance(places, dict) and isinstance(metadata, dict) and metadata.get("dtype") in _INDEX_DTYPES
    if not is_index or not places or not all(map(is_weight_file_name, places.values())):
        raise ValueError(
            f"`{index.name}` in {index.parent} is no index of safetensors files: it needs a `weight_map` with names "
            "of files, and `metadata`. Download it again, or save the drafter again with `save_pretrained`."
        )
    return sorted(set(places.values()))


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        # `hashlib.file_digest` is newer than Python 3.10.
        digest = hashlib.sha256()
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def upload(
    save: Callable[[str], None],
    repo_id: str,
    card: str | None = None,
    commit_message: str = "Upload drafter",
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """
    Uploads the files that `save` writes, in one commit: the repository gets all of them, or none.

    Args:
        save (`Callable`): writes a model into the folder that it gets.
        card (`str`, *optional*): the text of the model card. Without it, the repository keeps its card.
        repo_id, commit_message, commit_description, private, token, revision, create_pr:
            See [`PreTrainedModel.push_to_hub`].

    Returns:
        `str`: the address of the commit.
    """
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        if card is not None:
            Path(folder, "README.md").write_text(card, encoding="utf-8")
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        # A pull request is there already.
        if revision is not None and not revision.startswith("refs/pr") and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
