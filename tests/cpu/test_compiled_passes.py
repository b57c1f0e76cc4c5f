# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Compiled draft passes: the trees of passes that are not compiled, while the weights are what they were."""

import copy
import gc
import logging
import shutil
import threading
import weakref

import pytest
import torch
from counting_compiler import Backend, compiled_by, generate, slow, wrong
from eagle3_models import new_eagle3
from quick import one_in, quick
from tiny_models import EXTRAS, prompt, tiny_drafter, tiny_target
from toy_drafter import toy_drafter

import hf_falcon
from hf_falcon import FalconCandidateGenerator
from hf_falcon.cpu import compact_weights, compiling
from hf_falcon.cpu.compiled_rounds import compiled_passes_of
from hf_falcon.cpu.skinny_gemm import skinny_gemm_pays
from hf_falcon.learning.serving_weights import replace_weights

SIZES = (4,)
WIDTH = 3
# What is compiled for a drafter: its layers, and the logits.
PARTS = 2


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture(autouse=True)
def kept_if_slower(monkeypatch):
    """Tiny models do not gain."""
    for name in ("_is_faster", "_are_faster"):
        original = getattr(compiling, name)
        monkeypatch.setattr(compiling, name, lambda *arguments, original=original: [original(*arguments)] != [])


@pytest.fixture
def target():
    return copy.deepcopy(tiny_target("llama"))


def drafter_of(target, block_size=1, num_lstm_layers=0, extra="nothing"):
    drafter = tiny_drafter(target, block_size, num_lstm_layers, extra, draft_width=WIDTH, num_draft_passes=4)
    return copy.deepcopy(drafter)


def compiled(target, drafter, backend):
    return hf_falcon.compiled_rounds(target, SIZES, compiled_by(backend), drafter)


def trees(target, drafter, news=(5, 1, 2, 3, 9, 1)):
    """Of a few rounds, each of which adds so many positions."""
    generator = FalconCandidateGenerator(drafter, target)
    text, found, end = prompt(1 + sum(news)), [], 0
    with torch.no_grad():
        width = (len(drafter.config.feature_layers) + 1) * drafter.config.hidden_size
        features = torch.randn(1, sum(news), width, generator=seeded(), dtype=target.dtype)
        for new in news:
            generator.commit(features[:, end : end + new], text[:, end + 1 : end + new + 1])
            end += new
            tree = generator.propose(text[:, : end + 1], generator.max_depth)
            found.append((tree.token_ids.tolist(), tree.parents.tolist()))
    return found


def children_of_root(tree):
    tokens, parents = tree
    return {token for token, parent in zip(tokens, parents, strict=True) if parent == 0}


def seeded():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("shape, extra", one_in(4, [(1, 0), (1, 1), (2, 0), (2, 1), (3, 2)], list(EXTRAS)))
def test_trees_are_the_same(shape, extra, target, backend):
    block_size, num_lstm_layers = shape
    drafter = drafter_of(target, block_size, num_lstm_layers, extra)
    expected = trees(target, drafter)
    with compiled(target, drafter, backend):
        made, ran = backend.compiled, backend.ran
        assert trees(target, drafter) == expected
        # At least a block after each commit, and a pass.
        assert backend.compiled == made and backend.ran >= ran + 2 * PARTS * len(expected)
    ran = backend.ran
    assert trees(target, drafter) == expected and backend.ran == ran


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"max_new_tokens": 3}], ids=str)
def test_text_equals_plain(options, target, backend):
    drafter = drafter_of(target)
    with compiled(target, drafter, backend):
        for length in (1, 9, 30):
            tokens, ran = prompt(length, length), backend.ran
            assert generate(target, tokens, drafter, **options) == generate(target, tokens, **options)
            assert backend.ran > ran


def test_other_ways_to_verify(target, backend):
    """Which draw candidates, and begin several trees."""
    drafter = drafter_of(target)
    for verification in ("speculative", "multi_root"):
        drafter.generation_config.verification = verification
        expected = generate(target, prompt(9), drafter, do_sample=True)
        with compiled(target, drafter, backend):
            ran = backend.ran
            assert generate(target, prompt(9), drafter, do_sample=True) == expected
            assert backend.ran > ran


