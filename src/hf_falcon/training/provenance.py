# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The provenance of a drafter: all that is needed to train it again."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .. import __version__
from ..checkpoint_files import weights_fingerprint
from .token_file import TokenFile

PROVENANCE_NAME = "provenance.json"


def provenance(target: PreTrainedModel, data: TokenFile) -> dict[str, Any]:
    """
    The constants of a run: versions, the git revision of the working directory (`None` outside a repository, ending in
    `-dirty` if files differ from it), the target and the data.

    Args:
        target ([`PreTrainedModel`]): the target.
        data ([`TokenFile`]): all the data of the run, held-out samples included.
    """
    names = ("chat_template_sha256", "chat_template_kwargs")
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "hf_falcon": __version__,
        },
        "git_revision": git_revision(),
        "target": {"name_or_path": target.name_or_path, "fingerprint": weights_fingerprint(target)},
        "data": {
            "sources": data.sources,
            "tokens_sha256": hashlib.sha256(data.tokens.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            "tokens": len(data.tokens),
            "samples": len(data),
            # Absent if the token files do not record one template.
            **{name: value for name, value in data.metadata.items() if name in names},
        },
    }


def git_revision() -> str | None:
    """The revision of the working directory; `None` without a repository, a commit, or git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
