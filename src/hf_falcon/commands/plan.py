# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon train --plan`: the drafter, steps, time and memory of a run, without reading any weights."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.trainer_utils import SaveStrategy

from ..training.csgd import check_unrolling
from ..training.distillation import chunk_rows
from ..training.features import without_kept
from ..training.token_file import TokenFile
from ..training.trainer import DraftSamples, FalconTrainingArguments
from .architectures import ARCHITECTURES
from .models import TARGET_NAME, converted_target, resolve_dtype, source_named
from .train_arguments import DrafterArguments

# Up to six float32 tensors of the size of a chunk of logits live at once.
_CHUNK_BYTES = 6 * 4
# Speed for the estimate of hours, in operations a second of one process; hours are inversely proportional.
_SPEED = 1e14


def describe(
    options: DrafterArguments,
    args: FalconTrainingArguments,
    config: PreTrainedConfig,
    data: TokenFile,
    train: DraftSamples,
    held_out: DraftSamples | None,
) -> str:
    """
    The plan of a run, as aligned text.

    Args:
        options, args: the arguments of the run.
        config ([`FalconDraftConfig`] or [`Eagle3DraftConfig`]): the drafter's configuration.
        data ([`TokenFile`]): all the data.
        train, held_out ([`DraftSamples`]): the samples to train on, and the held-out samples.
    """
    dtype = resolve_dtype(options.target_dtype or "auto", args.device)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config(options), dtype=dtype)
        drafter: Any = ARCHITECTURES[options.architecture](config)
    args.take_defaults(drafter)
    passes = args.unroll_passes or 1
    check_unrolling(drafter, passes)
    target_size, size = (sum(p.numel() for p in model.parameters()) for model in (target, drafter))
    steps_per_epoch, steps = training_steps(len(train), args)
    tokens, prompts = sum(train.lengths), sum(train.prompt_lengths)
    presented = round(tokens * steps / steps_per_epoch)
    vocab_size = config.draft_vocab_size or config.vocab_size

    batch, length = args.train_batch_size, max(train.lengths)
    head = config.hidden_size * vocab_size
    memory = {
        "the target's weights": target_size * dtype.itemsize,
        # AdamW keeps two values a weight beside the gradient.
        "the drafter's weights, gradients and AdamW": 4 * 4 * size,
        "the head in float32": 4 * head,
        f"activations of {batch} x {length} tokens": activation_bytes(config, batch, length, passes),
        "a chunk of logits": _CHUNK_BYTES * chunk_rows(vocab_size) * vocab_size,
    }
    # Features are computed in every epoch, once for all the data, or not at all. They need no LM head, and an
    # embedding needs no products.
    body = sum(p.numel() for p in target.base_model.parameters()) - target.get_input_embeddings().weight.numel()
    read = len(data.tokens) if options.features_dir is not None else presented if without_kept(options.data) else 0
    reading = 2 * body * read
    work = reading + training_operations(config, args, size, presented, round(presented * (1 - prompts / tokens)))
    kept = checkpoints(steps, steps_per_epoch, args)
    each = 4 * size * (1 if args.save_only_model else 3)
    disk = f"{_gb(kept * each + 4 * size)}: {kept} checkpoints of {_gb(each)} and the drafter"
    if options.features_dir is not None:
        width = config.hidden_size * (1 + len(config.feature_layers))
        disk += f"; {_gb(2 * width * len(data.tokens))} of features in `{options.features_dir}`"
    fusion = f"{config.num_lstm_layers} LSTM layers" if config.num_lstm_layers else "a linear fusion"
    rows = {
        "target": f"{options.target or TARGET_NAME}: {target.config.model_type}, {target_size:,} parameters, "
        f"{str(dtype).removeprefix('torch.')}, on {args.device}",
        "drafter": f"{size:,} parameters: block size {config.block_size}, {fusion}, "
        f"{config.num_hidden_layers} decoder layers, {vocab_size:,} tokens scored",
        "data": f"{len(train):,} samples of {tokens:,} tokens, {tokens - prompts:,} of them of "
        f"responses; {len(held_out) if held_out else 0:,} samples held out",
        "steps": f"{steps:,} of {args.samples_per_step:,} samples ({args.world_size} processes x {batch} x "
        f"{args.gradient_accumulation_steps} accumulated), {steps / steps_per_epoch:.2f} epochs",
        "presented": f"{presented:,} tokens",
        "work": f"{work:.3g} floating-point operations, {reading / work:.0%} of them the target's: "
        f"{work / args.world_size / _SPEED / 3600:.3g} hours at {_SPEED / 1e12:.0f} TFLOP/s a process",
        "memory": f"{_gb(sum(memory.values()))} estimated: "
        + ", ".join(f"{_gb(part)} {name}" for name, part in memory.items()),
        "disk": f"{disk} ({_gb(shutil.disk_usage(_existing(args.output_dir)).free)} free in `{args.output_dir}`)",
    }
    lines = [f"{name:<11}{text}" for name, text in rows.items()]
    return "\n".join([*lines, "This is only the plan: leave out `plan` to train."])