def test_batches(target, backend):
    tokens, drafter = torch.cat([prompt(9, seed) for seed in range(2)]), drafter_of(target)
    with compiled(target, drafter, backend):
        ran = backend.ran
        assert generate(target, tokens, drafter) == generate(target, tokens)
        assert backend.ran > ran


def test_wider_passes_run_as_they_are(target, backend):
    drafter = drafter_of(target)
    with compiled(target, drafter, backend):
        assert compiled_passes_of(drafter, target).rows == WIDTH
        drafter.generation_config.draft_width = 2 * WIDTH
        found = trees(target, drafter)
    assert found == trees(target, drafter)


def test_compiled_once(target, backend):
    drafter, config = drafter_of(target), compiled_by(backend)
    for _ in range(2):
        with hf_falcon.compiled_rounds(target, SIZES, config, drafter):
            pass
        with hf_falcon.packed_weights(drafter), hf_falcon.compiled_rounds(target, SIZES, config, drafter):
            pass
    made = backend.compiled
    assert made == len(SIZES) + 2 * PARTS
    hf_falcon.compile_rounds(target, SIZES, config)
    assert backend.compiled == made and compiled_passes_of(drafter, target) is None
    hf_falcon.compile_rounds(target, SIZES, config, drafter)
    assert backend.compiled == made and compiled_passes_of(drafter, target) is not None
    hf_falcon.uncompile_rounds(target)
    assert compiled_passes_of(drafter, target) is None


def test_compiled_anew_for_other_options(target, backend):
    drafter, config = drafter_of(target), compiled_by(backend)
    hf_falcon.compile_rounds(target, SIZES, config, drafter)
    drafter.generation_config.draft_width = 2
    hf_falcon.compile_rounds(target, SIZES, config, drafter)
    assert compiled_passes_of(drafter, target).rows == 2
    assert backend.compiled == len(SIZES) + 2 * PARTS


def test_a_drafter_goes_with_what_was_compiled_for_it(target, backend):
    drafter = drafter_of(target)
    hf_falcon.compile_rounds(target, SIZES, compiled_by(backend), drafter)
    trees(target, drafter)
    gone = weakref.ref(drafter)
    del drafter
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("which", ["target", "another head", "drafter's dtype"])
def test_changed_weights_are_not_drafted_with(which, target, backend):
    drafter = drafter_of(target)
    hf_falcon.compile_rounds(target, SIZES, compiled_by(backend), drafter)
    with torch.no_grad():
        if which == "target":
            target.lm_head.weight.data *= 2.0
        elif which == "another head":
            target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight * 2.0)
        else:
            drafter.double()
    ran, found = backend.ran, trees(target, drafter)
    assert compiled_passes_of(drafter, target) is None and backend.ran == ran
    hf_falcon.uncompile_rounds(target)
    assert trees(target, drafter) == found


@pytest.mark.skipif(not skinny_gemm_pays(), reason="compact weights need MKL, and AVX2 or AVX-512")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_compact_weights(packed, backend, monkeypatch):
    """Of the drafter and of the head: read while they are current."""
    target = copy.deepcopy(tiny_target("llama"))
    drafter = drafter_of(target)
    with torch.no_grad():
        for parameter in [target.lm_head.weight, *drafter.parameters()]:
            parameter.copy_(parameter.bfloat16())
    if packed:
        hf_falcon.pack_weights(drafter)
    expected, products = trees(target, drafter), []
    original = compact_weights.CompactWeight.product
    monkeypatch.setattr(
        compact_weights.CompactWeight,
        "product",
        lambda self, *arguments: products.append(self) or original(self, *arguments),
    )
    hf_falcon.compile_rounds(target, SIZES, compiled_by(backend), drafter)
    linears = [each for each in drafter.modules() if isinstance(each, torch.nn.Linear)]
    # All but the fusion, and the head's rows: those of the target and those that the drafter borrows.
    assert len({*products}) == len(linears) - 1 + 2
    assert trees(target, drafter) == expected
    assert not any("compact" in vars(each) for each in linears)
    if not packed:
        with torch.no_grad():
            drafter.layers[0].mlp.up_proj.weight.data *= 2.0
        ran = backend.ran
        trees(target, drafter)
        assert compiled_passes_of(drafter, target) is None and backend.ran == ran


