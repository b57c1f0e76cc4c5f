# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The interfaces of the core: what the candidate generator asks of a drafter, and where the installed package plugs in:
with faster ways to run the target and the drafter, and with the checks of a drafter's files.

A drafter has three parts. The [`Drafter`] is the model itself. Its [`DraftHead`] turns states into logits over the
draft vocabulary; all sequences of a call share it. A [`DraftSession`] drafts for one sequence: it commits accepted
positions, and runs draft passes. A state is the vector of a drafted position that the head reads and the next pass
continues from; what is in it is the drafter's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel


class DraftedBlocks(NamedTuple):
    """
    The blocks that a draft pass continues: the paths that the tree keeps of the pass before.

    Args:
        blocks (`torch.LongTensor` of shape `(width,)`): the block of the pass before that each path runs through.
        token_ids (`torch.LongTensor` of shape `(width, block_size)`): its tokens there, in the target's vocabulary.
        states (`torch.Tensor` of shape `(width, block_size, state_size)`): the states that led to these tokens.
    """

    blocks: Tensor
    token_ids: Tensor
    states: Tensor


class DraftHead(Protocol):
    """
    The head of a drafter, its own or the target's.

    Attributes:
        draft_vocab_size (`int`): tokens that it scores.
        vocab_ids (`torch.LongTensor` of shape `(draft_vocab_size,)`, *optional*):
            Their ids in the target's vocabulary; `None` if they are the target's vocabulary.
        linear (`torch.nn.Linear`, *optional*): the layer that computes the logits, which a backend may run faster.
    """

    @property
    def draft_vocab_size(self) -> int:
        """See [`DraftHead`]."""

    @property
    def vocab_ids(self) -> Tensor | None:
        """See [`DraftHead`]."""

    @property
    def linear(self) -> nn.Linear | None:
        """See [`DraftHead`]."""

    def logits(self, states: Tensor) -> Tensor:
        """Logits of shape `(..., draft_vocab_size)` for `states` of shape `(..., state_size)`."""

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Converts `draft_ids` of the draft vocabulary to ids of the target's vocabulary."""

    def for_tokens(self, token_ids: Tensor) -> DraftHead | None:
        """
        The same head over other tokens of the target's vocabulary. It is asked for if there are `vocab_ids`.

        Args:
            token_ids (`torch.LongTensor` of shape `(tokens,)`): the tokens, on the host.

        Returns:
            [`DraftHead`], or `None` if the head has no weights for them.
        """


class DraftSession(Protocol):
    """
    A drafter while it drafts for one sequence of a `generate` call.

    Attributes:
        is_conditional (`bool`): whether `condition` changes states.
    """

    @property
    def is_conditional(self) -> bool:
        """See [`DraftSession`]."""

    def commit(
        self, features: Tensor, next_token_ids: Tensor, first_position: int = 0, prompt_embeds: Tensor | None = None
    ) -> Tensor | None:
        """
        Takes positions that are certain, and drafts the block behind them: the first draft pass of a round.

        Args:
            features (`torch.Tensor` of shape `(1, new, (1 + feature_layers) * target_hidden_size)`):
                The target's features of the new positions: its last hidden state, after the final norm, followed by
                the outputs of the layers `drafter.config.feature_layers`. If these are `None`, features are empty.
            next_token_ids (`torch.LongTensor` of shape `(1, new)`):
                The token after each of these positions. If the features are empty, the first call gets the whole text.
            first_position (`int`, *optional*, defaults to 0):
                Position of the first feature of all; counts in the first call only.
            prompt_embeds (`torch.Tensor` of shape `(1, length, hidden_size)`, *optional*):
                The prompt's embeddings, where it has no tokens: `next_token_ids` then are fewer, those at the end.

        Returns:
            `torch.Tensor` of shape `(1, block_size, state_size)`: states of the next tokens, or `None` where too few
            positions are known.
        """

    def rewind(self) -> None:
        """Drops all that was drafted after the last `commit`. Each round of drafting starts with it."""

    def extend(self, drafted: DraftedBlocks) -> Tensor:
        """
        Runs one more draft pass, over paths of the pass before.

        Args:
            drafted ([`DraftedBlocks`]):
                The paths. With `verification` "multi_root" the states of a round's first pass are features of the
                target, as `commit` takes them.

        Returns:
            `torch.Tensor` of shape `(width, block_size, state_size)`: states of the tokens behind each path.
        """

    def condition(self, states: Tensor, previous_token_ids: Tensor) -> Tensor:
        """
        Makes states depend on the token before the token that they lead to.

        Args:
            states (`torch.Tensor` of shape `(rows, state_size)`): states of one place in a block.
            previous_token_ids (`torch.LongTensor` of shape `(rows,)`): the token before.

        Returns:
            `torch.Tensor` of the shape of `states`; `states` itself unless `is_conditional`.
        """


