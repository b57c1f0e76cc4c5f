# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Describes a drafter from the fields of its `config.json` and the shapes in its headers, without torch and transformers,
which take seconds to import. It only takes fields that are plainly well-formed, as in the checkpoints that are
published; whether anything else is right, and in which words it is wrong, is for the classes that load drafters
(`checked_info.py`), whose description of the same files is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

from ..drafters.dflash_files import dflash_fields
from ..drafters.eagle3_files import eagle3_fields, original_name
from ..drafters.methods import Fields, is_dflash, is_eagle3, is_falcon
from .checkpoint_listing import Headers

# The methods' names, by `speculators_model_type`.
METHODS = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}
LANGUAGE_MODEL = "language model"
# Buffers of a Falcon drafter that are no integers.
_NOT_WEIGHTS = ("feature_mean", "feature_std")

Check = Callable[[Any], bool]


def plain_description(fields: Any, headers: Headers) -> dict[str, Any] | None:
    """
    Describes a drafter.

    Args:
        fields: what its `config.json` holds.
        headers (`dict`): what the headers of its weight files say.

    Returns:
        `dict`: see [`describe`]; `None` for another model, and for fields that are left to the checks.
    """
    try:
        if not isinstance(fields, dict):
            return None
        if is_falcon(fields):
            return _of_falcon(fields, headers)
        if is_eagle3(fields):
            return _of_eagle3(fields, headers)
        return _of_dflash(fields, headers) if is_dflash(fields) else None
    # An error of any kind is a field that is not well-formed.
    except Exception:
        return None


def number_of_weights(headers: Headers) -> int | None:
    """The number of values in the weights, or `None` without headers."""
    # Tables of tokens are integers, and some checkpoints have a copy of the target's head.
    weights = [
        math.prod(shape)
        for name, (dtype, shape) in headers.items()
        if dtype.startswith(("F", "BF")) and not name.startswith("verifier_")
    ]
    return sum(weights) if headers else None


class _LeftToChecks(Exception):
    """A field that is not plainly well-formed."""


def _need(*conditions: bool) -> None:
    if not all(conditions):
        raise _LeftToChecks


def _is_int(low: int, high: int, step: int = 1) -> Check:
    return lambda value: type(value) is int and low <= value <= high and value % step == 0


def _is_number(low: float = 1e-30, high: float = 1e12) -> Check:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _is_float(value: Any) -> bool:
    return type(value) is float and _is_number()(value)


def _is_one_of(*values: object) -> Check:
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def _is_list_of(check: Check) -> Check:
    return lambda value: type(value) is list and len(value) <= 256 and all(map(check, value))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, (*value, *value.values())))


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _are_distinct(layers: Collection[int]) -> bool:
    return len(set(layers)) == len(layers)


