# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The provenance of a drafter: all that is needed to train it again."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .. import __version__
from ..checkpoint_files import exact_fingerprint
from ..json_files import read_own_object
from .token_file import TokenFile

PROVENANCE_NAME = "provenance.json"

# Arguments of `hf-falcon train` that what a checkpoint holds depends on: weights, and the optimizer's state.
_ARGUMENTS = (
    "architecture",
    "init_from",
    "block_size",
    "num_lstm_layers",
    "num_draft_layers",
    "intermediate_size",
    "num_key_value_heads",
    "conditioning_size",
    "feature_layers",
    "draft_vocab_size",
    "max_length",
    "eval_samples",
    "muon",
    "optim",
    "weight_decay",
    "lr_scheduler_type",
)
# Schedules that go by the loss. Their state is of another kind; the others go by the step, and may be changed.
_BY_LOSS = {"reduce_lr_on_plateau", "greedy"}


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
        "target": {"name_or_path": target.name_or_path, "fingerprint": exact_fingerprint(target)},
        "data": {
            "sources": data.sources,
            "tokens_sha256": data.sha256,
            "tokens": len(data.tokens),
            "samples": len(data),
            # Absent if the token files do not record one template.
            **{name: value for name, value in data.metadata.items() if name in names},
        },
    }


def refuse_other_run(checkpoint: str | Path, found: dict[str, Any]) -> None:
    """
    Refuses to continue a run with other data, for another target, with another optimizer or other samples a step, or
    as a drafter of other layers or other held-out samples: its schedule, its weights and its record would be of
    neither.

    Args:
        checkpoint (`str` or `Path`): a checkpoint of the run.
        found (`dict`): [`provenance`] of what it would go on with.

    Raises:
        `ValueError`: naming what differs, and the remedy.
    """
    file = Path(checkpoint, PROVENANCE_NAME)
    kept = read_own_object(file) if file.is_file() else {}
    for name, mark in (("data", "tokens_sha256"), ("target", "fingerprint")):
        before, now = (each.get(name, {}).get(mark) for each in (kept, found))
        if None not in (before, now) and before != now:
            raise ValueError(
                f"`{name}` is not what the run of {str(checkpoint)!r} has: repeat its first command to continue it, "
                "or start another run in a new `output_dir` (from its weights with `init_from`)."
            )
    # Earlier versions did not note them. A step can be shared in another way: its number says which samples are next.
    before, now = (each.get("samples_per_step") for each in (kept, found))
    if None not in (before, now) and before != now:
        raise ValueError(
            f"A step has {now} samples (of a batch, times `gradient_accumulation_steps`, times processes), and had "
            f"{before} in the run of {str(checkpoint)!r}: give as many to continue it, or start another run in a new "
            "`output_dir`."
        )
    before, now = (each.get("arguments", {}) for each in (kept, found))
    for name in (each for each in _ARGUMENTS if each in before and each in now):
        if before[name] != now[name] and (name != "lr_scheduler_type" or _BY_LOSS & {before[name], now[name]}):
            raise ValueError(
                f"`{name}` is {now[name]!r}, and was {before[name]!r} in the run of {str(checkpoint)!r}: give that to "
                "continue it, or start another run in a new `output_dir`."
            )


def git_revision() -> str | None:
    """The revision of the working directory; `None` without a repository, a commit, or git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
