# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Training a drafter with transformers' Trainer."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.data import Dataset, Sampler
from transformers import (
    PreTrainedModel,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy, TrainOutput, get_last_checkpoint

from ..core.draft_options import DraftOptions
from ..core.drafter import DraftModel
from ..json_files import read_own_object
from .checkpoints import empty, prune, publish, publish_files, scratch_folder
from .csgd import (
    DistillationWeights,
    DraftBatch,
    DraftLoss,
    TrainingHeads,
    check_unrolling,
    default_recipe,
    draft_loss,
    judged_positions,
)
from .distillation import DIVERGENCES
from .estimated_tau import TOP, estimated_tau_chain, estimated_tau_tree
from .features import Features, target_features
from .muon import MuonWithAdamW
from .provenance import PROVENANCE_NAME, provenance, refuse_other_run
from .token_file import TokenFile

logger = logging.getLogger(__name__)

# Of a file that is damaged.
_REMEDY = "delete this checkpoint. Training then resumes from the one before it, if one is left."

# Beside the loss, what an evaluation has.
_LOSS_PARTS = ("regression", "distillation")
_ESTIMATES = ("estimated_tau_chain", "estimated_tau_tree")

# The index of a sample that fills up a batch: one token, with nothing to predict.
FILLER = -1


@dataclass
class FalconTrainingArguments(TrainingArguments):
    """
    Arguments of [`FalconTrainer`]: all of [`~transformers.TrainingArguments`], and

    > Parameters that control the distillation (Falcon, section 3.3; EAGLE-3)

    Args:
        regression_weight (`float`, *optional*):
            Weight of the regression of features. Defaults to 1.0, for EAGLE-3 to 0: it predicts no features.
        distillation_weight (`float`, *optional*):
            Weight of the distillation of token distributions (w_dist). Defaults to 0.1, for EAGLE-3 to 1.0.
        soft_label_share (`float`, *optional*):
            Share of the divergence in the distillation; the rest is cross-entropy with the target's token. Defaults
            to 0.9, for EAGLE-3 to 1.0.
        feature_noise (`float`, *optional*):
            Uniform noise in (-x, x) on normalised input features. Defaults to 0.1, for EAGLE-3 to 0.
        glancing_ratio (`float`, *optional*, defaults to 0.4):
            Lambda at the start; it falls to 0 at the end. 0 trains without glancing.
        unroll_passes (`int`, *optional*):
            Draft passes unrolled in training. Each reads what the pass before predicted. Defaults to 1, for EAGLE-3 to
            3.
        divergence (`str`, *optional*, defaults to `"kl"`):
            Distance between the token distributions of target and drafter: `"kl"`, `"log_overlap"`,
            `"total_variation"` or `"hybrid"`. See [`distillation_loss`].
        pass_decay (`float`, *optional*, defaults to 1.0):
            Weight of each unrolled pass in the loss, relative to the pass before.
        muon (`bool`, *optional*, defaults to `False`):
            Update matrices by Muon, and the rest by AdamW, at the same learning rate. Not with `fsdp`.

        eval_passes (`int`, *optional*):
            Draft passes unrolled on held-out samples, each with its own accuracies; `unroll_passes` if left out.

    > Parameters that control the run

    Args:
        max_minutes (`float`, *optional*):
            Save a checkpoint and stop after this many minutes; the same command resumes the run.
    """

    learning_rate: float = field(default=3e-5, metadata={"help": "Peak learning rate of AdamW."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 of AdamW."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Gradients are clipped to this norm."})
    regression_weight: float | None = field(
        default=None, metadata={"help": "Weight of the regression of features (default: 1.0; eagle3: 0)."}
    )
    distillation_weight: float | None = field(
        default=None, metadata={"help": "Weight of the token distributions (default: 0.1; eagle3: 1.0)."}
    )
    soft_label_share: float | None = field(
        default=None, metadata={"help": "Share of the divergence in the distillation (default: 0.9; eagle3: 1.0)."}
    )
    feature_noise: float | None = field(
        default=None, metadata={"help": "Uniform noise on normalised input features (default: 0.1; eagle3: 0)."}
    )
    glancing_ratio: float = field(
        default=0.4, metadata={"help": "Lambda of glancing at the start; it falls to 0 at the end."}
    )
    unroll_passes: int | None = field(
        default=None, metadata={"help": "Draft passes unrolled in training (default: 1; eagle3: 3)."}
    )
    divergence: str = field(
        default="kl", metadata={"help": f"Distance of token distributions: one of {', '.join(DIVERGENCES)}."}
    )
    pass_decay: float = field(
        default=1.0, metadata={"help": "Weight of an unrolled pass, relative to the one before."}
    )
    muon: bool = field(default=False, metadata={"help": "Update matrices by Muon instead of AdamW."})
    eval_passes: int | None = field(default=None, metadata={"help": "Draft passes unrolled on held-out samples."})
    max_minutes: float | None = field(
        default=None, metadata={"help": "Save and stop after this many minutes; the same command resumes."}
    )

    def __post_init__(self) -> None:
        # Without it, TrainingArguments refuses `bf16` where there is no accelerator.
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.save_total_limit is not None and self.save_total_limit <= 0:
            # As Trainer takes it.
            self.save_total_limit: int | None = None
        if self.greater_is_better is None and _measured(self.metric_for_best_model) in _LOSS_PARTS:
            # Trainer takes a name that does not end in "loss" for something to maximise.
            self.greater_is_better: bool | None = False
        super().__post_init__()
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"`divergence` is {self.divergence!r}: choose one of {', '.join(DIVERGENCES)}.")
        if not 0 < self.pass_decay <= 1:
            raise ValueError(f"`pass_decay` is {self.pass_decay}: give a number above 0, at most 1.")
        if self.muon and self.fsdp:
            raise ValueError("`muon` is True and `fsdp` is given: Muon needs whole matrices, leave out one of them.")
        if self.push_to_hub:
            raise ValueError(
                "`push_to_hub` is True, but Trainer would push no whole drafter: run `hf-falcon push OUTPUT_DIR "
                "user/name` after the training, which also pushes its code and card."
            )
        names = ("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size")
        for name in (*names, "unroll_passes", "eval_passes"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"`{name}` is {value}: give 1 or more.")
        for name in ("label_smoothing_factor", "neftune_noise_alpha"):
            if getattr(self, name):
                raise ValueError(f"`{name}` is {getattr(self, name)}: the loss of a drafter has no such term.")
        for name in ("learning_rate", "regression_weight", "distillation_weight", "feature_noise", "max_minutes"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise ValueError(f"`{name}` is {value}: give 0 or more.")
        for name in ("soft_label_share", "glancing_ratio"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= 1:
                raise ValueError(f"`{name}` is {value}: give a number from 0 to 1.")

    @property
    def n_gpu(self) -> int:
        """One GPU at most: several are for several processes (`torchrun`). `DataParallel` cannot split our batches."""
        return min(1, super().n_gpu)

    @property
    def samples_per_step(self) -> int:
        """Samples of one step of the optimizer, on all processes."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.world_size

    def take_defaults(self, drafter: DraftModel) -> None:
        """
        Sets the fields of the distillation that are not given.

        Args:
            drafter ([`DraftModel`]): the drafter to train.

        Raises:
            `ValueError`: for a regression or noise of features, if the drafter predicts none. For a
                `metric_for_best_model` that an evaluation of this drafter does not have.
        """
        for name, value in default_recipe(drafter).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        for name in ("regression_weight", "feature_noise"):
            if getattr(self, name) and not drafter.predicts_features:
                raise ValueError(
                    f"`{name}` is {getattr(self, name)}, but a {type(drafter).__name__} predicts no features: leave "
                    "it out."
                )
        depths = range(1, (self.eval_passes or self.unroll_passes or 1) * drafter.config.block_size + 1)
        names = ["loss", *_LOSS_PARTS, *_ESTIMATES, "tokens_per_second"]
        names += [f"top{top}_depth{depth}" for depth in depths for top in TOP]
        if (name := self.metric_for_best_model) is not None and _measured(name) not in names:
            raise ValueError(f"`metric_for_best_model` is {name!r}: choose one of {', '.join(names)}.")


class DraftSamples(Dataset):
    """Samples of a token file, cut to `max_length` tokens, with their features if these are stored."""

    def __init__(self, data: TokenFile, indices: list[int], max_length: int, stored: Features | None = None):
        self.data, self._stored, self._max_length = data, stored, max_length
        # A prompt that fills the sample leaves no response to train on.
        self._indices = [i for i in indices if int(data.prompt_lengths[i]) < max_length - 1]
        if not self._indices:
            raise ValueError(
                f"None of {len(indices):,} samples has a response within `max_length` ({max_length}) tokens: raise it."
            )
        self.lengths = [min(len(data.sample(i)[0]), max_length) for i in self._indices]
        self.prompt_lengths = [int(data.prompt_lengths[i]) for i in self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, item: int) -> dict[str, Any]:
        index, length = (self._indices[0], 1) if item == FILLER else (self._indices[item], self._max_length)
        token_ids, prompt_length = self.data.sample(index)
        sample = {"sample": index, "token_ids": token_ids[:length], "prompt_length": prompt_length}
        if item == FILLER:
            sample["sample"] = FILLER
        if self._stored is not None:
            sample["features"] = self._stored.sample(index)[:length]
        return sample


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads samples on the right; returns the fields of a [`DraftBatch`], with features only if they are stored."""
    token_ids = nn.utils.rnn.pad_sequence([sample["token_ids"] for sample in samples], batch_first=True)
    places = torch.arange(token_ids.shape[1])[None]
    lengths = torch.tensor([[len(sample["token_ids"])] for sample in samples])
    prompts = torch.tensor([[sample["prompt_length"]] for sample in samples])
    batch = {"token_ids": token_ids, "valid": places < lengths, "response": (places >= prompts) & (places < lengths)}
    batch["sample"] = torch.tensor([sample["sample"] for sample in samples])
    if "features" in samples[0]:
        batch["features"] = nn.utils.rnn.pad_sequence([s["features"] for s in samples], batch_first=True)
    return batch


class LengthGroupedSampler(Sampler[int]):
    """
    A random order in which the samples of a batch have similar lengths. It depends only on seed and epoch, so that a
    resumed run sees the same data in the same order.

    Args:
        lengths (`list[int]`): tokens of each sample.
        batch_size (`int`): samples of one step, in all processes.
        seed (`int`): the order's seed.
        size (`int`, *optional*): length of the order, which is cut, or filled up with `FILLER`.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int, size: int | None = None):
        self._lengths, self._batch_size, self._seed = torch.tensor(lengths), batch_size, seed
        self._size = len(lengths) if size is None else size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return islice(chain(self._samples(), repeat(FILLER)), self._size)

    def _samples(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(len(self._lengths), generator=generator)
        for pool in order.split(50 * self._batch_size):
            by_length = pool[self._lengths[pool].argsort(descending=True, stable=True)]
            batches = by_length.split(self._batch_size)
            # A short batch stays last, as the dataloader expects.
            last = [len(batches) - 1] if len(batches[-1]) < self._batch_size else []
            for place in torch.randperm(len(batches) - len(last), generator=generator).tolist() + last:
                yield from batches[place].tolist()


class DraftObjective(nn.Module):
    """The loss as a module, so that accelerate's wrappers (autocast, DDP) see one forward."""

    def __init__(self, drafter: DraftModel, heads: TrainingHeads, args: FalconTrainingArguments):
        super().__init__()
        self.drafter = drafter
        self.heads = heads
        self._args = args
        self._weights = DistillationWeights(
            args.regression_weight or 0.0,
            args.distillation_weight or 0.0,
            args.soft_label_share or 0.0,
            args.divergence,
            args.pass_decay,
        )

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.drafter.gradient_checkpointing_enable(**kwargs)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """As transformers calls it since 5.20."""
        self.drafter.activation_checkpointing_enable(**kwargs)

    def forward(self, batch: DraftBatch, generator: torch.Generator, glancing_ratio: float) -> DraftLoss:
        args = self._args
        return draft_loss(
            self.drafter,
            self.heads,
            batch,
            generator,
            self._weights,
            noise=(args.feature_noise or 0.0) if self.training else 0.0,
            glancing_ratio=glancing_ratio,
            passes=(None if self.training else args.eval_passes) or args.unroll_passes or 1,
        )


class FalconTrainer(Trainer):
    """
    Trains a drafter by Coupled Sequential Glancing Distillation, or by EAGLE-3's training-time test.

    Args:
        drafter ([`DraftModel`]): the drafter, in float32.
        target ([`PreTrainedModel`]): its target, which is not changed.
        args ([`FalconTrainingArguments`]): the arguments of the run.
        train_dataset, eval_dataset ([`DraftSamples`]): samples to train on, and held-out samples.
        run_arguments (`dict`, *optional*): further arguments of the run, for `provenance.json`, as JSON values.
    """

    args: FalconTrainingArguments
    control: TrainerControl

    def __init__(
        self,
        drafter: DraftModel,
        target: PreTrainedModel,
        args: FalconTrainingArguments,
        train_dataset: DraftSamples,
        eval_dataset: DraftSamples | None = None,
        run_arguments: dict[str, Any] | None = None,
    ):
        args.take_defaults(drafter)
        check_unrolling(drafter, args.unroll_passes or 1)
        if args.eval_passes is not None:
            check_unrolling(drafter, args.eval_passes, "eval_passes")
        # The batch is a structure of this module: it has no columns for Trainer to drop.
        args.remove_unused_columns = False
        args.label_names = []
        if args.save_total_limit == 1 and args.metric_for_best_model is not None:
            # The best and the last. Trainer would delete the last one at the end, and the same command would then
            # resume from the best.
            args.save_total_limit = 2
        self._target = target.eval().requires_grad_(False)
        self._drafter = drafter
        self._sums = _RunningSums()
        self._last_batch: DraftBatch | None = None
        self._uncounted_tokens = 0
        # Recorded now: files may change during the run, and the output folder is another one while it saves.
        self._provenance = {
            **provenance(target, train_dataset.data),
            "arguments": {**(run_arguments or {}), **args.to_dict()},
            "seed": args.seed,
            "samples_per_step": args.samples_per_step,
        }
        # Autocast keeps the casts of trained weights only: it would cast a float32 head for every chunk of logits.
        computed_in = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._make_heads = partial(TrainingHeads.of, drafter, target, computed_in)
        self._objective = DraftObjective(drafter, self._make_heads(), args)
        self._heads = self._objective.heads.parameters
        super().__init__(
            model=self._objective,
            args=args,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
        )
        # With this, Trainer leaves averaging over batches and processes to `compute_loss`.
        self.model_accepts_loss_kwargs = True
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(_DraftProgress())
        self.add_callback(_Epoch())
        if args.max_minutes is not None:
            self.add_callback(_TimeLimit(args.max_minutes, self._add_processes))

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """See [`~transformers.Trainer.train`]. A finished run is not continued: Trainer would add a step to it."""
        last = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        if last:
            refuse_other_run(last, self._provenance)
            state = _read_state(last)
            if self._is_finished(state):
                # Of fewer epochs than before, perhaps.
                state.max_steps = state.global_step
                self.state = state
                best = Path(last).parent / Path(state.best_model_checkpoint or last).name
                # The folder may have been moved since.
                self._load_from_checkpoint(str(best) if self.args.load_best_model_at_end and best.is_dir() else last)
                # Of the call that trained, which may have had other arguments.
                if (file := Path(last, PROVENANCE_NAME)).is_file():
                    self._provenance = read_own_object(file)
                logger.warning(f"The run is complete since step {state.global_step}: nothing is trained.")
                return TrainOutput(state.global_step, 0.0, {})
            if not Path(last, SCHEDULER_NAME).is_file():
                # Trainer would start them again, at the step of the checkpoint.
                raise ValueError(
                    f"{str(last)!r} has no optimizer and no schedule, as `save_only_model` leaves them out: it cannot "
                    "be continued. Start another run in a new `output_dir` (from its weights with `init_from`), "
                    "without `save_only_model` if it may be interrupted."
                )
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _is_finished(self, state: TrainerState) -> bool:
        if self.args.max_steps > 0:
            return state.global_step >= self.args.max_steps
        return state.epoch is not None and state.epoch >= self.args.num_train_epochs

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """See [`~transformers.Trainer.create_optimizer`]. With `muon`, heads are updated by AdamW all the same."""
        if not self.args.muon:
            return super().create_optimizer(model)
        args = self.args
        optimizer = MuonWithAdamW.of(
            self._drafter,
            self._heads,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        self.optimizer = optimizer
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """See [`~transformers.Trainer.get_decay_parameter_names`], which knows no list of norms by its name."""
        names: list[str] = super().get_decay_parameter_names(model)
        # Without decay, the groups stay as they are in the checkpoints of earlier versions.
        return [name for name in names if ".norms." not in name] if self.args.weight_decay else names

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> LengthGroupedSampler:
        # Smaller than the argument where `auto_find_batch_size` has lowered it.
        return self._sampler(self.train_dataset, self._train_batch_size, self.args.gradient_accumulation_steps)

    def _get_eval_sampler(self, eval_dataset: Any) -> LengthGroupedSampler:
        return self._sampler(eval_dataset, self.args.eval_batch_size, is_held_out=True)

    def _sampler(
        self, samples: DraftSamples, batch_size: int, accumulated: int = 1, is_held_out: bool = False
    ) -> LengthGroupedSampler:
        """The same samples in each step, however many processes and accumulated batches share them."""
        processes, size = self.args.world_size, len(samples)
        step = batch_size * processes * accumulated
        drops = self.args.dataloader_drop_last
        if drops and not is_held_out:
            size -= size % step
        # The loader would drop held-out samples as well.
        elif processes > 1 or drops:
            # Otherwise accelerate fills it up with samples of the next batches, which would count twice.
            size += -size % (batch_size * processes)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return LengthGroupedSampler(samples.lengths, step, seed, size)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """See [`~transformers.Trainer.get_batch_samples`]. The items are the loss positions of all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        judged = sum((self._judged(batch) for batch in batches), torch.tensor(0.0))
        # A step without loss positions has no loss, but is a step.
        return batches, self._add_processes(judged).clamp_min(1)

    def _judged(self, inputs: dict[str, Tensor]) -> Tensor:
        return judged_positions(inputs["response"], inputs["valid"], self._drafter.config.block_size).sum().float()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """See [`~transformers.Trainer.compute_loss`]."""
        features = inputs.get("features")
        if features is None:
            features = target_features(
                self._target, inputs["token_ids"], inputs["valid"], self._drafter.config.feature_layers
            )
        batch = DraftBatch(features, inputs["token_ids"], inputs["valid"], inputs["response"], inputs["sample"])
        # Random draws depend only on step and sample, so that a resumed run makes the same draws.
        step = self.state.global_step
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        ratio = self.args.glancing_ratio * (1 - step / max(1, self.state.max_steps)) if model.training else 0.0
        result = model(batch, generator, ratio)
        if not math.isfinite(result.loss.item()):
            raise self._broken(f"The loss is {result.loss.item()}", batch)
        if model.training:
            self._last_batch = batch
        tokens = int(inputs["valid"][inputs["sample"] != FILLER].sum())
        # The weight of this batch in the mean over all loss positions of its step, or of the held-out samples.
        weight, loss = self._judged(inputs), result.loss
        if num_items_in_batch is not None:
            weight = weight / num_items_in_batch
            # Gradients and losses of processes are averaged, not added.
            loss = loss * weight * self.args.world_size
        self._sums.add(result, weight, tokens)
        self._uncounted_tokens += tokens if model.training else 0
        return (loss, {"loss": loss}) if return_outputs else loss

    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """
        Loss parts, accuracy by depth and estimated tau on held-out samples; `ignore_keys` is ignored.

        See [`estimated_tau_chain`] and [`estimated_tau_tree`] (with as many nodes as the drafter's own trees) for the
        assumptions of the estimates. They include only the depths of `eval_passes` passes.
        """
        training_sums, self._sums = self._sums, _RunningSums()
        self.model.eval()
        with torch.no_grad():
            for inputs in self.get_eval_dataloader(eval_dataset):
                with self.compute_loss_context_manager():
                    self.compute_loss(self.model, self._prepare_inputs(inputs))
        parts = self._sums.take(self._add_processes)
        accuracy = list(zip(*(_by_depth(parts, f"top{top}") for top in TOP)))
        nodes = DraftOptions.from_generation_config(self._drafter.generation_config).num_assistant_tokens
        parts["estimated_tau_chain"] = round(estimated_tau_chain(accuracy), 5)
        parts["estimated_tau_tree"] = round(estimated_tau_tree(accuracy, nodes), 5)
        weights = self.args.regression_weight or 0.0, self.args.distillation_weight or 0.0
        parts["loss"] = weights[0] * parts["regression"] + weights[1] * parts["distillation"]
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in parts.items()}
        self.model.train()
        self._sums = training_sums
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the parts of the loss and the accuracy by depth to the logs of Trainer."""
        if "loss" in logs:
            logs = {**logs, **self._sums.take(self._add_processes)}
        super().log(logs, start_time)

    def _add_processes(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values.to(self.args.device), "sum")

    def _broken(self, problem: str, batch: DraftBatch) -> FloatingPointError:
        """Saves the batch for inspection, and returns the error that stops the run."""
        step, process = self.state.global_step, self.args.process_index
        name = f"nan_batch_step_{step}" + (f"_process_{process}" if process else "")
        path = os.path.join(self.args.output_dir, f"{name}.safetensors")
        os.makedirs(self.args.output_dir, exist_ok=True)
        save_file({field: tensor.detach().cpu().contiguous() for field, tensor in vars(batch).items()}, path)
        return FloatingPointError(
            f"{problem} at step {step}: lower `learning_rate` ({self.args.learning_rate}) and resume from the last "
            f"checkpoint. The batch is kept in `{path}`."
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # A step can break the weights while its loss is finite; a checkpoint of these weights would be useless.
        if self._last_batch is not None and not all(p.isfinite().all() for p in self._drafter.parameters()):
            raise self._broken("The drafter has weights that are not finite", self._last_batch)
        args, name = self.args, f"checkpoint-{self.state.global_step}"
        place = Path(args.output_dir, name)
        scratch = scratch_folder(args.output_dir)
        if args.should_save:
            empty(scratch)
        self.accelerator.wait_for_everyone()
        # Trainer writes file by file, and deletes old checkpoints before the new one is complete. So it writes to
        # another folder, and the rest follows once the checkpoint is in its place.
        self.args = copy.copy(args)
        self.args.output_dir, self.args.save_total_limit = str(scratch), None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args = args
        # By its step: the run's folder can have been moved, or be named in another way, since it was saved.
        best = Path(args.output_dir, f"checkpoint-{self.state.best_global_step}")
        if best == place or best.is_dir():
            self.state.best_model_checkpoint = str(best)
        self.accelerator.wait_for_everyone()
        if args.should_save:
            self.state.save_to_json(str(scratch / name / TRAINER_STATE_NAME))
            publish(scratch / name, place)
            prune(args.output_dir, args.save_total_limit, {str(place), str(self.state.best_model_checkpoint)})
            shutil.rmtree(scratch)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """See [`~transformers.Trainer.save_model`]. Also sums up the tokens seen, as all processes call this."""
        tokens = self._add_processes(torch.tensor([self._uncounted_tokens]))
        self.state.num_input_tokens_seen += int(tokens)
        self._uncounted_tokens = 0
        super().save_model(output_dir, _internal_call)

    def save_state(self) -> None:
        """See [`~transformers.Trainer.save_state`]. A killed process leaves a whole file."""
        if self.is_world_process_zero():
            path = Path(self.args.output_dir, TRAINER_STATE_NAME)
            self.state.save_to_json(f"{path}.tmp")
            os.replace(f"{path}.tmp", path)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        rates = [group.get("initial_lr") for group in self.optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        if None in rates:
            # The rate goes by the loss.
            return
        # A checkpoint has the rates of the call that saved it; this call's may be lower, after a loss of nan.
        self.lr_scheduler.base_lrs = rates
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if group["initial_lr"]:
                group["lr"] *= rate / group["initial_lr"]
            group["initial_lr"] = rate

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        # The weights of a checkpoint are a complete drafter; Trainer would also pickle its arguments.
        folder = Path(output_dir or self.args.output_dir)
        if not self.args.should_save:
            return
        # The run's folder may hold an earlier drafter, which stays complete until the new one is.
        scratch = scratch_folder(folder)
        empty(scratch)
        if state_dict is not None:
            # The state of the objective, which FSDP gathered from all processes.
            state_dict = {name.removeprefix("drafter."): tensor for name, tensor in state_dict.items()}
        self._drafter.save_pretrained(scratch, state_dict=state_dict)
        progress = {"steps": self.state.global_step, "tokens_seen": self.state.num_input_tokens_seen}
        text = json.dumps({**self._provenance, **progress}, indent=2, default=str)
        (scratch / PROVENANCE_NAME).write_text(text + "\n", encoding="utf-8")
        publish_files(scratch, folder)
        shutil.rmtree(scratch)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        file = os.path.join(resume_from_checkpoint, "model.safetensors")
        try:
            weights: dict[str, Any] = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"`{file}` cannot be read ({error}): {_REMEDY}") from error
        # `load_state_dict` cannot load into FSDP's shards.
        set_model_state_dict(self._drafter, weights, options=StateDictOptions(full_state_dict=True))
        # The heads may hold the ids of another draft vocabulary than the checkpoint's.
        self._objective.heads = self._make_heads()


def _measured(name: str | None) -> str:
    """The name of a metric without the prefix of an evaluation, which Trainer adds where it is left out."""
    return (name or "").removeprefix("eval_")


def _read_state(checkpoint: str) -> TrainerState:
    file = os.path.join(checkpoint, TRAINER_STATE_NAME)
    try:
        return TrainerState.load_from_json(file)
    except (ValueError, TypeError) as error:
        raise ValueError(f"`{file}` cannot be read ({error}): {_REMEDY}") from error


class _RunningSums:
    """Sums of the loss parts and of hits by depth since the last call of `take`."""

    def __init__(self) -> None:
        # Of losses and weight, of positions by depth, and of hits.
        self._sums: list[Tensor] | None = None
        self._tokens = 0
        self._since = time.perf_counter()

    @torch.no_grad()
    def add(self, result: DraftLoss, weight: Tensor, tokens: int) -> None:
        losses = weight * torch.stack((result.regression, result.distillation, torch.ones_like(weight)))
        new = [losses.detach(), result.counts, result.correct]
        self._sums = new if self._sums is None else [before + more for before, more in zip(self._sums, new)]
        self._tokens += tokens

    def take(self, add_processes: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Weighted means over all batches; `add_processes` adds up the sums of all processes. Resets the sums."""
        sums, tokens, seconds = self._sums, self._tokens, time.perf_counter() - self._since
        self.__init__()  # type: ignore[misc]
        if sums is None:
            return {}
        losses, counts, correct = sums
        local = [losses, counts.new_tensor([tokens]), counts, correct.flatten()]
        values = add_processes(torch.cat([part.float() for part in local])).cpu()
        regression, distillation, weight, tokens = values[:4].tolist()
        metrics = {
            "regression": regression / (weight or 1),
            "distillation": distillation / (weight or 1),
            "tokens_per_second": tokens / seconds,
        }
        depths = len(counts)
        hits = values[4 + depths :].view(depths, -1) / values[4 : 4 + depths, None].clamp_min(1)
        for depth, row in enumerate(hits.tolist(), start=1):
            metrics |= {f"top{top}_depth{depth}": share for top, share in zip(TOP, row)}
        return {name: round(value, 5) for name, value in metrics.items()}


def _by_depth(metrics: dict[str, float], name: str) -> list[float]:
    """The values of `name_depth1`, `name_depth2`, ..."""
    found: list[float] = []
    while f"{name}_depth{len(found) + 1}" in metrics:
        found.append(metrics[f"{name}_depth{len(found) + 1}"])
    return found


class _DraftProgress(ProgressCallback):
    """Trainer's progress bar, with the loss and the accuracy by depth. A resumed run begins where it was."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.current_step = state.global_step
        if (bar := self.training_bar) is not None:
            # tqdm would count the steps before as steps of the first moments.
            bar.initial = bar.n = bar.last_print_n = state.global_step
            bar.refresh()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs and "loss" in logs:
            shown = {"loss": f"{logs['loss']:.3f}"}
            for depth, (top1, top3) in enumerate(zip(_by_depth(logs, "top1"), _by_depth(logs, "top3")), start=1):
                shown[f"d{depth}"] = f"{100 * top1:.0f}/{100 * top3:.0f}%"
            self.training_bar.set_postfix(shown)


class _Epoch(TrainerCallback):
    """Sets the epoch of the sampler: accelerate does not where one of several processes skips batches."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        train_dataloader.set_epoch(int(state.epoch))


class _TimeLimit(TrainerCallback):
    """Saves and stops all processes at one step, when the first reaches the time limit: else some would wait."""

    def __init__(self, minutes: float, add_processes: Callable[[Tensor], Tensor]):
        self._end = time.monotonic() + 60 * minutes
        self._add_processes = add_processes

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._add_processes(torch.tensor(int(time.monotonic() > self._end))) > 0:
            control.should_save = True
            control.should_training_stop = True
            if args.save_strategy == SaveStrategy.BEST:
                # An evaluation would decide whether to save.
                control.should_evaluate = False
