# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Errors of damaged checkpoints name what is damaged; and fingerprints of a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .core.target_parts import is_spread, quantised_layers, some_values
from .json_files import printable

# Names of weights in an error, at most: a hostile file can have hundreds of thousands.
_MOST_SHOWN = 20

_FINGERPRINT_TENSORS = 32

# Both dtypes hold the bfloat16 rounding of a value exactly. float16 does not: a float16 copy would look like a
# fine-tune.
_FINGERPRINT_DTYPES = (torch.float32, torch.bfloat16)


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


def weights_fingerprint(model: PreTrainedModel) -> str | None:
    """
    A short hash of a model's weights that is the same for its float32 and its bfloat16 copy.

    Returns:
        `str` or `None`: the hash; `None` if the weights cannot be compared (float16, on the meta device, or spread
        over processes).
    """
    return _fingerprint(_some_matrices(model))


def exact_fingerprint(model: PreTrainedModel) -> str | None:
    """
    [`weights_fingerprint`], or of float16 weights a hash that only other float16 copies of the same weights have: for
    what is compared with the same copy of a model only, such as an interrupted run.

    Returns:
        `str` or `None`: the hash; `None` on the meta device and for weights that are spread over processes.
    """
    return _fingerprint(_some_matrices(model), takes_float16=True)


def embedding_fingerprint(model: PreTrainedModel) -> str | None:
    """
    [`weights_fingerprint`] of a model's token embedding alone, which most methods of quantisation leave as it is: a
    quantised copy then has the embedding of its original.

    Returns:
        `str` or `None`: the hash; `None` if the embedding cannot be compared (quantised, float16, on the meta device).
    """
    weight: Any = getattr(model.get_input_embeddings(), "weight", None)
    return _fingerprint([weight]) if getattr(weight, "dtype", None) in _FINGERPRINT_DTYPES else None


def fingerprints(model: PreTrainedModel) -> dict[str, str | None]:
    """The fields of a drafter's configuration by which the weights of its target are known."""
    return {
        "target_fingerprint": weights_fingerprint(model),
        "target_embedding_fingerprint": embedding_fingerprint(model),
    }


def name_target(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    """Notes in a drafter's configuration the name and the fingerprints of the target that it was trained for."""
    config: Any = drafter.config
    if hasattr(config, "name_target"):
        config.name_target(target)
    else:
        vars(config).update({"target_name_or_path": target.name_or_path or None, **fingerprints(target)})


def _some_matrices(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return matrices[:: max(1, len(matrices) // _FINGERPRINT_TENSORS)]


def _fingerprint(matrices: Iterable[torch.Tensor], takes_float16: bool = False) -> str | None:
    samples = []
    for matrix in matrices:
        is_refused = matrix.dtype == torch.float16 and not takes_float16
        if matrix.device.type == "meta" or is_refused or is_spread(matrix):
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


def was_trained_for(drafter: Any, target: PreTrainedModel) -> bool:
    """Whether the drafter was trained for the target's weights; `True` if their fingerprints are not known."""
    expected = drafter.config.target_fingerprint
    actual = weights_fingerprint(target) if expected is not None else None
    return expected is None or actual is None or actual == expected


def weights_difference(drafter: Any, target: PreTrainedModel) -> str | None:
    """
    A sentence that says how the target's weights differ from those that the drafter was trained for.

    Returns:
        `str`, or `None` if they do not differ; see [`was_trained_for`].
    """
    if was_trained_for(drafter, target):
        return None
    trained = drafter.config.target_name_or_path or "the model"
    if any(quantised_layers(target)):
        # Drafters of other methods do not have it.
        expected = getattr(drafter.config, "target_embedding_fingerprint", None)
        actual = embedding_fingerprint(target)
        if expected is None or actual is None:
            return (
                f"The target is quantised, so its weights cannot be compared with those of {trained} that the drafter "
                "was trained for."
            )
        if actual == expected:
            return f"The target is a quantised copy of {trained}, which the drafter was trained for."
    return f"The target's weights are not those of {trained} that the drafter was trained for."


def refuse_other_tensors(repository: Any, stored: Mapping[str, Any], wanted: Mapping[str, torch.Tensor]) -> None:
    """
    As [`refuse_problems`], by names and shapes.

    Args:
        repository: the checkpoint's folder or name.
        stored (mapping): what has a `shape`, by the names in the checkpoint.
        wanted (mapping of `str` to `torch.Tensor`): what belongs to its configuration.
    """
    shapes = [(name, tuple(stored[name].shape), tuple(wanted[name].shape)) for name in wanted.keys() & stored.keys()]
    problems = {
        "missing_keys": wanted.keys() - stored.keys(),
        "unexpected_keys": stored.keys() - wanted.keys(),
        "mismatched_keys": [each for each in shapes if each[1] != each[2]],
    }
    refuse_problems(repository, problems)


def refuse_problems(repository: Any, problems: Mapping[str, Any]) -> None:
    """
    Refuses a checkpoint whose weights do not belong to its configuration.

    Args:
        repository: its folder or name.
        problems (`dict`): names of weights by the kind of problem, as transformers' loading reports them.

    Raises:
        `ValueError`: if there are any; it names the weights.
    """
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found := sorted(map(str, problems.get(problem) or ())):
            shown, more = [printable(each) for each in found[:_MOST_SHOWN]], len(found) - _MOST_SHOWN
            raise ValueError(
                f"The checkpoint `{repository}` has {problem.replace('_', ' ')}: {shown}"
                f"{f' and {more:,} more' if more > 0 else ''}. Its weights do not belong to its config.json: download "
                "it again, or save it again with `save_pretrained`."
            )
