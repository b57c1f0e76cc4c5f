# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The model card of a drafter, from its configuration and the files that its training wrote."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..json_files import printable

if TYPE_CHECKING:
    from ..core.configuration_falcon_draft import FalconDraftConfig

TEMPLATE_NAME = "model_card.md.jinja"
# Of a card, and of its metadata: the parser of YAML takes seconds for a megabyte.
_LARGEST_CARD, _LARGEST_METADATA, _DEEPEST_METADATA = 2**22, 2**16, 32
# Marks a card that this module wrote. Only a card with the mark is written again; a user's own card stays.
MARK = "<!-- Made by hf-falcon. Without this line it is not made anew. -->"


def render_card(config: FalconDraftConfig, folder: str | Path, name: str, license: str | None = None) -> ModelCard:
    """
    The card of the drafter in `folder`.

    Args:
        config ([`FalconDraftConfig`]): the drafter's configuration.
        folder (`str` or `Path`): the drafter's folder, with `provenance.json` and `trainer_state.json` if they exist.
        name (`str`): the repository, or the name of the drafter.
        license (`str`, *optional*): an identifier of the Hub, such as "apache-2.0".
    """
    target = config.target_name_or_path
    base_model = target if target is not None and _is_repository(target) else None
    provenance = _read(Path(folder, "provenance.json"))
    sources = provenance.get("data", {}).get("sources", [])
    tau, alpha = final_tau(folder)
    title = name.rpartition("/")[2]
    data = ModelCardData(
        model_name=title,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        base_model=base_model,
        # The nearest of the Hub's relations: a drafter works only beside its base model.
        base_model_relation=None if base_model is None else "adapter",
        datasets=[source for source in sources if _is_repository(source)] or None,
        tags=["speculative-decoding", "assisted-generation", "falcon", "custom_code"],
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type="held-out",
                dataset_name="held-out prompts of the training data",
                metric_type=kind,
                metric_name=text,
                metric_value=value,
            )
            for kind, text, value in (
                ("tau", "draft tokens accepted a round, without the target's own", tau),
                ("alpha", "accepted draft tokens over all new tokens", alpha),
            )
            if value is not None
        ]
        or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(template()),
        mark=MARK,
        # `ModelCardData` drops `model_name` if there are results.
        title=title,
        repository=name,
        target=target or "its target",
        config=config,
        provenance=provenance,
        tau=tau,
        alpha=alpha,
    )


def read_card(file: Path) -> ModelCardData:
    """
    Reads the metadata of a stranger's card.

    Args:
        file (`Path`): a drafter's `README.md`.

    Raises:
        `ValueError`: if its metadata cannot be read in bounded time and memory; it names the file.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST_CARD + 1)
        if len(data) > _LARGEST_CARD:
            raise ValueError(f"it has more than {_LARGEST_CARD:,} bytes")
        text = data.decode("utf-8")
        metadata = REGEX_YAML_BLOCK.search(text)
        if metadata is not None:
            _check_metadata(metadata[2])
        card = ModelCard(text).data
        assert isinstance(card, ModelCardData)
        return card
    # A parser of YAML, and the card's own checks of values, raise an error of any kind.
    except Exception as error:
        reason = printable(" ".join(str(error).split()))
        raise ValueError(f"`{file.name}` in {file.parent} is no model card ({reason}): download it again.") from error


def _check_metadata(text: str) -> None:
    if len(text) > _LARGEST_METADATA:
        raise ValueError(f"its metadata has more than {_LARGEST_METADATA:,} characters")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        # Some lines with references to each other would be gigabytes.
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"its metadata refers to `{event.anchor}`")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_METADATA:
            raise ValueError(f"its metadata has more than {_DEEPEST_METADATA} levels")


def tau_of(card: ModelCardData) -> dict[str, float]:
    """The values of tau in a card, by data set."""
    results = [each for each in card.eval_results or [] if each.metric_type == "tau"]
    return {
        printable(str(each.dataset_name)): float(each.metric_value)
        for each in results
        if type(each.metric_value) in (int, float) and math.isfinite(each.metric_value)
    }


def write_card(config: FalconDraftConfig, folder: str | Path) -> bool:
    """Writes `README.md` into a drafter's folder, unless a user's own card is there. Returns whether it did."""
    file = Path(folder, "README.md")
    # A user's may be in any encoding.
    if file.is_file() and MARK not in file.read_text(encoding="utf-8", errors="replace"):
        return False
    # It imports torch, which reading a card does not need.
    from ..training.token_file import write_atomically

    card = render_card(config, folder, Path(folder).resolve().name)
    write_atomically(file, str(card).encode())
    return True


def template() -> Path:
    """The file of the template: in the source checkout, or installed with the package."""
    for parent in Path(__file__).resolve().parents:
        file = parent / "hub_cards" / TEMPLATE_NAME
        if file.is_file():
            return file
    raise FileNotFoundError(f"`{TEMPLATE_NAME}` is not beside the package: install hf-falcon again.")


def final_tau(folder: str | Path) -> tuple[float | None, float | None]:
    """tau and alpha that the training, or adapting, measured by decoding at its end; `None` if it did not."""
    for row in reversed(_read(Path(folder, "trainer_state.json")).get("log_history", [])):
        if "final_tau" in row:
            return row["final_tau"], row.get("final_alpha")
    after = _read(Path(folder, "adapt.json")).get("after") or {}
    return after.get("final_tau"), after.get("final_alpha")


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _is_repository(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not Path(name).exists()
