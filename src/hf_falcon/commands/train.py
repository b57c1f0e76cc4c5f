# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon train`: trains a drafter for a target on token files."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoint_files import name_target, weights_fingerprint
from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.drafter import DraftModel, FalconDraftModel
from ..core.target_parts import quantised_layers
from ..training.features import Features, StoredFeatures, feature_statistics, kept_features, set_feature_statistics
from ..training.final_tau import decoded_tau
from ..training.json_text import short
from ..training.plot import TrainingPlot
from ..training.provenance import provenance, refuse_other_run
from ..training.start import like_last_layer, start_blocks, start_eagle3, start_falcon
from ..training.token_file import TokenFile
from ..training.trainer import DraftSamples, FalconTrainer, FalconTrainingArguments
from . import plan
from .architectures import ARCHITECTURES
from .card import write_card
from .models import load_target
from .run_arguments import check_output, parse_run
from .train_arguments import DrafterArguments

logger = logging.getLogger(__name__)


def frequent_tokens(data: TokenFile, vocab_size: int, size: int) -> tuple[torch.Tensor, float]:
    """
    The `size` most frequent tokens of the responses.

    Returns:
        Their ids in ascending order, and the share of response tokens that they cover.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in range(len(data)):
        token_ids, prompt_length = data.sample(index)
        counts += torch.bincount(token_ids[prompt_length:], minlength=vocab_size)
    chosen = counts.argsort(descending=True, stable=True)[:size]
    return chosen.sort().values, float(counts[chosen].sum() / counts.sum())


def main(argv: list[str]) -> int:
    """Runs `hf-falcon train`."""
    types = (DrafterArguments, FalconTrainingArguments)
    options, args = parse_run(argv, types, prog="hf-falcon train", description=__doc__)
    set_seed(args.seed)
    if not options.plan:
        check_output("output_dir", args.output_dir, drafter=options.init_from, target=options.target)
        if options.features_dir is not None:
            check_output("features_dir", options.features_dir)
    files = [TokenFile.load(path) for path in options.data]
    data = TokenFile.concatenate(files)
    counted = [TokenFile.load(path) for path in options.vocabulary_data]
    paths = options.data + options.vocabulary_data
    if options.plan:
        config = _config(options, plan.target_config(options))
        _check_vocabulary(paths, files + counted, config.vocab_size)
        print(plan.describe(options, args, config, data, *_split(options, data)))
        return 0
    target, _ = load_target(options.target, options.target_dtype or "auto", str(args.device))
    _check_vocabulary(paths, files + counted, target.config.get_text_config().vocab_size)
    # Trainer creates it in one process, and other processes can need it earlier.
    os.makedirs(args.output_dir, exist_ok=True)
    checkpoint = args.resume_from_checkpoint
    if checkpoint is None or checkpoint.lower() == "true":
        checkpoint = get_last_checkpoint(args.output_dir)
    elif not Path(checkpoint, TRAINER_STATE_NAME).is_file():
        raise FileNotFoundError(
            f"`resume_from_checkpoint` is {checkpoint!r}, which has no {TRAINER_STATE_NAME}: give a folder "
            "`checkpoint-N` of a run, or leave it out for the latest in `output_dir`."
        )
    if checkpoint:
        # Before the features, which may take hours.
        given = {"arguments": {**asdict(options), **args.to_dict()}, "samples_per_step": args.samples_per_step}
        refuse_other_run(checkpoint, {**provenance(target, data), **given})
    if args.process_index == 0:
        _warn_of_another_target(files, target)
    layers = _config(options, target).feature_layers
    stored: Features | None = None
    # The other processes find them complete.
    with args.main_process_first(local=False, desc="features"):
        if options.features_dir is not None:
            stored = StoredFeatures(options.features_dir, target, data, layers)
        else:
            stored = kept_features(options.data, files, target, layers)
    # A new drafter starts from the samples before those that are held out, which judge it.
    drafter = _drafter(options, target, data.first(_trained_on(options, data)), counted, stored)
    if "chat_template_kwargs" in data.metadata:
        # `generate` and `doctor` compare them with a call's.
        drafter.config.chat_template_kwargs = data.metadata["chat_template_kwargs"]
    samples, held_out = _split(options, data, stored)
    trainer = FalconTrainer(drafter, target, args, samples, held_out, run_arguments=asdict(options))
    plot = TrainingPlot()
    trainer.add_callback(plot)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    state = trainer.state
    if held_out:
        if not any("eval_loss" in row and row["step"] == state.global_step for row in state.log_history):
            trainer.evaluate()
        if state.global_step >= state.max_steps:
            kind = ARCHITECTURES[options.architecture]
            _log_final_tau(trainer, kind, target, held_out, options.final_tau_prompts)
    # Once more, with the measurements after the training.
    plot.on_train_end(args, state, trainer.control)
    trainer.save_state()
    if trainer.is_world_process_zero() and type(drafter) is FalconDraftModel:
        write_card(drafter.config, args.output_dir)
    return 0


def _trained_on(options: DrafterArguments, data: TokenFile) -> int:
    """The number of samples to train on; those after them are held out."""
    return len(data) - min(options.eval_samples, len(data) // 10)


def _prompt(data: TokenFile, index: int) -> bytes:
    """What tells a prompt from others: a plain text, whose first token is its prompt, is told by all of it."""
    token_ids, length = data.sample(index)
    return token_ids[: length if length > 1 else None].numpy().tobytes()


def _split(
    options: DrafterArguments, data: TokenFile, stored: Features | None = None
) -> tuple[DraftSamples, DraftSamples | None]:
    """The samples to train on, and the held-out samples."""
    first = _trained_on(options, data)
    held_out = {_prompt(data, index) for index in range(first, len(data))}
    # Another file may have other responses to the same prompts.
    trained = [index for index in range(first) if not held_out or _prompt(data, index) not in held_out]
    if not trained:
        raise ValueError(
            f"All prompts are among those that are held out: change `eval_samples` ({options.eval_samples}); 0 holds "
            "out none."
        )
    if len(trained) < first:
        logger.warning(f"{first - len(trained)} samples are left out: their prompts are held out.")
    samples = DraftSamples(data, trained, options.max_length, stored)
    if first == len(data):
        return samples, None
    try:
        return samples, DraftSamples(data, list(range(first, len(data))), options.max_length, stored)
    except ValueError as error:
        raise ValueError(
            f"Held out, from the end of the data: {error} Or change `eval_samples` ({options.eval_samples}): 0 holds "
            "out none."
        ) from error


def _log_final_tau(
    trainer: FalconTrainer,
    kind: type[DraftModel],
    target: PreTrainedModel,
    held_out: DraftSamples,
    prompts: int,
) -> None:
    samples = [held_out[item] for item in range(min(prompts, len(held_out)))]
    if not samples or not trainer.is_world_process_zero():
        return
    # The saved drafter: a process may have only a shard of the one in training.
    drafter = kind.from_pretrained(str(trainer.args.output_dir), dtype=torch.float32).to(target.device)
    found = decoded_tau(target, drafter, [_beginning(sample) for sample in samples])
    if found:
        trainer.log({name: round(value, 5) for name, value in found.items()})
        print(
            f"{len(samples)} held-out prompts decoded: {1 + found['final_tau']:.2f} tokens a round (tau "
            f"{found['final_tau']:.2f}), {100 * found['final_alpha']:.1f} % of all tokens drafted (alpha)"
        )


def _beginning(sample: dict[str, Any]) -> torch.Tensor:
    """The prompt; of a plain text, whose first token is its prompt, the first half."""
    token_ids, length = sample["token_ids"], int(sample["prompt_length"])
    beginning: torch.Tensor = token_ids[: length if length > 1 else max(1, len(token_ids) // 2)]
    return beginning


def _warn_of_another_target(files: list[TokenFile], target: PreTrainedModel) -> None:
    """Of the same vocabulary, or the file is refused. A drafter learns less from them than from its target's own."""
    own = None if any(quantised_layers(target)) else weights_fingerprint(target)
    for file in (each.metadata for each in files):
        recorded = file.get("target_fingerprint")
        if file.get("plan", {}).get("responses") != "data" and None not in (recorded, own) and recorded != own:
            logger.warning(
                f"A token file has responses of another target ({short(file.get('target'))}): `hf-falcon prepare` "
                "writes responses of this one."
            )
            return


