# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Compares the logits of an EAGLE-3 drafter here with those of its export in the package `speculators`, on three passes
over random tokens. The package needs an environment of its own (see make_drafter_references.py), so there are two
commands:

    hf-falcon export DRAFTER EXPORTED --target TARGET
    python tests/support/check_export.py write DRAFTER TARGET logits.safetensors
    ENVIRONMENT/bin/python tests/support/check_export.py compare EXPORTED logits.safetensors

TARGET is a folder. The last command prints the largest difference of each pass, and ends with 1 if one exceeds 1e-4.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

LENGTH, PASSES = 24, 3


@torch.no_grad()
def write(drafter_folder: str, target_folder: str, output: str) -> int:
    """The logits of the drafter, and what they depend on, in a file."""
    from transformers import AutoModelForCausalLM

    from hf_falcon import AutoDrafter
    from hf_falcon.core.modeling_falcon_draft import additive_mask
    from hf_falcon.training.features import target_features
    from hf_falcon.training.training_cache import TrainingCache

    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    drafter = AutoDrafter.from_pretrained(drafter_folder, dtype=torch.float32)
    head = drafter.make_head(target)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, target.config.vocab_size, (1, LENGTH + 1), generator=generator)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    features = target_features(target, tokens, valid, drafter.config.feature_layers)[:, :LENGTH]
    width = drafter.config.target_hidden_size
    found = {"hidden_states": features[..., width:].contiguous(), "input_ids": tokens[:, 1:].contiguous()}
    states, cache, places = features, None, torch.arange(LENGTH)
    for index in range(PASSES):
        cache = TrainingCache(cache)
        itself = torch.eye(LENGTH, dtype=torch.bool)
        mask = torch.cat([places[:, None] >= places, *[itself] * index], dim=-1)
        fused, _ = drafter.fuse(states, head.embed(F.pad(tokens[:, 1 + index :], (0, index))))
        mask = additive_mask(mask, fused.dtype)[None, None]
        states = drafter.run_layers(fused, places[None], (places + index)[None], mask, cache)
        found[f"logits_{index}"] = head.logits(states)
    save_file(found, output)
    return 0


@torch.no_grad()
def compare(exported: str, file: str) -> int:
    """The differences from the package's logits."""
    from speculators import SpeculatorModel
    from speculators.models.attention import create_float_mask

    model, expected, logits = SpeculatorModel.from_pretrained(exported).float(), load_file(file), []
    # Its default attention function is for GPUs.
    model._attn_impl = model.config.transformer_layer_config._attn_implementation = "eager"
    model._create_mask_fn = create_float_mask
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    documents = torch.zeros(1, LENGTH, dtype=torch.long)
    model(expected["hidden_states"], expected["input_ids"], documents, ttt_steps=PASSES)
    worst = 0.0
    for index, found in enumerate(logits):
        # The last positions of a later pass have no token to read.
        rows = slice(0, LENGTH - index)
        difference = (found - expected[f"logits_{index}"])[:, rows].abs().max().item()
        print(f"pass {index + 1}: largest difference {difference:.1e} of logits up to {found.abs().max().item():.1f}")
        worst = max(worst, difference)
    return int(not worst < 1e-4)


if __name__ == "__main__":
    sys.exit({"write": write, "compare": compare}[sys.argv[1]](*sys.argv[2:]))
