# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The student: a copy of the drafter in float32 that is trained with the losses of `hf_falcon.training`."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.draft_options import DraftOptions
from ..core.drafter import DraftModel
from ..training.csgd import (
    DistillationWeights,
    DraftBatch,
    DraftLoss,
    TrainingHeads,
    default_recipe,
    draft_loss,
    judged_positions,
)
from .options import LearningOptions
from .replay_buffer import MOST_ROWS, CallRecord

# Draft passes in comparisons, at most: rounds rarely have more.
_MOST_PASSES = 3
# Of a Falcon drafter one pass is trained: a second one costs as much as the same tokens of other texts. Its weights
# of the loss are those with which the fewest tokens made an instant drafter better (SmolLM2-135M; `hf-falcon train`
# has ten times the regression, and many more tokens).
_PASSES, _REGRESSION, _DISTILLATION = 1, 0.1, 1.0
# Of a held-out text as many positions of the prompt are read at most, and twice as many new tokens are predicted.
_SCORED_ROWS = 32
# Steps in which the learning rate rises, and the norm that gradients are clipped to, as in `hf-falcon train`.
_WARM_UP, _GRADIENT_NORM = 10, 0.5
# What AdamW has in `hf-falcon train`.
_BETAS, _EPSILON = (0.9, 0.95), 1e-8


def unsupported_reason(drafter: Any) -> str | None:
    """Why a drafter cannot learn, with the remedy; `None` if it can."""
    name = type(drafter).__name__
    if not isinstance(drafter, DraftModel):
        # Its calls run the code of its repository, which tells nobody what the target computes.
        return f"a {name} is no drafter of this package. For one of the Hub, `import hf_falcon` before you load it"
    parts = ("predicts_features", "fuse", "run_layers", "condition")
    if drafter.max_draft_passes is not None or not all(hasattr(drafter, part) for part in parts):
        return (
            f"a {name} has no weights that this package trains: give a drafter of Falcon or EAGLE-3, or attach it "
            "without `learn`"
        )
    return None