def target_config(options: DrafterArguments) -> PreTrainedConfig:
    """The target's configuration. The demo's target is converted when it is first used."""
    source = options.target or str(converted_target())
    with source_named("target", source):
        return AutoConfig.from_pretrained(source)


def training_steps(samples: int, args: FalconTrainingArguments) -> tuple[int, int]:
    """Steps of the optimiser in an epoch and in the run, as Trainer counts them."""
    whole = math.floor if args.dataloader_drop_last else math.ceil
    per_epoch = max(1, whole(samples / args.samples_per_step))
    return per_epoch, args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)


def activation_bytes(config: Any, batch: int, length: int, passes: int) -> int:
    """
    Bytes of the activations that the backward pass of a batch needs, as counted on drafters in float32 (mixed
    precision saves little: norms and residuals stay in float32). Values a token: some 10 times the hidden size around
    the layers, 20 for an LSTM layer, 11 and four times the width of the MLP for a decoder layer, and its mask.
    """
    hidden, group = config.hidden_size, config.num_attention_heads // config.num_key_value_heads
    layer = 11 * hidden + 4 * config.intermediate_size + group * passes * length
    values = hidden * (10 + 20 * config.num_lstm_layers) + config.num_hidden_layers * layer
    return 4 * batch * length * passes * values


def training_operations(config: Any, args: FalconTrainingArguments, size: int, tokens: int, responses: int) -> int:
    """
    Floating-point operations of training a drafter of `size` weights on `tokens`, of which `responses` are judged: a
    multiplication and an addition for each weight and token of a forward, twice these of a backward. The LM head
    scores both labels and predictions, and only these have a backward. Left out is what grows with the square of the
    length, the products of attention: some percent of the whole at the lengths of dialogues.
    """
    head = config.hidden_size * (config.draft_vocab_size or config.vocab_size)
    work = 6 * (size * tokens + head * responses) * (args.unroll_passes or 1)
    if args.glancing_ratio > 0 and config.block_size > 1:
        work += 2 * size * tokens + 4 * head * responses
    return work


def checkpoints(steps: int, steps_per_epoch: int, args: FalconTrainingArguments) -> int:
    """Checkpoints on disk at the end; one an epoch for `save_strategy="best"`, whose number is not known."""
    strategy = SaveStrategy(args.save_strategy)
    if strategy == SaveStrategy.NO:
        return 0
    every: float = steps_per_epoch
    if strategy == SaveStrategy.STEPS:
        # A fraction is a share of all steps.
        every = args.save_steps if args.save_steps >= 1 else math.ceil(args.save_steps * steps)
    written = math.ceil(steps / every)
    return min(written, args.save_total_limit or written)


def _existing(folder: str) -> Path:
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return path


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
