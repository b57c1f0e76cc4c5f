# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A tiny random model of each type that takes images, and a prompt with an image for it; what becomes of the prompt with
a drafter. `python tests/support/image_inputs.py` prints it.
"""

import argparse
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from compatibility import UNTRIED, Row, compare, first_line, make_lively
from shrunken import VOCAB, tiny_config, tiny_model
from tiny_models import HIDDEN
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import logging

WITH_IMAGES = {
    model_type: name if isinstance(name, str) else name[0]
    for model_type, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
}
# An image of 4 * 4 patches, of which most models make one to sixteen tokens.
_SIDE, _PATCH, _CHANNELS = 16, 4, 3
# Below: the ids of images, and of what is around them.
_TEXT_IDS = (3, VOCAB - 16)
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("image_size", "force_image_size"), _SIDE),
    **dict.fromkeys(("patch_size", "spatial_patch_size"), _PATCH),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "projector_hidden_size", "vision_output_dim"), HIDDEN),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "mm_embed_dim", "output_proj_dims"), HIDDEN),
    **dict.fromkeys(("text_hidden_size", "image_hidden_size"), HIDDEN),
    "mm_tokens_per_image": 4,
    "image_seq_length": 4,
    "num_query_tokens": 4,
    "deepstack_visual_indexes": [0],
    "image_grid_pinpoints": [[_SIDE, _SIDE], [_SIDE, 2 * _SIDE]],
    "vision_feature_layer": -1,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _parts(model_type: str) -> dict[str, Any]:
    """A configuration of a part that is absent by default."""
    return tiny_config(model_type, _SIZES).to_dict()


# What cannot be told from the names of fields.
_CHANGES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0, 1], "output_channels": 8}},
    "cosmos3_edge": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 16], "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}
    },
    "gemma4": {"vision_config": {**_parts("gemma4_vision"), "pooling_kernel_size": 2, "position_embedding_size": 8}},
    "gemma4_unified": {"vision_config": {**_parts("gemma4_unified_vision"), "pooling_kernel_size": 1}},
    "hunyuan_vl": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]}}},
    "kimi_k25": {"projection_hidden_size": HIDDEN},
    "git": {"vision_config": {"hidden_size": HIDDEN}},
    "idefics": {"cross_layer_interval": 1, "use_resampler": False},
    "mllama": {
        "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * HIDDEN},
        "text_config": {"cross_attention_layers": [1], "num_hidden_layers": 3},
    },
    "llama4": {"vision_config": {"intermediate_size": 4 * HIDDEN}},
    "muse_glimmer": {"out_hidden_size": 4 * HIDDEN},
    "qwen2_5_omni_thinker": {
        "vision_start_token_id": VOCAB - 8,
        "text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    },
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCAB - 8},
}
_IMAGE_ID = re.compile(r"(image|video|vision|audio|boi|eoi|boa|eoa|user|img).*(token_id|token_index|token_idx)$")


def classify_with_image(model_type: str) -> Row:
    """
    As [`compatibility.classify`], for a prompt with an image.

    Raises:
        `WrongTextError`: where tokens or logits differ, or where no tree was used and nothing says why.
    """
    try:
        model = image_model(model_type)
        prompt = image_prompt(model)
        make_lively(model, prompt)
        _check_that_it_looks(model, prompt)
    # Whatever keeps transformers from it is the finding.
    except Exception as error:
        return Row(model_type, WITH_IMAGES[model_type], UNTRIED, first_line(error))
    return Row(model_type, WITH_IMAGES[model_type], *compare(model, prompt))


def _check_that_it_looks(model: PreTrainedModel, prompt: dict[str, Tensor]) -> None:
    logits = []
    for given in (prompt, other_image(prompt)):
        kwargs = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        logits.append(model.generate(**given, **kwargs, pad_token_id=0).logits[0])
    if torch.allclose(*logits, atol=1e-3):
        raise ArithmeticError("another image changes nothing")


def image_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """
    A tiny random model that takes images; `changes` as for [`shrunken.tiny_config`].

    Raises:
        Whatever keeps transformers from making it.
    """
    changes = _CHANGES.get(model_type, {}) | changes
    names = filter(_IMAGE_ID.match, sorted(tiny_config(model_type, _SIZES, **changes).to_dict()))
    ids = {name: VOCAB - 1 - place for place, name in enumerate(names)}
    model = tiny_model(model_type, AutoModelForImageTextToText, sizes={**_SIZES, **ids}, **changes)
    # Gates and projections that are 0 before training: the model would not see its image.
    for name, parameter in model.named_parameters():
        if re.search(r"gate$|alpha_", name):
            torch.nn.init.constant_(parameter, 0.5)
        elif parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def image_prompt(model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """
    The arguments of `generate` for a prompt with one image between texts.

    Raises:
        `ValueError`: if none was found that the model takes; it says why the last was refused.
    """
    encode = getattr(model.base_model, "get_image_features", None) or getattr(model, "get_image_features", None)
    images = _images_beside(model.config.model_type, seed) if encode is None else _images(encode, seed)
    refused = "the model has no `get_image_features`"
    for image in images:
        try:
            tokens = 0 if encode is None else _tokens_of(encode, image)
            prompt = {**_text(model, tokens, seed), **image}
            model.generate(**prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)
            return prompt
        # Whatever a model says to an image of another shape.
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
    raise ValueError(refused)


def other_image(prompt: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same prompt with another image."""
    return {name: value.flip(-1) if value.is_floating_point() else value for name, value in prompt.items()}