class Student:
    """
    A copy of a drafter that learns.

    Args:
        drafter ([`DraftModel`]): the drafter; it stays as it is.
        options ([`LearningOptions`]): see there.

    Attributes:
        start (`dict[str, torch.Tensor]`): the weights that learning began with, as the drafter had them.
        steps (`int`): steps of the optimizer.
        positions (`int`): predicted tokens that were learnt from.
    """

    def __init__(self, drafter: DraftModel, options: LearningOptions):
        self._options = options
        self._model = trainable_copy(drafter)
        # For comparisons: it has the weights of the drafter, or of the student as the drafter would have them.
        self._scored = trainable_copy(drafter).requires_grad_(False).eval()
        self._dtype = drafter.dtype
        # A drafter in float32 whose values fit bfloat16 keeps that: compiled code may read them in two bytes.
        self._fits_bfloat16 = self._dtype == torch.float32 and all(
            torch.equal(each, each.bfloat16().float()) for each in self._model.parameters()
        )
        self.start = self.weights()
        self.optimizer = self._new_optimizer()
        self.steps, self.positions = 0, 0
        self._judged = 0
        self._chance = random.Random(options.seed)
        self._passes = 1
        if getattr(drafter.config, "num_lstm_layers", 0) == 0:
            passes = DraftOptions.from_generation_config(drafter.generation_config).num_draft_passes
            self._passes = min(_MOST_PASSES, passes)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trained weights, in float32, by their names."""
        return dict(self._model.named_parameters())

    @property
    def step_is_full(self) -> bool:
        """Whether gradients of enough tokens are there for a step."""
        return self._judged >= self._options.step_tokens

    def weights(self) -> dict[str, Tensor]:
        """The weights as the drafter would have them, on the drafter's device."""
        return {name: self._rounded(parameter.detach()) for name, parameter in self._model.named_parameters()}

    def halfway(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights in the middle, between the start's and others, as the drafter would have them."""
        return {
            name: self._rounded(torch.lerp(start.float(), weights[name].float(), 0.5))
            for name, start in self.start.items()
        }

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes weights, and forgets what the optimizer has accumulated."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(weights[name])
                parameter.grad = None
        self.optimizer, self._judged = self._new_optimizer(), 0

    def learn(self, record: CallRecord, target: PreTrainedModel) -> None:
        """Adds the gradients of a part of a record."""
        if record.rejected and self._chance.random() < self._options.rejected:
            batch = record.rejected_batch(self._model.device, self._chance)
        else:
            last = max(0, len(record.token_ids) - MOST_ROWS)
            batch = record.batch(self._model.device, self._chance.randint(min(last, record.prompt_length), last))
        judged = int(judged_positions(batch.response, batch.valid, self._model.config.block_size).sum())
        if judged == 0:
            return
        # A target in bfloat16 runs where products in bfloat16 are fast: twice as fast as in float32 on two cores.
        precision = torch.autocast(self._model.device.type, torch.bfloat16, target.dtype == torch.bfloat16)
        with learning_mode(self._model.device), torch.enable_grad(), precision:
            seed = self._options.seed * 1_000_003 + self.steps * 1009 + record.number
            noise = default_recipe(self._model)["feature_noise"]
            passes = _PASSES if self._model.predicts_features else self._passes
            loss = self._loss(self._model, batch, target, seed, noise, passes).loss
            (loss * (judged / self._options.step_tokens)).backward()
        self._judged += judged
        self.positions += judged

    def step(self) -> bool:
        """One step of the optimizer. Returns whether the weights are finite after it; if not, `load` others."""
        with learning_mode(self._model.device):
            trained = [each for each in self._model.parameters() if each.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, _GRADIENT_NORM)
            for group in self.optimizer.param_groups:
                group["lr"] = self._options.learning_rate * min(1.0, (self.steps + 1) / _WARM_UP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            self._judged = 0
            return all(bool(each.isfinite().all()) for each in trained)

    def score(self, record: CallRecord, weights: Mapping[str, Tensor], target: PreTrainedModel) -> Tensor:
        """
        How often the target's token is among the first choices along a held-out record.

        Returns:
            `torch.Tensor` of shape `(depths, 4)`, on the host: hits among the first 1, 3 and 8 choices, and trials.
        """
        with learning_mode(self._model.device), torch.no_grad():
            for name, parameter in self._scored.named_parameters():
                parameter.copy_(weights[name])
            batch = record.batch(self._scored.device, max(0, record.prompt_length - _SCORED_ROWS), 3 * _SCORED_ROWS)
            found = self._loss(self._scored, batch, target, record.number, 0.0, self._passes)
            return torch.cat((found.correct, found.counts[:, None]), dim=1).cpu()

    def _loss(
        self, model: Any, batch: DraftBatch, target: PreTrainedModel, seed: int, noise: float, passes: int
    ) -> DraftLoss:
        regression = _REGRESSION if model.predicts_features else 0.0
        weights = DistillationWeights(regression, _DISTILLATION, default_recipe(model)["soft_label_share"])
        # Made anew: the target may have changed. Rows of its head that were copied before are found again.
        dtype = target.dtype if target.dtype in (torch.float32, torch.bfloat16) else torch.float32
        heads = TrainingHeads.of(model, target, dtype)
        generator = torch.Generator().manual_seed(seed)
        return draft_loss(model, heads, batch, generator, weights, noise, passes=passes)

    def _rounded(self, values: Tensor) -> Tensor:
        return (values.bfloat16() if self._fits_bfloat16 else values).to(self._dtype, copy=True)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        # It imports torch's Muon, which a drafter that does not learn does without.
        from ..training.muon import MuonWithAdamW

        heads = [] if self._model.predicts_features else [self._model.lm_head.weight]
        rate = self._options.learning_rate
        return MuonWithAdamW.of(self._model, heads, lr=rate, betas=_BETAS, eps=_EPSILON)


def trainable_copy(drafter: DraftModel) -> Any:
    """A copy of a drafter in float32, with ordinary layers and parameters that take gradients."""
    with torch.inference_mode(False):
        model: Any = copy.deepcopy(drafter).float()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    # A clone: what was made in inference mode takes no gradient.
                    module._parameters[name] = torch.nn.Parameter(parameter.detach().clone())
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.detach().clone()
        if getattr(model, "embed_tokens", None) is not None:
            model.embed_tokens.requires_grad_(False)
        return model.train()


@contextmanager
def learning_mode(device: torch.device) -> Iterator[None]:
    """Inside, tensors may take gradients, whatever the caller's mode is; on a device, in a stream of its own."""
    # Batches and random numbers are made on the CPU, whatever the caller's default device is.
    is_default = torch.get_default_device().type == "cpu"
    with torch.inference_mode(False), nullcontext() if is_default else torch.device("cpu"):
        if device.type != "cuda":
            yield
            return
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        stream = _streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        # Its time is counted, and the weights are read by others.
        stream.synchronize()


_streams: dict[torch.device, Any] = {}
