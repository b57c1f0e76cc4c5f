# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The drafter in the manner of Medusa."""

import json

import pytest
import torch
from bench_runs import medusa_like
from tiny_models import (
    VOCAB,
    random_tokens,
    tiny_target,
)

from hf_falcon import FalconCandidateGenerator
from hf_falcon.bench.medusa import MedusaLikeModel
from hf_falcon.commands import bench, train
from hf_falcon.core.modeling_falcon_draft import block_anchors
from hf_falcon.training.csgd import DistillationWeights, DraftBatch, TrainingHeads, draft_loss
from hf_falcon.training.features import target_features
from hf_falcon.training.token_file import TokenFile


@pytest.mark.parametrize("length", [2, 7])
def test_medusa_heads_read_the_newest_feature(length):
    target = tiny_target()
    drafter = medusa_like(target)
    generator = FalconCandidateGenerator(drafter, target)
    features = torch.randn(1, length, 32)
    with torch.no_grad():
        generator.commit(features, random_tokens(1, length))
        outputs = drafter.heads(features[0, -1]).view(3, 32)
        expected = drafter.norm(features[0, -1] + torch.nn.functional.silu(outputs))
        torch.testing.assert_close(generator._block[0], expected)
        # As in training.
        fused, _ = drafter.fuse(features[:, -1:].expand(1, 3, -1), None)
        rows = drafter.run_layers(fused, block_anchors(torch.zeros(1, 3), 3), None, None)
        torch.testing.assert_close(rows, generator._block)


def test_medusa_like_generates_and_learns(tmp_path):
    target = tiny_target()
    medusa_like(target, draft_vocab_size=30).save_pretrained(tmp_path)
    drafter = MedusaLikeModel.from_pretrained(tmp_path)
    settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    tokens = random_tokens(1, 9)
    output = target.generate(tokens, assistant_model=drafter, **settings)
    assert output.sequences.tolist() == target.generate(tokens, **settings).sequences.tolist()
    # One pass, so no node is deeper than there are heads, whatever the options are.
    drafter.generation_config.num_draft_passes = 4
    other = target.generate(tokens, assistant_model=drafter, **settings)
    assert other.draft_statistics.accepted_by_depth == output.draft_statistics.accepted_by_depth
    with pytest.raises(ValueError, match="`draft_tree` is 4 deep, but the drafter proposes 3 tokens a round"):
        target.generate(tokens, assistant_model=drafter, draft_tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], **settings)
    assert 0 < output.draft_statistics.drafted_tokens and len(output.draft_statistics.accepted_by_depth) <= 3

    heads, drafter = TrainingHeads.of(drafter, target), drafter.train()
    ids = random_tokens(2, 24)
    valid = torch.ones_like(ids, dtype=torch.bool)
    batch = DraftBatch(target_features(target, ids, valid), ids, valid, valid, torch.arange(2))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        result = draft_loss(drafter, heads, batch, torch.Generator().manual_seed(step), DistillationWeights())
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(result.loss.item())
    assert losses[-1] < 0.6 * losses[0] and all(p.grad is not None for p in drafter.parameters())
    # A glance would show the heads features of the text that they predict.
    without, glanced = (
        draft_loss(
            drafter, heads, batch, torch.Generator().manual_seed(0), DistillationWeights(), glancing_ratio=ratio
        )
        for ratio in (0.0, 0.8)
    )
    assert glanced.loss.item() == without.loss.item()


def test_medusa_like_is_trained_by_the_same_command(arguments, tmp_path):
    samples = [random_tokens(20, seed=seed) for seed in range(12)]
    TokenFile.from_samples(samples, [4] * 12, [0.0] * 12, VOCAB).save(tmp_path / "tokens.safetensors")
    words = (
        f"--data {tmp_path}/tokens.safetensors --target {tmp_path}/target --output_dir {tmp_path}/medusa --max_steps 2"
    )
    words += " --architecture medusa_like --block_size 3 --report_to none --target_dtype float32"
    assert train.main(words.split()) == 0
    trained = ["--medusa_like", str(tmp_path / "medusa"), "--methods", "medusa_like"]
    assert bench.main([*arguments, *trained]) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())["runs"][1]
    assert (found["method"], found["identical_prompts"], found["passes"]) == ("medusa_like", 2, 1)