def _check_vocabulary(paths: list[str], files: list[TokenFile], vocab_size: int) -> None:
    for path, file in zip(paths, files, strict=True):
        file.check_vocabulary(vocab_size, path)


def _config(options: DrafterArguments, target: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the drafter: a new one, or that of `init_from`."""
    kind: Any = ARCHITECTURES[options.architecture].config_class
    if options.init_from is not None:
        config = kind.from_pretrained(options.init_from)
        if _starts_blocks(options, config):
            config.block_size, config.conditioning_size = options.block_size, options.conditioning_size
        return config
    names = ("intermediate_size", "num_key_value_heads")
    sizes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.architecture == "eagle3":
        if options.num_draft_layers is not None:
            sizes["num_hidden_layers"] = options.num_draft_layers
        if options.feature_layers:
            # Ids of hidden states: id n is the output of layer n - 1.
            sizes["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in options.feature_layers]
        # The norm keeps what is fed back at one scale.
        return kind.from_target(target, draft_vocab_size=options.draft_vocab_size, norm_output=True, **sizes)
    return kind.from_target(
        target,
        block_size=options.block_size,
        num_lstm_layers=options.num_lstm_layers,
        num_hidden_layers=2 if options.num_draft_layers is None else options.num_draft_layers,
        conditioning_size=options.conditioning_size,
        feature_layers=options.feature_layers,
        draft_vocab_size=options.draft_vocab_size,
        **sizes,
    )


def _starts_blocks(options: DrafterArguments, config: PreTrainedConfig) -> bool:
    """Whether a drafter of blocks starts from one of one token a pass."""
    return type(config) is FalconDraftConfig and config.block_size == 1 < options.block_size


def _drafter(
    options: DrafterArguments,
    target: PreTrainedModel,
    data: TokenFile,
    counted: list[TokenFile],
    stored: Features | None,
) -> DraftModel:
    if options.init_from is not None:
        trained: Any = ARCHITECTURES[options.architecture].from_pretrained(options.init_from, dtype=torch.float32)
        # Its error names the target that the drafter was made for.
        trained.check_target(target)
        name_target(trained, target)
        if _starts_blocks(options, trained.config):
            return start_blocks(trained, target, data, options.block_size, options.conditioning_size)
        return trained
    config = _config(options, target)
    if ARCHITECTURES[options.architecture] is FalconDraftModel and config.num_lstm_layers == 0:
        config = like_last_layer(config, target)
    drafter: Any = ARCHITECTURES[options.architecture](config)
    if config.draft_vocab_size not in (None, config.vocab_size):
        text = TokenFile.concatenate([data, *counted])
        token_ids, coverage = frequent_tokens(text, config.vocab_size, config.draft_vocab_size)
        drafter.set_draft_vocabulary(token_ids)
        print(f"draft vocabulary: {len(token_ids):,} of {config.vocab_size:,} tokens, {100 * coverage:.2f} % of text")
    if drafter.predicts_features:
        set_feature_statistics(drafter, *feature_statistics(target, data, stored))
        if type(drafter) is FalconDraftModel:
            start_falcon(drafter, target, data, stored)
    else:
        start_eagle3(drafter, target, data)
    return drafter
