# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon export FOLDER OUTPUT`: writes an EAGLE-3 drafter in the layout that serving engines read."""

from __future__ import annotations

from torch import nn
from transformers import GenerationConfig

from ..checkpoint_files import name_target
from ..core.drafter import DraftModel
from ..drafters.auto import AutoDrafter
from ..drafters.eagle3 import Eagle3DraftModel
from .export_arguments import ExportArguments, parser
from .models import load_target, no_progress_bars
from .run_arguments import check_output


def export(drafter: DraftModel, output: str, embedding: nn.Embedding | None = None) -> None:
    """
    Writes a drafter in the layout of the package `speculators`.

    Args:
        drafter ([`Eagle3DraftModel`]): the drafter.
        output (`str`): the folder to write.
        embedding (`torch.nn.Embedding`, *optional*): the target's embedding, if the drafter has none of its own.

    Raises:
        `ValueError`: for a drafter of a method that the layout does not have.
    """
    if not isinstance(drafter, Eagle3DraftModel):
        raise ValueError(
            f"The drafter is a {type(drafter).__name__}, and `speculators` has a layout for EAGLE-3: a Falcon drafter "
            "normalises features by mean and deviation, adds the embedding to the residual and predicts features for "
            "the target's head, for which no layout has a place. Train one with `hf-falcon train --architecture "
            "eagle3`."
        )
    own = drafter.embed_tokens
    if own is None and embedding is not None:
        weight = embedding.weight.detach().to(drafter.device, drafter.dtype)
        drafter.embed_tokens = nn.Embedding.from_pretrained(weight)
    options = drafter.generation_config
    try:
        # Drafting options are ours alone.
        drafter.generation_config = GenerationConfig()
        drafter.save_pretrained(output)
    finally:
        drafter.embed_tokens, drafter.generation_config = own, options


def main(argv: list[str]) -> int:
    """Runs `hf-falcon export`."""
    found = vars(parser().parse_args(argv))
    name, output = found.pop("drafter"), found.pop("output")
    arguments = ExportArguments(**found)
    check_output("output", output, drafter=name)
    drafter = AutoDrafter.from_pretrained(name, dtype=arguments.dtype)
    embedding = None
    if isinstance(drafter, Eagle3DraftModel):
        source = arguments.target or drafter.config.target_name_or_path
        check_output("output", output, target=source)
        needs_embedding = drafter.embed_tokens is None and not arguments.without_embedding
        if needs_embedding and source is None:
            raise ValueError(
                f"The drafter {name!r} has no embedding, and does not say whose it shares: give its target as "
                "`target`, or `without_embedding`."
            )
        if arguments.target is not None or needs_embedding:
            target, _ = load_target(source, drafter.dtype, "cpu")
            drafter.check_target(target)
            if arguments.target is not None:
                name_target(drafter, target)
            if not arguments.without_embedding:
                embedding = target.get_input_embeddings()
    with no_progress_bars(output):
        export(drafter, output, embedding)
    print(f"{output}: {sum(p.numel() for p in drafter.parameters()):,} weights, in the layout of `speculators`")
    return 0