def test_threads_share_it(target, backend):
    drafter, texts = drafter_of(target), {}

    def accepted(seed):
        """Passes of another thread would not change the text, but what is accepted."""
        settings = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}
        output = target.generate(prompt(9, seed), assistant_model=drafter, **settings)
        return output.sequences.tolist(), output.draft_statistics.accepted_by_depth

    expected = {seed: accepted(seed) for seed in range(4)}
    hf_falcon.compile_rounds(target, SIZES, compiled_by(backend), drafter)

    def write(seed):
        texts[seed] = accepted(seed)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == expected and backend.ran > 0


def test_only_what_is_faster_is_used(target, monkeypatch):
    monkeypatch.undo()

    drafter = drafter_of(target)
    hf_falcon.compile_rounds(target, SIZES, compiled_by(slow), drafter)
    assert compiled_passes_of(drafter, target) is None
    assert generate(target, prompt(9), drafter) == generate(target, prompt(9))


def test_other_values_are_an_error(target, monkeypatch):
    monkeypatch.setattr(compiling, "_is_faster", lambda *arguments: True)
    drafter = drafter_of(target)
    with pytest.raises(RuntimeError, match=f"Compiled draft passes of {WIDTH} rows give other values"):
        hf_falcon.compile_rounds(target, SIZES, compiled_by(wrong), drafter)
    assert compiled_passes_of(drafter, target) is None
    assert generate(target, prompt(9), drafter) == generate(target, prompt(9))


def test_a_drafter_of_another_target(target, backend):
    other = tiny_target("gpt2")
    with pytest.raises(ValueError, match="`target_model_type` is 'gpt2', but the target has 'llama'"):
        hf_falcon.compile_rounds(target, SIZES, compiled_by(backend), drafter_of(other))


def test_a_drafter_of_other_code(target, backend):
    """As one of the Hub that was loaded before the package: its own code would find nothing of what is compiled."""

    class FalconDraftModel(torch.nn.Module):
        is_falcon_drafter = True

    with pytest.raises(TypeError, match="FalconDraftModel: give a `FalconDraftModel` of hf_falcon"):
        hf_falcon.compile_rounds(target, SIZES, compiled_by(backend), FalconDraftModel())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("block_size, num_lstm_layers", [(1, 0), (2, 1)])
def test_trees_are_the_same_by_the_default_compiler(block_size, num_lstm_layers, packed, dtype, target):
    if packed and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor lacks what oneDNN needs for bfloat16")
    target = target.to(dtype)
    drafter = drafter_of(target, block_size, num_lstm_layers).to(dtype)
    if packed:
        hf_falcon.pack_weights(drafter)
    expected = trees(target, drafter)
    with hf_falcon.compiled_rounds(target, (1,), drafter=drafter):
        assert compiled_passes_of(drafter, target) is not None
        found = trees(target, drafter)
    if dtype == torch.float32:
        assert found == expected
    else:
        # Rounding may take one of two like nodes for the other.
        for children, as_expected in zip(map(children_of_root, found), map(children_of_root, expected), strict=True):
            assert len(as_expected) > 2 and len(children ^ as_expected) <= 2


