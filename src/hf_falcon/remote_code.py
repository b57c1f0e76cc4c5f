# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The code that goes with a drafter's weights, so that they load and draft where `hf_falcon` is not installed."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import HfApi
from transformers.dynamic_module_utils import get_relative_import_files

from .custom_generate import generate

# The lowest version that this code runs on, in the form that transformers checks before it runs custom generation.
_REQUIREMENTS = "transformers>=5.17.0\n"


def core_files(module_file: str | Path) -> list[Path]:
    """A module's file and those of its relative imports, theirs included, as transformers itself collects them."""
    return sorted({Path(module_file), *map(Path, get_relative_import_files(module_file))})


def write_code(module_file: str | Path, folder: str | Path) -> None:
    """
    Copies into `folder` the files that a model needs, as they are, and `custom_generate/generate.py`.

    Args:
        module_file (`str` or `Path`): the file that the model's class is in. What it imports lies beside it.
        folder (`str` or `Path`): where the model is saved.
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
    Uploads what `save` writes into a folder, in one commit: the repository has all of it or stays as it was.

    Args:
        save (`Callable`): writes a model into the folder that it is given.
        card (`str`, *optional*): text of the model card. Without one, that of the repository stays.
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
    # A drafter may be saved to where its own code lies.
    if not (place.exists() and place.samefile(source)):
        shutil.copyfile(source, place)