_is_token = _or_none(_is_int(0, 2**24))
_is_dtype = _or_none(_is_one_of("float32", "bfloat16", "float16"))
_is_activation = _is_one_of("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_SPECIAL: dict[str, Check] = {
    "bos_token_id": _is_token,
    "eos_token_id": lambda value: _is_token(value) or (bool(value) and _is_list_of(_is_int(0, 2**24))(value)),
    "pad_token_id": _is_token,
}
_SIZES: dict[str, Check] = {
    "vocab_size": _is_int(1, 2**24),
    "hidden_size": _is_int(1, 2**17),
    "num_attention_heads": _is_int(1, 2**8),
    "num_key_value_heads": _is_int(1, 2**8),
}
_MORE_SIZES: dict[str, Check] = {
    "head_dim": _is_int(2, 2**12, step=2),
    "intermediate_size": _is_int(1, 2**20),
    "num_hidden_layers": _is_int(1, 256),
    "max_position_embeddings": _is_int(1, 2**40),
}
# All fields that a Falcon drafter may have here; the first ones it must have.
_FALCON_NEEDS: dict[str, Check] = {**_SIZES, "head_dim": _MORE_SIZES["head_dim"], "block_size": _is_int(1, 64)}
_FALCON: dict[str, Check] = {
    **_SPECIAL,
    **_FALCON_NEEDS,
    **_MORE_SIZES,
    "architectures": _is_list_of(_is_text),
    "attention_bias": _is_flag,
    "auto_map": _are_texts,
    "block_anchor": _is_flag,
    "conditioning_size": _is_int(0, 2**20),
    # Of an earlier version.
    "draft_format": _is_int(1, 1),
    "draft_vocab_size": _or_none(_is_int(1, 2**24)),
    "dtype": _is_dtype,
    "feature_layers": _is_list_of(_is_int(0, 2**16)),
    "hidden_act": _is_activation,
    "initializer_range": _is_number(),
    "logit_scale": _is_number(),
    "logit_softcapping": _or_none(_is_number()),
    "model_type": _is_text,
    "num_lstm_layers": _is_int(0, 64),
    "rms_norm_eps": _is_number(),
    "rope_theta": _is_number(),
    "target_embedding_fingerprint": _or_none(_is_text),
    "target_fingerprint": _or_none(_is_text),
    "target_model_type": _or_none(_is_text),
    "target_name_or_path": _or_none(_is_text),
    "tie_word_embeddings": _is_one_of(False),
    "transformers_version": _is_text,
    "use_post_norms": _is_flag,
    "use_qk_norm": _is_flag,
    "weights_sha256": lambda value: _are_texts(value) and all(_is_file_name(name) for name in value),
}
# Fields of decoder layers that are read; the checks know no others.
_LAYERS: dict[str, Check] = {
    **_SPECIAL,
    **_SIZES,
    **_MORE_SIZES,
    "attention_bias": _is_flag,
    "hidden_act": _is_activation,
    "initializer_range": _is_float,
    "layer_types": _or_none(_is_list_of(_is_one_of("full_attention", "sliding_attention"))),
    "max_window_layers": _is_int(0, 2**16),
    "mlp_bias": _is_flag,
    "partial_rotary_factor": _is_one_of(1.0),
    "rms_norm_eps": _is_float,
    "rope_theta": _is_number(2),
    "sliding_window": _or_none(_is_int(1, 2**40)),
    "use_sliding_window": _is_flag,
}
# Parameters of rotary frequencies that each kind needs, and those that it may have.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_ROPE: dict[str, Check] = {
    "attention_factor": _is_number(1e-3, 1e3),
    "beta_fast": _is_number(1, 1e3),
    "beta_slow": _is_number(1e-3, 1e3),
    "factor": _is_number(1, 1e6),
    "high_freq_factor": _is_number(1e-3, 1e6),
    "low_freq_factor": _is_number(1e-3, 1e6),
    "original_max_position_embeddings": _is_int(1, 2**40),
    "partial_rotary_factor": _is_one_of(1.0),
    "rope_theta": _is_number(2),
}


def _is_file_name(name: str) -> bool:
    return name.endswith(".safetensors") and not set(name) & set("/\\")


def _check(fields: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    _need(*(check(fields[name]) for name, check in checks.items() if name in fields))


def _of_falcon(fields: Fields, headers: Headers) -> dict[str, Any]:
    _need(fields.keys() <= _FALCON.keys(), _FALCON_NEEDS.keys() <= fields.keys(), bool(headers))
    _check(fields, _FALCON)
    draft_vocab_size, layers = fields.get("draft_vocab_size"), fields.get("feature_layers", [])
    _need(
        fields["num_attention_heads"] % fields["num_key_value_heads"] == 0,
        draft_vocab_size is None or draft_vocab_size <= fields["vocab_size"],
        _are_distinct(layers),
    )
    return {
        "method": "Falcon",
        "layout": "hf_falcon",
        "target": fields.get("target_name_or_path"),
        "target_model_type": fields.get("target_model_type"),
        "k": fields["block_size"],
        "vocab_size": fields["vocab_size"],
        "draft_vocab_size": draft_vocab_size,
        "feature_layers": layers,
        "parameters": number_of_weights({name: of for name, of in headers.items() if name not in _NOT_WEIGHTS}),
    }


def _of_eagle3(fields: Fields, headers: Headers) -> dict[str, Any]:
    is_original = "speculators_model_type" not in fields
    names = {name: original_name(name) if is_original else name for name in headers}
    found = eagle3_fields(fields, {names[name]: SimpleNamespace(shape=shape) for name, (_, shape) in headers.items()})
    _check(found, dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), _is_flag))
    _need(not (found.get("norm_before_fc") and found.get("fc_norm")))
    # An empty list is published, too, in place of none.
    ids = found.get("eagle_aux_hidden_state_layer_ids")
    ids = None if ids == [] else ids
    about = _of_layers(found, fields, headers, ids)
    layer = found["transformer_layer_config"]
    width = found.get("target_hidden_size") or layer["hidden_size"]
    _need((1 + (3 if ids is None else len(ids))) * width != layer["hidden_size"])
    return {"method": METHODS["eagle3"], **about, "k": 1}