def _images_beside(model_type: str, seed: int) -> Iterator[dict[str, Tensor]]:
    """Images that have no tokens in the prompt."""
    generator = torch.Generator().manual_seed(seed)
    square = (_CHANNELS, _SIDE, _SIDE)
    if model_type == "mllama":
        yield {
            "pixel_values": torch.randn(1, 1, 4, *square, generator=generator),
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]]),
            "cross_attention_mask": torch.ones(1, 10, 1, 4, dtype=torch.long),
        }
    if model_type == "idefics":
        yield {
            "pixel_values": torch.randn(1, 1, *square, generator=generator),
            "image_attention_mask": torch.ones(1, 10, 1, dtype=torch.long),
        }
    if model_type in ("git", "blip"):
        yield {"pixel_values": torch.randn(1, *square, generator=generator)}


def _images(encode: Any, seed: int) -> Iterator[dict[str, Tensor]]:
    """Images in the shapes that models want, until one fits."""
    generator = torch.Generator().manual_seed(seed)
    takes = inspect.signature(encode).parameters
    more = {
        "image_sizes": torch.tensor([[_SIDE, _SIDE]]),
        "high_res_pixel_values": torch.randn(1, _CHANNELS, _SIDE, _SIDE, generator=generator),
        "spatial_shapes": torch.tensor([[4, 4]]),
        "target_sizes": torch.tensor([[4, 4]]),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "image_merge_sizes": torch.tensor([2]),
        "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)[None],
    }
    more = {name: value for name, value in more.items() if name in takes}
    if "spatial_shapes" in takes:
        more["pixel_attention_mask"] = torch.ones(1, 16, dtype=torch.long)
    needed = {name: value for name, value in more.items() if takes[name].default is inspect.Parameter.empty}
    area = _CHANNELS * _PATCH**2
    square = (_CHANNELS, _SIDE, _SIDE)
    patches = [(16, 2 * area), (16, area), (16, _CHANNELS, _PATCH, _PATCH), (1, 16, _CHANNELS, _PATCH, _PATCH)]
    squares = [(1, *square), (1, 1, *square), (1, 2, *square), (1, 3, *square), (2, *square)]
    for shape in (*patches, *squares) if "image_grid_thw" in takes else (*squares, (1, 16, area), *patches):
        name = "pixel_values_images" if "pixel_values_images" in takes else "pixel_values"
        for beside in (more, needed) if needed.keys() != more.keys() else (more,):
            yield {name: torch.randn(shape, generator=generator), **beside}


@torch.no_grad()
def _tokens_of(encode: Any, image: dict[str, Tensor]) -> int:
    """Tokens of the prompt that stand for an image."""
    output = encode(**image, return_dict=True)
    features = getattr(output, "pooler_output", output)
    features = output.last_hidden_state if features is None else features
    features = [features] if isinstance(features, Tensor) else features
    return sum(each.numel() // each.shape[-1] for each in features)


def _text(model: PreTrainedModel, image_tokens: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    before, after = torch.randint(*_TEXT_IDS, (2, 5), generator=generator)
    config = model.config
    ids = [getattr(config, name, None) for name in ("image_token_id", "image_token_index", "img_token_id")]
    image_id = next((each for each in ids if each is not None), VOCAB - 1)
    start, end = (
        torch.tensor([getattr(config, name) for name in names if isinstance(getattr(config, name, None), int)][:1])
        for names in (
            ("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index"),
            ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index"),
        )
    )
    image = torch.full((image_tokens,), image_id)
    input_ids = torch.cat((before, start, image, end, after)).long()[None]
    prompt = {"input_ids": input_ids}
    takes = inspect.signature(model.forward).parameters
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        if name in takes:
            prompt[name] = (input_ids == image_id).long()
    return prompt


def main() -> None:
    """Classifies all of them, or the model types that are given, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="only these")
    logging.set_verbosity_error()
    for model_type in parser.parse_args().model_types or WITH_IMAGES:
        print(*classify_with_image(model_type), sep="\t", flush=True)


if __name__ == "__main__":
    main()
