# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A drafter without training and without data: copies of the target's last layers, fitted to its own responses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import transformers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.configuration_falcon_draft import FalconDraftConfig, field_of
from ..core.draft_session import head_parameters
from ..core.drafter import FalconDraftModel
from ..core.target_parts import decoder_layers
from . import context_bonuses
from .features import MemoryFeatures, feature_statistics, set_feature_statistics
from .own_prompts import PROMPTS
from .start import error_of_copies, like_last_layer, start_falcon
from .token_file import TokenFile

# Of the responses, this share fits the bonuses and the calibration, which the copies and the map must not have seen.
_HELD_OUT = 6
# Equal tokens that bonuses tell apart, at most; depths that are calibrated.
_EQUAL, _DEPTHS = 4, 3
# Tokens of the draft vocabulary, for targets that have many more.
_VOCABULARY = 16384
# Of the responses' positions, one in so many tells which tokens the target writes.
_VOCABULARY_STRIDE = 4
_LONGEST_PROMPT = 512
# Prompts that the target responds to at once.
_AT_ONCE = 48
_NO_COPIES = (
    "its last layers cannot be copied into a drafter, which has layers of the kind of Llama, Mistral, Qwen 2 and 3, "
    "and Gemma 2 and 3 (causal attention with rotary positions, RMS norms, a gated MLP), and not recurrent ones, "
    "fused projections or mixtures of experts"
)
_OTHERS = (
    ' Draft without one (`assistant_model="lookup"`), with a smaller model of the same kind (its name as '
    "`assistant_model`), or train one: `hf-falcon train`."
)


