# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The multi-token-prediction head of a target: transformers' own logits, trees, batches and plain decoding's texts."""

import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import IS_OLDEST, VOCAB, new_target, prompt, tiny_tokenizer
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, Glm4MoeConfig, modeling_layers, pipeline

import hf_falcon
from hf_falcon.commands.at_hand import at_hand
from hf_falcon.core.interfaces import DraftedBlocks, DrafterAcceleration
from hf_falcon.drafters.mtp import MtpDrafter

pytestmark = pytest.mark.skipif(IS_OLDEST, reason="this transformers loads no multi-token-prediction heads")

LAYERS, NEW_TOKENS = 2, 24
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "num_mtp_layers": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
CONSTANT = {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 6, "num_draft_passes": 3}


def new_mtp_target(kind: str, **changes):
    torch.manual_seed(0)
    if kind == "deepseek":
        config = DeepseekV3Config(**{**COMMON, **LATENT, "num_key_value_heads": 4, **changes})
    else:
        config = Glm4MoeConfig(**{**COMMON, "head_dim": 8, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def new_head(target):
    torch.manual_seed(1)
    head = modeling_layers.MtpModel(target, 1).eval()
    for parameter in head.layers.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return head


@pytest.fixture(scope="module", params=["glm", "deepseek"])
def models(request):
    target = new_mtp_target(request.param)
    return target, MtpDrafter(target, new_head(target))


def generate(target, ids, drafter=None, **settings):
    torch.manual_seed(3)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **settings}
    if drafter is not None:
        settings |= CONSTANT
    return target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **settings)


@torch.no_grad()
def test_its_first_draft_has_transformers_logits(models):
    """Over a prompt, and again after tokens of which some were drafted."""
    target, drafter = models
    from transformers.cache_utils import MtpCache

    ids = prompt(14)
    hidden = target(ids, output_hidden_states=True).hidden_states[-1]
    cache = MtpCache(config=target.config.get_mtp_config())
    head = drafter.make_head(target)
    session = drafter.start_session(head, DrafterAcceleration(drafter))
    for start, end in ((0, 8), (8, 9), (9, 13)):
        tokens, features = ids[:, start + 1 : end + 1], hidden[:, start:end]
        positions = torch.arange(start + 1, end + 1)[None]
        _, expected, _ = drafter.mtp(tokens, features, None, positions, cache)
        states = session.commit(features, tokens)
        torch.testing.assert_close(head.logits(states)[0], expected[0], rtol=1e-4, atol=1e-5)
        session.rewind()
        # Drafted rows leave no trace.
        drafted = DraftedBlocks(torch.zeros(2, dtype=torch.long), torch.tensor([[3], [4]]), states.expand(2, 1, -1))
        session.extend(drafted)


@torch.no_grad()
def test_a_branch_has_the_logits_of_its_own_path(models):
    target, drafter = models
    ids = prompt(9)
    hidden = target(ids, output_hidden_states=True).hidden_states[-1][:, :-1]

    def last_states(paths: list[list[int]]) -> torch.Tensor:
        session = drafter.start_session(drafter.make_head(target), DrafterAcceleration(drafter))
        states = session.commit(hidden, ids[:, 1:])
        session.rewind()
        states = states.expand(len(paths), 1, -1)
        for depth in range(len(paths[0])):
            tokens = torch.tensor([[path[depth]] for path in paths])
            blocks = torch.zeros(len(paths), dtype=torch.long) if depth == 0 else torch.arange(len(paths))
            states = session.extend(DraftedBlocks(blocks, tokens, states))
        return states

    paths = [[5, 9, 2], [7, 9, 2], [5, 1, 8]]
    alone = torch.cat([last_states([path]) for path in paths])
    torch.testing.assert_close(last_states(paths), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "top_k": 0}, {"repetition_penalty": 1.3}], ids=str)
def test_texts_are_plain_decodings(models, rows, settings):
    target, drafter = models
    ids = torch.cat([prompt(11, seed=row) for row in range(rows)])
    mask = torch.ones_like(ids)
    mask[0, : 4 * (rows > 1)] = 0
    expected = generate(target, ids, attention_mask=mask, **settings)
    found = generate(target, ids, drafter, attention_mask=mask, **settings)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.draft_statistics.rounds > 0 and found.draft_statistics.time["drafter"] > 0


def test_it_drafts_a_tree(models, monkeypatch):
    target, drafter = models
    sizes = []
    run = hf_falcon.core.target_run.TargetRun
    score = run.score
    monkeypatch.setattr(
        run, "score", lambda self, trees, texts: sizes.append(int(trees[0].depths.max())) or score(self, trees, texts)
    )
    generate(target, prompt(9), drafter)
    assert max(sizes) > 1


