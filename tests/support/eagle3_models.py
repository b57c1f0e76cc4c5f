# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Tiny EAGLE-3 drafters: random ones, one that is always right, the references' ones, and writers of their layouts."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import SAME_EVERY_ROUND, VOCAB, new_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_falcon.drafters.eagle3 import Eagle3DraftModel
from hf_falcon.drafters.eagle3_config import Eagle3DraftConfig

REFERENCES = Path(__file__).parents[1] / "drafters" / "references"
CASES = sorted(folder.name for folder in REFERENCES.glob("eagle3*"))
# Fields of the layers that the original layout has at its top.
_ORIGINAL_FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_ORIGINAL_FIELDS += ("head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias")


def new_eagle3(
    target: PreTrainedModel, seed: int = 1, scale: float = 0.3, has_embedding: bool = False, **config: Any
) -> Eagle3DraftModel:
    """
    A drafter for one test, with fields of its configuration, and random weights, large enough that every one of them
    matters. Of a draft vocabulary the tokens are random. It drafts the same tree every round.
    """
    torch.manual_seed(seed)
    # The order of the hidden states is the drafter's own affair.
    fields = {"intermediate_size": 48, "eagle_aux_hidden_state_layer_ids": [2, 1], **config}
    drafter = Eagle3DraftModel(Eagle3DraftConfig.from_target(target, **fields), has_embedding).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            is_norm, is_embedding = parameter.dim() == 1 and "norm" in name, name == "embed_tokens.weight"
            parameter.normal_(float(is_norm), 1.0 if is_embedding else scale)
    size = drafter.config.vocab_size
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    drafter.set_draft_vocabulary(order[: drafter.config.draft_vocab_size].sort().values)
    for name, value in {**SAME_EVERY_ROUND, "assistant_confidence_threshold": 0.0}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@torch.no_grad()
def right_eagle3(**config: Any) -> tuple[PreTrainedModel, Eagle3DraftModel]:
    """
    A target whose layers add nothing, so that a token depends on the token before it alone, and a drafter that
    computes the same function. Its attention finds the own row, by the embedding, and replaces the hidden state by the
    embedding. Both have a mean square of 1.
    """
    target = new_target("llama", num_key_value_heads=4)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    hidden = target.config.hidden_size
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden, "intermediate_size": 48}
    drafter = new_eagle3(target, **{**sizes, **config})
    drafter.fc.weight.zero_()
    layer, attention, identity = drafter.layers[0], drafter.layers[0].self_attn, torch.eye(hidden)
    # Of `[embedding, hidden state]`.
    attention.q_proj.weight.copy_(torch.cat((1000 * identity, 0 * identity), dim=1))
    attention.k_proj.weight.copy_(torch.cat((identity, 0 * identity), dim=1))
    attention.v_proj.weight.copy_(torch.cat((identity, -identity), dim=1))
    attention.o_proj.weight.copy_(identity)
    for norm in (layer.input_layernorm, layer.hidden_norm):
        norm.weight.fill_(1.0)
    layer.mlp.down_proj.weight.zero_()
    drafter.norm.weight.copy_(target.model.norm.weight)
    ids = drafter.draft_vocab_ids
    drafter.lm_head.weight.copy_(target.lm_head.weight if ids is None else target.lm_head.weight[ids])
    return target, drafter


@cache
def reference(case: str) -> dict[str, Tensor]:
    """The tensors of a reference; see make_drafter_references.py."""
    return load_file(REFERENCES / case / "reference.safetensors")


@cache
def reference_target(case: str) -> PreTrainedModel:
    """A target for the drafter of a reference: of its sizes, and with its embedding. No test may change it."""
    embedding = reference(case)["target_embedding"]
    vocab_size, hidden_size = embedding.shape
    torch.manual_seed(0)
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 24, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    target = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.3)).eval()
    target.get_input_embeddings().weight.data = embedding.clone()
    return target


def write_original(drafter: Eagle3DraftModel, folder: Path, binary: bool = False, **fields: Any) -> Path:
    """
    Writes a drafter in the original layout (SafeAILab, SpecForge): the layer is called `midlayer`, and the fields of
    its configuration stand at the top. The drafting options are not a part of it.

    Args:
        drafter: a drafter of one layer.
        folder: made if it is not there.
        binary: whether to write `pytorch_model.bin`.
        fields: more fields of `config.json`, or other values; `None` leaves a field out.
    """
    config, layer = drafter.config, drafter.config.transformer_layer_config
    assert layer.num_hidden_layers == 1
    published = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": layer.model_type, "num_hidden_layers": 1}
    published |= {name: getattr(layer, name) for name in _ORIGINAL_FIELDS if hasattr(layer, name)}
    rope = dict(layer.rope_parameters)
    published |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope if len(rope) > 1 else None}
    published |= {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target_hidden_size}
    # As numbers of layers whose output is read: those begin with 1.
    assert config.eagle_aux_hidden_state_layer_ids[0] == 2
    ids = [number - 1 for number in config.eagle_aux_hidden_state_layer_ids]
    published["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    published |= {name: True for name in ("norm_before_residual", "fc_norm", "norm_output") if getattr(config, name)}
    published = {name: value for name, value in {**published, **fields}.items() if value is not None}
    weights = {
        name.replace("layers.0.", "midlayer."): tensor.clone().contiguous()
        for name, tensor in drafter.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published, indent=2))
    if binary:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def keep_options(drafter: PreTrainedModel, other: PreTrainedModel) -> PreTrainedModel:
    """Gives `drafter` the drafting options of `other`."""
    drafter.generation_config = copy.deepcopy(other.generation_config)
    return drafter


assert VOCAB == 64
