# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The files of a checkpoint: checks of its weights before they take memory, and the code that is saved with them."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    find_adapter_config_file,
    is_peft_available,
)

from .custom_generate import generate

# The oldest transformers that this code runs on. transformers checks this file before it runs `custom_generate`.
_REQUIREMENTS = "transformers>=5.17.0\n"

_FINGERPRINT_TENSORS = 32

_FINGERPRINT_VALUES = 16

# Both dtypes hold the bfloat16 rounding of a value exactly. float16 does not: a float16 copy would look like a
# fine-tune.
_FINGERPRINT_DTYPES = (torch.float32, torch.bfloat16)


Shapes = dict[str, tuple[int, ...]]


@contextmanager
def reading(name: str) -> Iterator[None]:
    """
    Replaces the error that a damaged file causes inside transformers by one that names the file.

    Raises:
        `ValueError`: for any error except `ValueError` and `OSError`, which pass.
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
    """Whether `name` is the name of a safetensors file in the folder of config.json."""
    return isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\\0")


def weight_files(repository: str, variant: str | None = None, **loading: Any) -> list[Path]:
    """
    The files with a checkpoint's weights. They are downloaded if they are on the Hub only.

    Args:
        repository (`str`): a folder, or a repository of the Hub.
        variant (`str`, *optional*): as in `from_pretrained`.
        loading: arguments of [`~transformers.utils.cached_file`], such as `revision` and `token`.

    Raises:
        `OSError`: if there are none, or their index is damaged.
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
            "weights are loaded. Remove that file, or give the folder or the repository of a Falcon drafter."
        )


def check_digests(files: Iterable[Path], expected: Mapping[str, str]) -> None:
    """
    Checks that weight files are the files that were saved.

    Args:
        files (iterable of `Path`): the files that are about to be read.
        expected (mapping of `str` to `str`): the sha256 of each file, by its name, from `config.json`. It is empty for
            checkpoints from before digests were kept; their files are not checked.

    Raises:
        `OSError`: if a file has another digest, or none; it names the file.
    """
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


def stored_shapes(files: Iterable[Path]) -> Shapes:
    """
    The shape of every tensor in these files, read from their headers.

    Raises:
        `OSError`: if a file is not a complete safetensors file; it names the file.
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
        # An interrupted download raises an error of the Hub client's own network library.
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


def core_files(module_file: str | Path) -> list[Path]:
    """The file of a module and the files of its relative imports, recursively, as transformers collects them."""
    return sorted({Path(module_file), *map(Path, get_relative_import_files(module_file))})


def write_code(module_file: str | Path, folder: str | Path) -> None:
    """
    Copies the code of a model into `folder`, unchanged, and `custom_generate/generate.py`.

    Args:
        module_file (`str` or `Path`): the file of the model's class. The files that it imports are in the same folder.
        folder (`str` or `Path`): the folder that the model is saved to.
    """
    for file in core_files(module_file):
        _copy(file, Path(folder, file.name))
    custom = Path(folder, "custom_generate")
    custom.mkdir(exist_ok=True)
    _copy(Path(inspect.getfile(generate)), custom / "generate.py")
    (custom / "requirements.txt").write_text(_REQUIREMENTS, encoding="utf-8")


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
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def _copy(source: Path, place: Path) -> None:
    # A drafter may be saved to the folder that its code was loaded from.
    if not (place.exists() and place.samefile(source)):
        shutil.copyfile(source, place)


def weights_fingerprint(model: PreTrainedModel) -> str | None:
    """
    A short hash of a model's weights that is the same for its float32 and its bfloat16 copy.

    Returns:
        `str` or `None`: the hash; `None` if the weights cannot be compared (float16, or on the meta device).
    """
    matrices = [p for p in model.parameters() if p.dim() == 2]
    stride = max(1, len(matrices) // _FINGERPRINT_TENSORS)
    return _fingerprint(matrices[::stride])


def embedding_fingerprint(model: PreTrainedModel) -> str | None:
    """
    [`weights_fingerprint`] of a model's token embedding alone, which most methods of quantisation leave as it is: a
    quantised copy then has the embedding of its original.

    Returns:
        `str` or `None`: the hash; `None` if the embedding cannot be compared (quantised, float16, on the meta device).
    """
    weight: Any = getattr(model.get_input_embeddings(), "weight", None)
    return _fingerprint([weight]) if getattr(weight, "dtype", None) in _FINGERPRINT_DTYPES else None


def _fingerprint(matrices: Iterable[torch.Tensor]) -> str | None:
    samples = []
    for matrix in matrices:
        if matrix.device.type == "meta" or matrix.dtype == torch.float16:
            return None
        values = _some_values(matrix)
        samples.append(values.to(torch.bfloat16).float() if matrix.dtype in _FINGERPRINT_DTYPES else values.float())
    if not samples:
        return None
    # One transfer to the host: the weights of a device are asked for together.
    together = torch.cat([sample.to(samples[0].device) for sample in samples]).cpu()
    digest = hashlib.sha256(together.numpy().tobytes())
    return digest.hexdigest()[:16]


def _some_values(matrix: torch.Tensor) -> torch.Tensor:
    # A packed weight keeps these values, because it must be unpacked as a whole to read any of them.
    own = getattr(matrix, "some_values", None)
    if own is not None:
        return own
    if hasattr(matrix, "__tensor_flatten__"):
        # The codes and scales of a quantised weight.
        parts, _ = matrix.__tensor_flatten__()
        return torch.cat([_some_values(getattr(matrix, part)).float() for part in parts])
    return some_values(matrix)


def some_values(matrix: torch.Tensor) -> torch.Tensor:
    """A sample of a matrix's values, spread over the whole matrix, that identifies the matrix."""
    flat = matrix.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _FINGERPRINT_VALUES)][:_FINGERPRINT_VALUES]