def test_turns_continue_a_cache(models):
    target, drafter = models
    ids, texts = prompt(9), []
    for assistant in (None, drafter):
        cache = DynamicCache(config=target.config)
        first = generate(target, ids, assistant, past_key_values=cache).sequences
        second = generate(target, torch.cat((first, prompt(4, seed=5)), dim=1), assistant, past_key_values=cache)
        texts.append(second.sequences.tolist())
    assert texts[0] == texts[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint with a head, in the names of published ones."""
    target = new_mtp_target("glm")
    head = new_head(target)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    weights = load_file(file)
    for name, weight in head.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm", name.startswith("post_norm"))
        if name == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(weight):
                gate, up = both.chunk(2)
                weights[f"model.layers.{LAYERS}.mlp.experts.{expert}.gate_proj.weight"] = gate.contiguous()
                weights[f"model.layers.{LAYERS}.mlp.experts.{expert}.up_proj.weight"] = up.contiguous()
        elif name == "mlp.experts.down_proj":
            for expert, down in enumerate(weight):
                weights[f"model.layers.{LAYERS}.mlp.experts.{expert}.down_proj.weight"] = down.contiguous()
        else:
            weights[f"model.layers.{LAYERS}.{name}"] = weight.contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    kind = type(target)
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", {rf"model\.layers\.{LAYERS}.*"})
    return tmp_path / "target", head


def test_mtp_by_name_is_the_checkpoints_head(folder):
    path, head = folder
    target = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    expected = generate(target, prompt(9)).sequences.tolist()
    assert generate(target, prompt(9), "mtp").sequences.tolist() == expected
    hf_falcon.attach(target, "mtp")
    output = target.generate(prompt(9), max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected and output.draft_statistics is not None
    loaded = hf_falcon.AutoDrafter.from_pretrained("mtp", target=target)
    own = {name: value for name, value in loaded.mtp.state_dict().items() if name.startswith("layers.")}
    assert own.keys() == {f"layers.{name}" for name in head.layers.state_dict()}
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in own.items())
    with pytest.raises(TypeError, match="part of the target's checkpoint"):
        loaded.save_pretrained("anywhere")
    assert 'assistant_model="mtp"' in at_hand(target.config, str(path), target)["own heads"]


def test_a_pipeline_takes_it(folder):
    target = AutoModelForCausalLM.from_pretrained(folder[0], dtype="auto").eval()
    words = {"max_new_tokens": 8, "do_sample": False}
    texts = []
    for assistant in (None, "mtp"):
        generator = pipeline("text-generation", target, tokenizer=tiny_tokenizer(), assistant_model=assistant)
        texts.append(generator("w1 w2 w3", **words)[0]["generated_text"])
    assert texts[0] == texts[1]


def test_it_keeps_no_target_alive():
    target = new_mtp_target("glm")
    drafter = MtpDrafter(target, new_head(target))
    generate(target, prompt(5), drafter)
    reference = weakref.ref(target)
    del target
    gc.collect()
    assert reference() is None and drafter is not None


def test_what_is_refused(models, monkeypatch):
    target, drafter = models
    with pytest.raises(ValueError, match="LlamaForCausalLM has no `num_mtp_layers`"):
        new_target("llama").generate(prompt(5), assistant_model="mtp", max_new_tokens=4)
    several = new_mtp_target("glm", num_mtp_layers=2)
    with pytest.raises(ValueError, match="`num_mtp_layers` is 2: each layer after the first"):
        hf_falcon.attach(several, "mtp")
    assert "use_mtp=True" in at_hand(several.config, "somewhere", several)["own heads"]
    # transformers leaves the norm out of the head's copy of the embedding, as for Inkling.
    normed = new_mtp_target("glm")
    normed.get_input_embeddings().embed_norm = torch.nn.Identity()
    with pytest.raises(ValueError, match="does not read the target's own embedding"):
        hf_falcon.attach(normed, "mtp")
    assert at_hand(normed.config, "somewhere", normed)["own heads"].startswith("no: the head of Glm")
    with pytest.raises(ValueError, match="drafts for that model alone"):
        generate(new_mtp_target("glm"), prompt(5), drafter)

    def ambiguous(config):
        raise ValueError("ambiguous")

    unknown = new_mtp_target("glm")
    monkeypatch.setattr(type(unknown.config), "get_mtp_config", ambiguous)
    with pytest.raises(ValueError, match=r"transformers does not know its head's layers \(ambiguous\)"):
        hf_falcon.attach(unknown, "mtp")
    with pytest.raises(ValueError, match="drafts where `target` is that model"):
        hf_falcon.AutoDrafter.from_pretrained("mtp")


def test_a_replaced_head_is_not_drafted_with(caplog):
    target = new_mtp_target("glm")
    hf_falcon.attach(target, MtpDrafter(target, new_head(target)))
    target.resize_token_embeddings(VOCAB + 8)
    expected = target.generate(prompt(5), max_new_tokens=6, do_sample=False, assistant_model=None)
    output = target.generate(prompt(5), max_new_tokens=6, do_sample=False)
    assert output.tolist() == expected.tolist() and "AutoDrafter.from_pretrained" in caplog.text