# Drafters of other methods.

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
EAGLE3 = {
    "": {},
    "own embedding": {"has_embedding": True},
    "norm_output": {"norm_output": True, "draft_vocab_size": 40},
    "two layers": {"num_hidden_layers": 2, "model_type": "qwen3"},
    "window": {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
    "llama3": {"rope_parameters": LLAMA3},
}


@pytest.mark.parametrize("name", quick(["norm_output", "window"], EAGLE3))
def test_eagle3_drafters(name, target, backend):
    """Their passes and their own head are compiled; the target's rounds are not, as the drafter reads its layers."""
    drafter = new_eagle3(target, **EAGLE3[name])
    drafter.generation_config.draft_width = WIDTH
    expected = eagle3_trees(target, drafter)
    with compiled(target, drafter, backend):
        made, ran = backend.compiled, backend.ran
        assert compiled_passes_of(drafter, target) is not None
        assert eagle3_trees(target, drafter) == expected
        assert backend.compiled == made and backend.ran >= ran + 2 * PARTS * len(expected)
        for options in ({}, {"do_sample": True}):
            assert generate(target, prompt(9), drafter, **options) == generate(target, prompt(9), **options)
        with torch.no_grad():
            drafter.lm_head.weight.data *= 2.0
        assert compiled_passes_of(drafter, target) is None
    ran = backend.ran
    assert eagle3_trees(target, drafter) != expected and backend.ran == ran


def eagle3_trees(target, drafter):
    generator = FalconCandidateGenerator(drafter, target)
    text, found = prompt(20), []
    with torch.no_grad():
        features = torch.randn(1, 19, 3 * 32, generator=seeded())
        for start, end in ((0, 9), (9, 10), (10, 14), (14, 15)):
            generator.commit(features[:, start:end], text[:, start + 1 : end + 1])
            tree = generator.propose(text[:, : end + 1], generator.max_depth)
            found.append((tree.token_ids.tolist(), tree.parents.tolist()))
    return found


def test_eagle3_drafters_packed(target, backend):
    drafter = new_eagle3(target, draft_vocab_size=40)
    expected = eagle3_trees(target, drafter)
    with hf_falcon.packed_weights(target, drafter):
        assert eagle3_trees(target, drafter) == expected
        with compiled(target, drafter, backend):
            assert compiled_passes_of(drafter, target) is not None
            assert eagle3_trees(target, drafter) == expected
            assert generate(target, prompt(9), drafter) == generate(target, prompt(9))
    assert eagle3_trees(target, drafter) == expected


def test_drafters_without_passes_run_as_they_are(target, backend, caplog, monkeypatch):
    monkeypatch.setattr(compiling.logger, "warning_once", compiling.logger.warning)
    caplog.set_level(logging.WARNING, logger="hf_falcon")
    drafter = toy_drafter(target, num_assistant_tokens=3)
    with compiled(target, drafter, backend):
        assert "draft passes of a BigramDrafter cannot be compiled" in caplog.text
        ran = backend.ran
        assert generate(target, prompt(9), drafter) == generate(target, prompt(9))
        # The target's are compiled.
        assert backend.ran > ran


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["norm_output", "window"])
def test_eagle3_drafters_by_the_default_compiler(name, target):
    drafter = new_eagle3(target, **EAGLE3[name])
    expected = eagle3_trees(target, drafter)
    with hf_falcon.compiled_rounds(target, (1,), drafter=drafter):
        assert compiled_passes_of(drafter, target) is not None
        assert eagle3_trees(target, drafter) == expected
        assert generate(target, prompt(9), drafter) == generate(target, prompt(9))


@pytest.mark.parametrize("is_packed", [False, True])
def test_compiled_passes_follow_weights_that_were_learnt(target, backend, is_packed):
    drafter = drafter_of(target)
    if is_packed:
        hf_falcon.pack_weights(drafter)
    chance = seeded()
    with compiled(target, drafter, backend):
        trees(target, drafter)
        weights = {
            name: each.to_dense().detach() + 0.2 * torch.randn(each.shape, generator=chance)
            for name, each in drafter.named_parameters()
        }
        before = backend.ran
        replace_weights(drafter, weights)
        found = trees(target, drafter)
        assert compiled_passes_of(drafter, target) is not None and backend.ran > before
        other = drafter_of(target)
        replace_weights(other, weights)
        assert found == trees(target, other)


def test_learnt_weights_that_compiled_code_cannot_read_run_uncompiled(target, backend, monkeypatch):
    drafter = drafter_of(target)
    with compiled(target, drafter, backend):
        passes = compiled_passes_of(drafter, target)
        take = passes.take

        def other_dtypes(*models):
            head = take(*models)
            passes.is_faster = None
            return head

        monkeypatch.setattr(passes, "take", other_dtypes)
        replace_weights(drafter, dict(drafter.named_parameters()))
        assert compiled_passes_of(drafter, target) is None
        before = backend.ran
        trees(target, drafter)
        assert backend.ran == before