def _of_dflash(fields: Fields, headers: Headers) -> dict[str, Any]:
    found = dflash_fields(fields)
    from_anchor, rank = found.get("sample_from_anchor", False), found.get("markov_rank", 0)
    _check(found, dict.fromkeys(("sample_from_anchor", "sliding_window_non_causal"), _is_flag))
    about = _of_layers(found, fields, headers, found["aux_hidden_state_layer_ids"])
    rows = found["block_size"]
    _need(
        bool(found["aux_hidden_state_layer_ids"]),
        _is_int(1 if from_anchor else 2, 1024)(rows),
        _is_int(0, about["vocab_size"] - 1)(found["mask_token_id"]),
        _is_int(0, 2**14)(rank),
        _is_one_of("vanilla", "gated")(found.get("markov_head_type", "vanilla")),
        _or_none(_is_int(1, 2**16))(found.get("num_target_layers")),
    )
    return {"method": METHODS["dspark" if rank else "dflash"], **about, "k": rows if from_anchor else rows - 1}


def _of_layers(found: Fields, fields: Fields, headers: Headers, ids: list[int] | None) -> dict[str, Any]:
    """What drafters in the layout of `speculators` share; `found` are the fields in this layout."""
    layer = found["transformer_layer_config"]
    kind = layer.get("model_type", "qwen3")
    _need(kind in ("llama", "qwen3"), _SIZES.keys() <= layer.keys())
    if kind == "llama" and layer.get("head_dim", 0) is None:
        layer = {name: value for name, value in layer.items() if name != "head_dim"}
    _check(layer, _LAYERS)
    heads, width, kinds = layer["num_attention_heads"], layer["hidden_size"], layer.get("layer_types")
    _need(
        heads % layer["num_key_value_heads"] == 0,
        width % heads == 0,
        "head_dim" in layer or kind == "qwen3" or width // heads % 2 == 0,
        kinds is None or len(kinds) == layer.get("num_hidden_layers"),
        _has_plain_frequencies(layer),
    )
    _check(found, {**_SPECIAL, "dtype": _is_dtype, "target_fingerprint": _or_none(_is_text)})
    vocab_size, config = layer["vocab_size"], found.get("speculators_config") or {}
    draft_vocab_size = found.get("draft_vocab_size")
    draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
    verifier = config.get("verifier")
    verifier = {} if verifier is None else verifier
    target, classes = verifier.get("name_or_path"), verifier.get("architectures")
    classes = [] if classes is None else classes
    _need(
        # It would be an argument of the class.
        "self" not in found,
        _is_int(1, vocab_size)(draft_vocab_size),
        _or_none(_is_int(1, 2**17))(found.get("target_hidden_size")),
        _or_none(_is_list_of(_is_int(0, 2**16)))(ids) and _are_distinct(ids or ()),
        _or_none(_is_text)(target),
        _is_list_of(_is_text)(classes),
    )
    return {
        "layout": "speculators" if "speculators_model_type" in fields else "original",
        "target": target,
        "target_model_type": ", ".join(classes) or None,
        "k": None,
        "vocab_size": vocab_size,
        "draft_vocab_size": None if draft_vocab_size == vocab_size else draft_vocab_size,
        "feature_layers": None if ids is None else [layer - 1 for layer in ids],
        "parameters": number_of_weights(headers),
    }


def _has_plain_frequencies(layer: Fields) -> bool:
    """Whether rotary frequencies are of a known kind, with all its parameters in usual ranges."""
    given = [layer[name] for name in ("rope_parameters", "rope_scaling") if layer.get(name) is not None]
    _need(len(given) <= 1)
    _need(all(isinstance(each, dict) for each in given))
    rope = dict(given[0]) if given else {}
    names = {rope.pop(name) for name in ("rope_type", "type") if name in rope} or {"default"}
    (kind,) = names
    _check(rope, _ROPE)
    return (
        rope.keys() <= _ROPE.keys()
        and all(name in rope for name in _ROPE_NEEDS[kind])
        and (kind != "llama3" or rope["low_freq_factor"] < rope["high_freq_factor"])
    )