class Drafter(Protocol):
    """
    A drafter, as the decoding loop uses it. [`DraftModel`] is one that transformers takes as an assistant.

    Attributes:
        config: has `block_size` (tokens that a pass proposes), `feature_layers` (layers of the target whose outputs
            it reads, counted from 0; -1 is the input of the first; `None` for a drafter that reads the text alone),
            `target_name_or_path` and `target_fingerprint`.
        generation_config ([`~transformers.GenerationConfig`]): the drafting options.
        device (`torch.device`): where it runs.
        max_draft_passes (`int`, *optional*):
            Draft passes that it can run in a round, the one of `commit` included; `None` without a limit. With 1, no
            session is asked to `extend`; with 0, no session is asked at all, and what is looked up is the draft.
    """

    config: Any
    generation_config: GenerationConfig
    max_draft_passes: int | None

    @property
    def device(self) -> torch.device:
        """See [`Drafter`]."""

    def check_target(self, target: PreTrainedModel) -> None:
        """Raises a `ValueError` that names the field, if it cannot draft for `target`."""

    def make_head(self, target: PreTrainedModel) -> Any:
        """Returns a [`DraftHead`], for one call of the `generate` of `target`."""

    def start_session(self, head: Any, acceleration: DrafterAcceleration) -> DraftSession:
        """
        Starts to draft for one sequence.

        Args:
            head ([`DraftHead`]): what `make_head` returned.
            acceleration ([`DrafterAcceleration`]): how its layers run.

        Returns:
            [`DraftSession`]: for one `generate` call.
        """


class TargetAcceleration:
    """
    How the target's forwards of one `generate` call run: as they are.

    Attributes:
        sizes (`tuple[int, ...]`): numbers of nodes that forwards are compiled for, in ascending order.
        is_packed (`bool`): whether the target's weights are packed.
        wants_static_shapes (`bool`): whether the cache has the same shapes and addresses in every round.
    """

    sizes: tuple[int, ...] = ()
    is_packed: bool = False
    wants_static_shapes: bool = False

    def padded_size(self, nodes: int) -> int:
        """Nodes that a tree of `nodes` nodes is padded to before it is scored."""
        return nodes

    def reading(self) -> AbstractContextManager[object]:
        """Inside, the target reads the prompts."""
        return nullcontext()

    def scoring(self, cache: Cache, masks: Iterable[Tensor]) -> AbstractContextManager[object]:
        """
        Inside, the target scores a tree.

        Args:
            cache ([`Cache`]): the target's cache.
            masks (iterable of `torch.Tensor` of shape `(batch, 1, nodes, slots)`): the masks that the forward gets.
        """
        return nullcontext()


class DrafterAcceleration:
    """
    How the drafter's passes of one `generate` call run: as they are.

    Args:
        drafter ([`Drafter`]): the drafter.

    Attributes:
        head ([`DraftHead`], *optional*): a faster head than the one that the call would make.
        wants_static_shapes (`bool`): see [`TargetAcceleration`]; of the drafter's cache.
    """

    head: Any = None
    wants_static_shapes: bool = False

    def __init__(self, drafter: Any):
        self.drafter = drafter

    def drafting(self, head: DraftHead) -> AbstractContextManager[object]:
        """Inside, the drafter runs passes whose logits come from `head`."""
        return nullcontext()

    @property
    def run_layers(self) -> Callable[..., Tensor]:
        """The drafter's layers; see [`FalconDraftNetwork.run_layers`]."""
        return self.drafter.run_layers


def target_acceleration(
    target: PreTrainedModel, is_batch: bool = False, reads_layers: bool = False
) -> TargetAcceleration:
    """
    How the target's forwards run. The core runs without any backend: a drafter loaded as custom code has none.

    Args:
        target ([`PreTrainedModel`]): the target.
        is_batch (`bool`): whether the call has several rows.
        reads_layers (`bool`): whether the call reads the outputs of single layers.
    """
    backend = part("backend")
    return TargetAcceleration() if backend is None else backend.for_target(target, is_batch, reads_layers)