@torch.no_grad()
def instant_drafter(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    prompts: Sequence[str] | None = None,
    num_draft_layers: int = 2,
    feature_layers: Sequence[int] | None = None,
    draft_vocab_size: int | None = None,
    max_new_tokens: int = 96,
    seed: int = 0,
    progress: bool = True,
) -> FalconDraftModel:
    """
    Makes a Falcon drafter for a target in about the time of some responses, without a training step and without data.

    The target responds to some prompts. The drafter's layers are copies of the target's last ones, and its fusion is
    the least-squares map from what it knows to what these layers read ([`start_falcon`]). Tokens of the draft
    vocabulary, `context_bonuses` and `draft_calibration` come from the same responses. `hf-falcon train --init_from`
    continues from the saved drafter.

    Args:
        target ([`PreTrainedModel`]): a decoder whose last layers are of the kind of Llama, Qwen or Gemma 3.
        tokenizer ([`PreTrainedTokenizerBase`], *optional*):
            Its tokenizer; by default the one of the target's name or folder. Without a chat template, as for a base
            model, a prompt is the text itself.
        prompts (sequence of `str`, *optional*):
            Users' messages like those of your use, at least 8. By default some 100 of the package's own.
        num_draft_layers (`int`, *optional*, defaults to 2):
            Layers to copy. More are right more often, and take longer. Fewer are copied where the last ones are of
            different kinds, or the target has no more.
        feature_layers (sequence of `int`, *optional*):
            Layers of the target that the drafter reads beside the last; by default two, `[]` for none.
        draft_vocab_size (`int`, *optional*):
            Tokens that the drafter scores; by default 16,384, or all where the target has hardly more.
        max_new_tokens (`int`, *optional*, defaults to 96): tokens of a response, at most.
        seed (`int`, *optional*, defaults to 0): seed of the sampled responses; half are greedy.
        progress (`bool`, *optional*, defaults to `True`): whether progress bars are shown.

    Returns:
        [`FalconDraftModel`]: the drafter, in the target's dtype and on its device.

    Raises:
        `ValueError`: if the target has no layers that can be copied (another kind of attention, recurrent layers, an
            encoder-decoder), its tokenizer is not found, or an argument is out of range.
    """
    text_config = target.config.get_text_config(decoder=True)
    count, texts = len(decoder_layers(target)), list(PROMPTS if prompts is None else prompts)
    if num_draft_layers < 1:
        raise ValueError(f"`num_draft_layers` is {num_draft_layers}: give 1 or more.")
    if len(texts) < 8 or max_new_tokens < 4:
        raise ValueError(
            f"`prompts` has {len(texts)} texts and `max_new_tokens` is {max_new_tokens}: give at least 8 texts and 4 "
            "tokens."
        )
    if (reason := refusal(target)) is not None:
        raise ValueError(f"`target` is a {type(target).__name__}: {reason}.{_OTHERS}")
    tokenizer = _tokenizer_of(target) if tokenizer is None else tokenizer
    num_draft_layers = min(num_draft_layers, count - 1)
    read = _layers_to_read(count, num_draft_layers) if feature_layers is None else list(feature_layers)
    # What copies of one, two, ... layers read.
    below = [count - 1 - copied for copied in range(num_draft_layers, 0, -1)]
    kept = list(dict.fromkeys([*read, *below]))
    # Of the package's public names only this one needs it, which takes long to import.
    from .prepare import responses_in_memory

    texts = _short(texts, tokenizer)
    # At least two batches: one is greedy, one sampled.
    at_once = min(_AT_ONCE, (len(texts) + 1) // 2)
    data, rows = responses_in_memory(
        target, tokenizer, texts, max_new_tokens, kept, batch_size=at_once, seed=seed, progress=progress
    )
    features = MemoryFeatures(rows, kept, text_config.hidden_size)
    # Seeded, as a layer that is not copied would be drawn.
    with torch.random.fork_rng(devices=[]), tqdm(total=4, desc="fitting", unit=" parts", disable=not progress) as bar:
        torch.manual_seed(seed)
        fitted = len(data) - max(1, len(data) // _HELD_OUT)
        size = _vocabulary_size(draft_vocab_size, text_config.vocab_size)
        longest = int(data.offsets.diff().argmax())
        config = _config(target, features, longest, below, read, size)
        drafter = FalconDraftModel(config).eval()
        if size is not None:
            drafter.set_draft_vocabulary(_frequent_tokens(target, data, features, size))
        bar.update()
        first = data.first(fitted)
        set_feature_statistics(drafter, *feature_statistics(target, first, features))
        start_falcon(drafter, target, first, features)
        bar.update()
        drafter.to(target.device)
        _fit_options(drafter, target, data, features, range(fitted, len(data)), bar)
    return drafter.to(target.dtype)


def refusal(target: PreTrainedModel) -> str | None:
    """Why a target can have no instant drafter, as far as its layers' shapes say; `None` if it can."""
    if target.config.is_encoder_decoder:
        return "an encoder-decoder, which no drafter drafts for"
    layers = decoder_layers(target)
    if len(layers) > 1:
        with torch.device("meta"):
            config = FalconDraftConfig.from_target(target.config, **_sizes(target, 1))
            if like_last_layer(config, target) is not config:
                return None
    return _NO_COPIES


def _tokenizer_of(target: PreTrainedModel) -> PreTrainedTokenizerBase:
    name = target.name_or_path
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    # A name without a repository, a folder without a tokenizer, code that is not trusted: an error of any kind.
    except Exception as error:
        raise ValueError(
            f"`tokenizer` is not given, and {name!r}, the target's name, has none ({str(error).splitlines()[0]}): "
            "give the target's tokenizer."
        ) from error


def _layers_to_read(count: int, copied: int) -> list[int]:
    """The layer below the copied ones, and one at three quarters of the target."""
    return sorted({max(0, count - 1 - copied), min(3 * count // 4, max(0, count - 1 - copied))})


def _short(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    found = [text for text in texts if 0 < len(tokenizer(text)["input_ids"]) <= _LONGEST_PROMPT]
    if len(found) < 8:
        raise ValueError(
            f"`prompts` has {len(found)} texts of 1 to {_LONGEST_PROMPT} tokens: give at least 8 such texts."
        )
    return found


def _vocabulary_size(given: int | None, vocab_size: int) -> int | None:
    if given is not None:
        return given if given < vocab_size else None
    return _VOCABULARY if vocab_size > 2 * _VOCABULARY else None


def _config(
    target: PreTrainedModel, features: MemoryFeatures, sample: int, below: list[int], read: list[int], size: int | None
) -> FalconDraftConfig:
    """The first configuration, from more layers to fewer, whose layers can be copies of the target's."""
    count = len(decoder_layers(target))
    for layer in below:
        rows = features.sample(sample, [layer])[:-1].float()
        found = []
        for theta in _rope_thetas(target):
            config = FalconDraftConfig.from_target(
                target,
                **_sizes(target, count - 1 - layer),
                feature_layers=read,
                draft_vocab_size=size,
                **({} if theta is None else {"rope_theta": theta}),
            )
            found.append(like_last_layer(config, target))
        errors = [error_of_copies(config, target, rows) for config in found]
        if min(errors) < math.inf:
            return found[errors.index(min(errors))]
    window = getattr(target.config.get_text_config(decoder=True), "sliding_window", None)
    if window is not None and len(rows) >= window:
        raise ValueError(
            f"The longest response has {len(rows) + 1} tokens with its prompt, and the target's last layers see "
            f"{window}: lower `max_new_tokens`."
        )
    raise ValueError(f"`target` is a {type(target).__name__}: {_NO_COPIES}.{_OTHERS}")


def _sizes(target: PreTrainedModel, copied: int) -> dict[str, int]:
    """Fields of the drafter's configuration. By default a drafter has fewer heads than some targets: no copies."""
    text_config = target.config.get_text_config(decoder=True)
    heads = field_of(text_config, "num_attention_heads") or 1
    return {
        "block_size": 1,
        "num_lstm_layers": 0,
        "num_hidden_layers": copied,
        "num_key_value_heads": field_of(text_config, "num_key_value_heads") or heads,
    }


def _rope_thetas(target: PreTrainedModel) -> Iterator[float | None]:
    """The base of rotary positions that drafters take by default (`None`), and those of other kinds of layers."""
    yield None
    parameters = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for kind in parameters.values():
        if isinstance(kind, dict) and isinstance(kind.get("rope_theta"), (int, float)):
            yield float(kind["rope_theta"])


def _frequent_tokens(target: PreTrainedModel, data: TokenFile, features: MemoryFeatures, size: int) -> Tensor:
    """
    The tokens that the target writes most often: those in the samples, then by the probabilities that it had. Few
    responses have few tokens, and probabilities know the others.
    """
    weight, bias = (None if each is None else each.detach() for each in head_parameters(target))
    assert weight is not None
    expected = torch.zeros(weight.shape[0], device=weight.device)
    for index in range(len(data)):
        token_ids, prompt_length = data.sample(index)
        expected += torch.bincount(token_ids, minlength=len(expected)).to(expected)
        rows = features.sample(index, [])[prompt_length - 1 : -1 : _VOCABULARY_STRIDE]
        logits = torch.nn.functional.linear(rows.to(weight), weight, bias).float()
        expected += _VOCABULARY_STRIDE * logits.softmax(dim=-1).sum(dim=0)
    return expected.topk(size).indices.sort().values.cpu()


def _fit_options(
    drafter: FalconDraftModel,
    target: PreTrainedModel,
    data: TokenFile,
    features: MemoryFeatures,
    held_out: range,
    bar: tqdm,
) -> None:
    """Sets `context_bonuses` and `draft_calibration` of the drafter's generation configuration."""
    by_depth: list[list[context_bonuses.Sample]] = [[] for _ in range(_DEPTHS)]
    for index in held_out:
        token_ids, prompt_length = data.sample(index)
        rows = features.sample(index, drafter.config.feature_layers)[None].to(target.device, torch.float32)
        found = context_bonuses.observe(
            drafter, target, token_ids[None].to(target.device), prompt_length, _EQUAL, rows, passes=_DEPTHS
        )
        for samples, sample in zip(by_depth, found, strict=True):
            samples += [] if sample is None else [sample]
    bar.update()
    if by_depth[0]:
        bonuses = context_bonuses.fit(by_depth[0], _EQUAL).round(decimals=1)
        shares = [context_bonuses.calibration(samples, bonuses) for samples in by_depth]
        drafter.generation_config.context_bonuses = [round(bonus, 1) for bonus in bonuses.tolist()]
        drafter.generation_config.draft_calibration = [round(share, 3) for share in shares]
    bar.update()
