# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Muon for matrices and AdamW for the rest, as one optimizer."""

import copy

import pytest
import torch
from training_runs import logged, token_file, trainer

from hf_falcon.drafters.eagle3 import Eagle3DraftModel
from hf_falcon.drafters.eagle3_config import Eagle3DraftConfig
from hf_falcon.training import muon as muon_module
from hf_falcon.training.muon import MuonWithAdamW
from hf_falcon.training.trainer import DraftSamples, FalconTrainer, FalconTrainingArguments

BETAS, EPS = (0.8, 0.9), 1e-7


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 6))


def split(network):
    parameters = list(network.parameters())
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def run(network, optimizers, schedulers, steps, seed=1):
    torch.manual_seed(seed)
    for _ in range(steps):
        loss = (network(torch.randn(5, 6)) - 1).square().mean()
        loss.backward()
        for each in optimizers + schedulers:
            each.step()
        for each in optimizers:
            each.zero_grad()


def fall(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def joint(network):
    optimizer = MuonWithAdamW(*split(network), lr=0.1, betas=BETAS, eps=EPS, weight_decay=0.2)
    return optimizer, fall(optimizer)


def test_it_is_both_optimizers_side_by_side(monkeypatch):
    monkeypatch.setattr(muon_module, "has_bfloat16_instructions", lambda: True)
    network, other = layers(), layers()
    optimizer, scheduler = joint(network)
    run(network, [optimizer], [scheduler], 6)
    matrices, rest = split(other)
    muon = torch.optim.Muon(matrices, lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.1, betas=BETAS, eps=EPS, weight_decay=0.0)
    run(other, [muon, adamw], [fall(muon), fall(adamw)], 6)
    for found, expected in zip(network.parameters(), other.parameters()):
        assert torch.equal(found, expected)
    assert not torch.equal(found, list(layers().parameters())[-1])


@pytest.mark.parametrize("native", [True, False])
def test_products_are_in_bfloat16_where_the_processor_has_them(monkeypatch, native):
    monkeypatch.setattr(muon_module, "has_bfloat16_instructions", lambda: native)
    torch.manual_seed(0)
    # Wide and tall: Muon transposes the latter.
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((24, 40), (40, 24))]
    before, gradients = [each.detach().clone() for each in matrices], [torch.randn_like(each) for each in matrices]
    for each, gradient in zip(matrices, gradients):
        each.grad = gradient.clone()
    MuonWithAdamW(matrices, [torch.nn.Parameter(torch.zeros(1))], lr=0.1, betas=BETAS, eps=EPS).step()
    for each, old, gradient in zip(matrices, before, gradients):
        assert torch.equal(each.grad, gradient)
        # The first momentum is a share of the gradient; Newton and Schulz's iteration in double precision.
        ortho = gradient.double() / gradient.double().norm()
        for _ in range(5):
            gram = ortho @ ortho.T
            ortho = 3.4445 * ortho + (-4.775 * gram + 2.0315 * gram @ gram) @ ortho
        update = 0.1 * 0.2 * 40**0.5 * ortho
        error = ((old - each.detach()).double() - update).norm() / update.norm()
        assert (error > 1e-3) if native else (error < 1e-4)
        assert error < 0.05


def test_its_state_is_saved_and_loaded():
    network, other = layers(), layers()
    optimizer, scheduler = joint(network)
    run(network, [optimizer], [scheduler], 3)
    # Loading does not copy tensors.
    kept = copy.deepcopy(optimizer.state_dict())
    resumed, resumed_scheduler = joint(other)
    other.load_state_dict(network.state_dict())
    resumed.load_state_dict(kept)
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    run(network, [optimizer], [scheduler], 3, seed=2)
    run(other, [resumed], [resumed_scheduler], 3, seed=2)
    for found, expected in zip(other.parameters(), network.parameters()):
        assert torch.equal(found, expected)


def test_a_run_with_muon_resumes(target, tmp_path):
    whole = trainer(target, tmp_path / "whole", muon=True)
    whole.train()
    trainer(target, tmp_path / "parts", muon=True, max_minutes=0.0).train()
    second = trainer(target, tmp_path / "parts", muon=True)
    second.train(resume_from_checkpoint=True)
    assert len(logged(second)) == 10
    for name, tensor in whole._drafter.state_dict().items():
        torch.testing.assert_close(second._drafter.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)
    plain = trainer(target, tmp_path / "plain", save_strategy="no")
    plain.train()
    weights = "layers.0.mlp.up_proj.weight"
    assert not torch.equal(plain._drafter.state_dict()[weights], whole._drafter.state_dict()[weights])


def test_a_head_of_its_own_is_left_to_adamw(target, tmp_path):
    drafter = Eagle3DraftModel(Eagle3DraftConfig.from_target(target, draft_vocab_size=24))
    args = FalconTrainingArguments(output_dir=str(tmp_path), muon=True, report_to="none")
    data = token_file()
    samples = DraftSamples(data, list(range(len(data))), 64)
    optimizer = FalconTrainer(drafter, target, args, samples, samples).create_optimizer()
    matrices, rest = (group["params"] for group in optimizer.param_groups)
    assert any(each is drafter.lm_head.weight for each in rest)
    assert any(each is drafter.layers[0].mlp.up_proj.weight for each in matrices)
    assert len(matrices) + len(rest) == sum(each.requires_grad for each in drafter.parameters())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"divergence": "l1"}, "`divergence` is 'l1': choose one of kl"),
        ({"pass_decay": 0.0}, "`pass_decay` is 0.0"),
        ({"muon": True, "fsdp": "full_shard"}, "`muon` is True and `fsdp` is given"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        FalconTrainingArguments(output_dir=str(tmp_path), **arguments)