def drafter_acceleration(drafter: Drafter, target: PreTrainedModel) -> DrafterAcceleration:
    """How the drafter's passes run."""
    backend = part("backend")
    return DrafterAcceleration(drafter) if backend is None else backend.for_drafter(drafter, target)


class DrafterFiles:
    """
    How the files of a Falcon drafter are read and saved: as transformers does. So it is for code from the Hub, which
    comes from where the files come from. The installed package checks files of strangers, and saves the code, too.
    """

    def check_config(self, config: Any, others: dict[str, Any]) -> None:
        """
        Checks a new configuration.

        Args:
            config ([`FalconDraftConfig`]): the configuration, with all its own fields.
            others (`dict`): fields of [`~transformers.PreTrainedConfig`]; those that a drafter does not need go.

        Raises:
            `ValueError`: for a field out of range or of another type.
        """

    def read_config(self, read: Callable[..., Any], name: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Calls `read(name, **kwargs)`, which is [`PreTrainedConfig.get_config_dict`]."""
        return read(name, **kwargs)

    def reading(self, name: str) -> AbstractContextManager[object]:
        """Inside, transformers reads the file of this name."""
        return nullcontext()

    def fields_for(self, target: Any) -> dict[str, Any]:
        """
        The fields of a new drafter for a target; see [`FalconDraftConfig.from_target`].

        Raises:
            `RuntimeError`: without the installed package, which makes new drafters.
        """
        raise RuntimeError("A new drafter needs the installed package: `pip install hf-falcon`, and import it.")

    def difference(self, drafter: Any, target: PreTrainedModel) -> str | None:
        """A sentence that says how the target's weights differ from those that the drafter was trained for."""
        return None

    def check_loaded(self, name: Any, problems: Any) -> None:
        """Checks a model that was loaded; `problems` has names of weights by kind, as transformers reports them."""

    def check(self, model_class: Any, name: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Checks a folder or a repository. Returns the arguments of `from_pretrained` that load what was checked."""
        return kwargs

    def complete(self, model: Any, folder: Any) -> None:
        """Completes the folder that a drafter was saved to."""

    def push(self, model: Any, repo_id: str, **kwargs: Any) -> str:
        """See [`FalconDraftModel.push_to_hub`]."""
        return PreTrainedModel.push_to_hub(model, repo_id, **kwargs)


# Decodes a call's rows: its run, its `Batch`, whether ended rows leave the cache. Returns a `StatisticsRecorder`.
RowsDecoder = Callable[[Any, Any, bool], Any]
_parts: dict[str, Any] = {"files": DrafterFiles()}


def register_part(name: str, part: Any) -> None:
    """
    Takes a part of the loop that the installed package has, and code from the Hub does without.

    Args:
        name (`str`):
            "backend": see [`~cpu.backend.CpuBackend`]. "files": [`DrafterFiles`] of every later Falcon drafter.
            "chains": a class as [`TargetRun`] that scores chains. "batches": a class as [`Batch`] for several rows.
            "static": makes the tree of `draft_tree`. "layer_outputs": a class as [`NoLayerOutputs`]. "near_ties": a
            class that records which greedy tokens rounding could have decided. "quantised": gives the reason why a
            quantised target is decoded plainly, or `None`. "prior": gives the costs that were measured for a target, a
            better guess than the core's, or `None`. "verdicts": remembers targets that take trees. "lookup": called
            with `(drafter, target)`, it returns what looks up how a sequence goes on (`TextLookup`). "speculative" and
            "multi_root", values of the option `verification`: called with `(drafter, target, options,
            logits_processor)`, they return a `RowsDecoder`. "constrain": called with `(generator, sequence)` of a row,
            it tells the drafter which tokens the call's processors allow. "learning": gives for a drafter and a target
            the observer of a call, a [`CallRecorder`], or a context manager of `None`.
        part: the part.
    """
    _parts[name] = part


def part(name: str) -> Any:
    """What was registered with [`register_part`], or `None`."""
    return _parts.get(name)


def drafter_files() -> DrafterFiles:
    """How every Falcon drafter of this process is read and saved."""
    files: DrafterFiles = _parts["files"]
    return files


def needed_part(name: str, option: str, remedy: str) -> Any:
    """
    As `part`, for the value `name` of an option.

    Raises:
        `ValueError`: if nothing was registered; it names the option and the remedy.
    """
    if name not in _parts:
        raise ValueError(f"`{option}` is {name!r}: {remedy}, or `pip install hf-falcon` and import it.")
    return _parts[name]
