# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The files of a Falcon drafter: checked before they are loaded, because strangers write them, and saved with the code
that runs where this package is not installed.
"""

from __future__ import annotations

import ast
import importlib
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.dynamic_module_utils import get_relative_import_files

from ..checkpoint_files import reading, refuse_other_tensors, refuse_problems, weights_difference
from ..core import custom_generate, drafter
from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.drafter import FalconDraftModel
from ..core.interfaces import DrafterFiles, register_part
from .files import (
    FLOATING_DTYPES,
    LOADING,
    are_digests,
    check_digests,
    digests,
    pinned,
    read_object,
    refuse_adapter,
    upload,
    weight_files,
)
from .stored_tensors import stored_tensors
from .target_sizes import fields_for

# The range of each size. The largest values are far beyond any real model: they come from a damaged or a hostile file.
_RANGES = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**17),
    "intermediate_size": (1, 2**20),
    "num_attention_heads": (1, 2**8),
    "num_key_value_heads": (1, 2**12),
    "block_size": (1, 64),
    "num_lstm_layers": (0, 64),
    "num_hidden_layers": (1, 256),
    "conditioning_size": (0, 2**20),
    "max_position_embeddings": (1, 2**40),
}
_LARGEST_HEAD_DIM = 2**12
_MOST_FEATURE_LAYERS = 256
_FLAGS = ("block_anchor", "attention_bias", "use_qk_norm", "use_post_norms")
_POSITIVE = ("rms_norm_eps", "rope_theta", "logit_softcapping")
_TEXTS = ("target_model_type", "target_name_or_path", "target_fingerprint", "target_embedding_fingerprint")
# transformers would load other files or code because of these fields. A drafter has none of them.
_REFUSED_FIELDS = (
    "quantization_config",
    "fusion_config",
    "per_layer_config",
    "transformers_weights",
    "configuration_files",
    "distributed_config",
)
_ATTENTION = (None, "eager", "sdpa")
# The fields of every transformers configuration that a drafter needs. Other fields (labels, sharding plans, ...) are
# left out, because a hostile value can harm: for a number of labels, for example, transformers makes as many names.
_BASE_FIELDS = {
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "transformers_version",
}
_DRAFT_VOCABULARY = "draft_vocab_ids"
# The oldest transformers that this code runs on. transformers checks this file before it runs `custom_generate`.
_REQUIREMENTS = "transformers>=5.17.0\n"
_WIDTH = 119


class CheckedFiles(DrafterFiles):
    """See [`DrafterFiles`]. The files of strangers are checked, and what is saved needs no package."""

    def check_config(self, config: Any, others: dict[str, Any]) -> None:
        """Refuses values out of range, and fields that name files, code or methods."""
        _check_others(config, others)
        _check_sizes(config)
        _check_values(config)

    def read_config(self, read: Callable[..., Any], name: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Refuses a file that cannot be read, or is none: transformers would use the defaults."""
        # transformers would read a file of any size and depth, and go on to the files that this field names.
        found = read_object(str(name), "config.json", **_loading(kwargs)) or {}
        _refuse("configuration_files" in found, "configuration_files", found.get("configuration_files"))
        with reading("config.json"):
            fields, others = read(name, **kwargs)
        if not fields:
            raise OSError(f"`{name}` has no `config.json`: give the folder or the repository of a Falcon drafter.")
        return fields, others

    def reading(self, name: str) -> AbstractContextManager[object]:
        """See [`checkpoint_files.reading`]."""
        return reading(name)

    def fields_for(self, target: PreTrainedConfig | PreTrainedModel) -> dict[str, Any]:
        """See [`target_sizes.fields_for`]."""
        return fields_for(target)

    def difference(self, drafter: Any, target: PreTrainedModel) -> str | None:
        """See [`weights_difference`]."""
        return weights_difference(drafter, target)

    def check_loaded(self, name: Any, problems: Any) -> None:
        """See [`refuse_problems`]."""
        refuse_problems(name, problems)

    def check(self, model_class: Any, name: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """
        Compares the tensors in a checkpoint's files with those that its configuration requires.

        Returns:
            `dict`: the arguments with the commit that was checked, so that transformers reads the same files.
        """
        if name is None:
            return kwargs
        repository = str(name)
        kwargs = pinned(repository, **kwargs)
        loading = _loading(kwargs)
        refuse_adapter(repository, (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path"), **loading)
        config = kwargs.get("config")
        if not isinstance(config, PreTrainedConfig):
            config = model_class.config_class.from_pretrained(config or repository, **loading)
        # transformers would take its defaults in place of a damaged file.
        read_object(repository, "generation_config.json", **loading)
        files = weight_files(repository, kwargs.get("variant"), **loading)
        check_digests(files, config.weights_sha256)
        stored = stored_tensors(files)
        # An invalid value in a field of transformers may only fail when the network is built.
        with reading("config.json"), torch.device("meta"), init.no_init_weights():
            wanted = model_class(config).state_dict()
        refuse_other_tensors(repository, stored, wanted)
        for name, (file, dtype, _) in stored.items():
            dtypes = FLOATING_DTYPES if wanted[name].is_floating_point() else ("I64",)
            if dtype not in dtypes:
                raise ValueError(
                    f"`{name}` in `{file.name}` of `{repository}` is {dtype}, not {' or '.join(dtypes)}: quantised "
                    "drafters cannot be read. Download it again, or save it again with `save_pretrained`."
                )
        if config.draft_vocab_size is not None:
            _check_draft_vocabulary(stored[_DRAFT_VOCABULARY].file, config.vocab_size)
        return kwargs

    def complete(self, model: Any, folder: Any) -> None:
        """Adds the drafter's code, and the digests of the weight files, which exist only now."""
        # The code of a subclass may be anywhere, and one folder could not hold it.
        if type(model) is FalconDraftModel:
            model.config.auto_map = {
                auto_class: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
                for auto_class, kind in (("AutoConfig", FalconDraftConfig), ("AutoModel", FalconDraftModel))
            }
            write_code(folder)
        else:
            vars(model.config).pop("auto_map", None)
        model.config.weights_sha256 = digests(folder)
        model.config.save_pretrained(folder)

    def push(self, model: Any, repo_id: str, **kwargs: Any) -> str:
        """Uploads all in one commit, with the card of the folder that the drafter was loaded from."""
        card = Path(model.name_or_path, "README.md")
        if model.name_or_path and card.is_file():
            kwargs.setdefault("card", card.read_text(encoding="utf-8"))
        return upload(model.save_pretrained, repo_id, **kwargs)


def install() -> None:
    """Registers the checks for every Falcon drafter of this process."""
    register_part("files", CheckedFiles())


def _loading(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in LOADING if kwargs.get(name) is not None}


def _shown(value: Any) -> str:
    """A value for an error message, at most 200 characters of it."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _refuse(is_wrong: bool, field: str, value: Any, remedy: str = "a drafter has no such field, leave it out") -> None:
    if is_wrong:
        raise ValueError(f"`{field}` is {_shown(value)}: {remedy}.")


def _check_others(config: Any, others: dict[str, Any]) -> None:
    """Fields that a drafter does not have: transformers makes an attribute of every one."""
    kind = others.get("model_type", config.model_type)
    if kind != config.model_type:
        raise ValueError(
            f"`model_type` is {_shown(kind)}, not {config.model_type!r}: this configures another model. "
            "Give the folder or the repository of a Falcon drafter."
        )
    for field, value in others.items():
        names_files = field in _REFUSED_FIELDS and value is not None
        _refuse(names_files or callable(getattr(type(config), field, None)) or field.startswith("__"), field, value)
    for field in [name for name in others if hasattr(type(config), name) and name not in _BASE_FIELDS]:
        del others[field]
    for field in ("dtype", "torch_dtype"):
        value = others.get(field)
        dtype = getattr(torch, value, None) if isinstance(value, str) else value
        is_wrong = value is not None and not isinstance(dtype, torch.dtype)
        _refuse(is_wrong, field, value, "set it to a dtype of torch, such as 'bfloat16'")
    for field in ("attn_implementation", "_attn_implementation"):
        value = others.get(field)
        _refuse(value not in _ATTENTION, field, value, "a drafter has 'sdpa' only, leave it out")


def _check_sizes(config: Any) -> None:
    for field, (smallest, largest) in _RANGES.items():
        value = getattr(config, field)
        is_wrong = type(value) is not int or not smallest <= value <= largest
        _refuse(is_wrong, field, value, f"set it to an integer from {smallest} to {largest}")
    heads, key_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    _refuse(
        heads % key_heads != 0,
        "num_key_value_heads",
        key_heads,
        f"set it to a divisor of `num_attention_heads` ({heads})",
    )
    if width is None and config.hidden_size % heads != 0:
        raise ValueError(
            f"`hidden_size` is {config.hidden_size}, which `num_attention_heads` ({heads}) does not divide: set "
            "`head_dim`."
        )
    width = config.hidden_size // heads if width is None else width
    _refuse(
        type(width) is not int or not 2 <= width <= _LARGEST_HEAD_DIM or width % 2 != 0,
        "head_dim",
        width,
        f"set it to an even integer of at most {_LARGEST_HEAD_DIM}, as rotary embedding works on pairs",
    )
    size = config.draft_vocab_size
    _refuse(
        size is not None and not (type(size) is int and 1 <= size <= config.vocab_size),
        "draft_vocab_size",
        size,
        f"set it between 1 and `vocab_size` ({config.vocab_size}), or to None for all tokens",
    )


def _check_values(config: Any) -> None:
    layers = config.feature_layers
    _refuse(
        not isinstance(layers, (list, tuple))
        or len(layers) > _MOST_FEATURE_LAYERS
        or any(type(layer) is not int or layer < 0 for layer in layers)
        or len(set(layers)) < len(layers),
        "feature_layers",
        layers,
        "give different layers of the target, counted from 0",
    )
    for field in _FLAGS:
        value = getattr(config, field)
        _refuse(type(value) is not bool, field, value, "set it to True or False")
    activation = config.hidden_act
    is_wrong = not isinstance(activation, str) or activation not in ACT2FN
    _refuse(is_wrong, "hidden_act", activation, "set it to an activation of transformers")
    for field in (*_POSITIVE, "initializer_range", "logit_scale"):
        value = getattr(config, field)
        if field == "logit_softcapping" and value is None:
            continue
        is_positive = field in _POSITIVE
        _refuse(
            type(value) not in (int, float) or not math.isfinite(value) or (is_positive and value <= 0),
            field,
            value,
            f"set it to a {'positive ' * is_positive}finite number",
        )
        # An integer can be too large for a tensor.
        setattr(config, field, float(value))
    for field in _TEXTS:
        value = getattr(config, field)
        # Messages have these texts in them.
        is_wrong = value is not None and not (isinstance(value, str) and value.isprintable())
        _refuse(is_wrong, field, value, "set it to a text of printable characters or to None")
    found = config.weights_sha256
    _refuse(not are_digests(found), "weights_sha256", found, "save the drafter again with `save_pretrained`")


def _check_draft_vocabulary(file: Path, vocab_size: int) -> None:
    """Refuses ids of a draft vocabulary that a head could not look up: on a GPU that would end the process."""
    with safe_open(file, framework="pt") as weights:
        ids = weights.get_tensor(_DRAFT_VOCABULARY)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError(
            f"`{_DRAFT_VOCABULARY}` in `{file.name}` of {file.parent} are no ascending ids of the target's "
            f"{vocab_size} tokens: the file is damaged. Download it again, or save the drafter again with "
            "`save_pretrained`."
        )


def write_code(folder: str | Path) -> None:
    """
    Writes the code of the Falcon drafter into `folder`, without most of the docstrings, and
    `custom_generate/generate.py`.

    Args:
        folder (`str` or `Path`): the folder that the drafter is saved to.
    """
    custom = Path(folder, "custom_generate")
    custom.mkdir(exist_ok=True)
    for file in core_files():
        Path(folder, file.name).write_text(travelling_code(file.read_text(encoding="utf-8")), encoding="utf-8")
    generate = Path(custom_generate.__file__).read_text(encoding="utf-8")
    (custom / "generate.py").write_text(travelling_code(generate), encoding="utf-8")
    (custom / "requirements.txt").write_text(_REQUIREMENTS, encoding="utf-8")


def core_files() -> list[Path]:
    """The files of the core that a drafter needs, found by following relative imports as transformers does."""
    return sorted({Path(drafter.__file__), *map(Path, get_relative_import_files(drafter.__file__))})


@cache
def travelling_code(source: str) -> str:
    """
    The text of a module with fewer lines: docstrings of classes and functions are cut to their first sentence, those
    of methods and of private names are left out. All other lines stay as they are.

    Args:
        source (`str`): the text, which begins with a line for the licence.
    """
    lines = source.splitlines()
    # From the end, so that the numbers of the lines before it stay right.
    for docstring, is_needed in sorted(_docstrings(ast.parse(source)), key=lambda found: -found[0].lineno):
        start, end = docstring.lineno - 1, docstring.end_lineno or docstring.lineno
        shorter = _first_sentence(docstring) if is_needed else []
        if not shorter and not lines[end].strip():
            end += 1
        lines[start:end] = shorter
    version = importlib.import_module("hf_falcon").__version__
    lines.insert(
        1,
        f"# Written by hf_falcon {version}. Most of its documentation is only in the package, and in its repository.",
    )
    return "\n".join(lines) + "\n"


def _docstrings(module: ast.Module) -> Iterator[tuple[ast.Expr, bool]]:
    """The docstrings of classes and functions, and whether something of them stays."""
    public = [node for node in module.body if not getattr(node, "name", "_").startswith("_")]
    for node in ast.walk(module):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            # A body cannot be empty.
            yield node.body[0], node in public or len(node.body) == 1  # type: ignore[misc]


def _first_sentence(docstring: ast.Expr) -> list[str]:
    indent = " " * docstring.col_offset
    text = " ".join(ast.literal_eval(docstring.value).strip().partition("\n\n")[0].split())
    # With a backslash it would need the prefix of the original.
    text = (text.partition(". ")[0].rstrip(".:") + ".").replace("\\", "\\\\")
    if len(indent) + len(text) + 6 <= _WIDTH:
        return [f'{indent}"""{text}"""']
    wrapped = textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return [f'{indent}"""', *wrapped, f'{indent}"""']
