# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The probe: what a target takes as it stands, tried once, and rules for what shows later only."""

import inspect
import itertools
from dataclasses import dataclass, field
from functools import partial, wraps
from unittest.mock import Mock, patch

import pytest
import torch
from shrunken import VOCAB as SHRUNKEN_VOCAB
from shrunken import tiny_model
from tiny_models import IS_OLDEST, ROPE_PHI3, new_drafter, new_target, prompt, random_tokens, tiny_drafter, tiny_target
from torch import nn
from torch.distributed.tensor import DeviceMesh, distribute_tensor
from transformers import DynamicCache, LlamaConfig, MixtralConfig, MixtralForCausalLM, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import hf_falcon
from hf_falcon.checkpoint_files import weights_fingerprint
from hf_falcon.core import probe
from hf_falcon.core.probe import CHAINS, PLAIN, TREES
from hf_falcon.core.target_parts import FeatureTap, depth_boundaries, depth_left
from hf_falcon.verdicts import verdict_of_prompt


def generate(target, ids, **kwargs):
    torch.manual_seed(0)
    return target.generate(
        ids, **{"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, "return_dict_in_generate": True, **kwargs}
    )


def check(target, ids, drafts, drafter=None, **kwargs):
    """Equal to plain decoding, and drafted or not."""
    expected = generate(target, ids, **kwargs)
    found = generate(target, ids, assistant_model=drafter or tiny_drafter(target), **kwargs)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert (getattr(found, "draft_statistics", None) is not None) == drafts


@pytest.fixture
def forwards(monkeypatch):
    """Counts the forwards of targets that are given to it."""

    class Forwards(list):
        def of(self, target):
            target.register_forward_hook(lambda *_: self.append(1))
            return target

    return Forwards()


@pytest.mark.parametrize(
    "name, dtype, way",
    [
        ("llama", torch.float32, TREES),
        ("gemma3", torch.float32, TREES),
        ("gpt2", torch.bfloat16, TREES),
        ("bloom", torch.float32, CHAINS),
        ("falcon-alibi", torch.float32, CHAINS),
        ("falcon-alibi", torch.bfloat16, CHAINS),
        ("gpt-neo", torch.float32, CHAINS),
        ("mamba", torch.float32, PLAIN),
        ("mamba", torch.bfloat16, PLAIN),
    ],
)
def test_what_targets_take(name, dtype, way, forwards):
    target = forwards.of(new_target(name).to(dtype))
    for mask in (None, torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])):
        found = verdict_of_prompt(target, prompt(9), mask)
        assert found.way == way and (found.reason is None) == (way == TREES)
    assert len(forwards) <= 2 * 11
    before = len(forwards)
    assert verdict_of_prompt(target, prompt(5)).way == way and len(forwards) == before


@pytest.mark.parametrize(
    "model_type, way",
    [
        ("gemma3_text", TREES),
        ("mixtral", TREES),
        ("olmoe", TREES),
        ("cpmant", PLAIN),
        ("falcon_mamba", PLAIN),
        ("recurrent_gemma", PLAIN),
    ],
)
def test_faults_are_larger_than_what_rounding_does(model_type, way):
    target = tiny_model(model_type).to(torch.bfloat16)
    assert verdict_of_prompt(target, prompt(9)).way == way


@pytest.mark.parametrize("rows", [1, 3])
def test_autocast(rows, warnings_given, monkeypatch):
    """
    A target in float32 keeps plain decoding's tokens, one in bfloat16 drafts as it does without autocast. The drafter
    runs without: torch's LSTM fails under it on some processors.
    """
    target = tiny_target("mistral-window")
    with torch.autocast("cpu", torch.bfloat16):
        for seed in range(4):
            check(target, random_tokens(rows, 9, seed=seed), drafts=False)
        (warning,) = warnings_given()
        assert "plain decoding runs: under autocast" in warning and "load the target in bfloat16" in warning
        target = new_target("llama").to(torch.bfloat16)
        drafter, under_autocast = tiny_drafter(target), set()
        fuse = drafter.fuse
        record = under_autocast.add
        monkeypatch.setattr(
            drafter, "fuse", lambda *inputs: record(torch.is_autocast_enabled("cpu")) or fuse(*inputs), raising=False
        )
        found = generate(target, random_tokens(rows, 9), assistant_model=drafter)
        assert found.draft_statistics.drafted_tokens > 0 and under_autocast == {False}
    check(tiny_target("mistral-window"), random_tokens(rows, 9), drafts=True)


def test_the_probes_tokens_are_ordinary():
    config = LlamaConfig(vocab_size=1000, bos_token_id=257, eos_token_id=[1, 264], pad_token_id=None)
    tokens = list(itertools.islice(probe._ordinary_tokens(config), 200))
    assert 50 < len(set(tokens)) < 100 and tokens[0] == tokens[len(set(tokens))]
    assert min(tokens) >= 250 and max(tokens) < 750 and not {257, 264} & set(tokens)
    assert next(probe._ordinary_tokens(LlamaConfig(vocab_size=1, bos_token_id=0))) == 0


def test_few_forwards_once(forwards):
    target = forwards.of(new_target("llama"))
    verdict_of_prompt(target, prompt(9))
    assert len(forwards) < 10
    verdict_of_prompt(target, random_tokens(3, 9))
    assert len(forwards) < 2 * 10


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
def test_what_acts_on_single_tokens_only_is_seen_in_later_calls(how):
    """As libraries steer a model: by a hook, or a forward of its own, of any module."""
    target = new_target("llama", num_hidden_layers=3)
    drafter, module = tiny_drafter(target), target.model.layers[1].mlp

    def steered(hidden):
        return hidden + 3.0 if hidden.shape[1] == 1 else hidden

    check(target, prompt(9), True, drafter)
    if how == "hook":
        remove = module.register_forward_hook(lambda _, inputs, output: steered(output)).remove
    elif how == "pre-hook":
        remove = module.register_forward_pre_hook(lambda _, inputs: (steered(inputs[0]),)).remove
    else:
        stock = module.forward
        module.forward, remove = lambda hidden: steered(stock(hidden)), lambda: delattr(module, "forward")
    check(target, prompt(9), False, drafter)
    remove()
    check(target, prompt(9), True, drafter)


def test_our_own_hooks_are_no_change(forwards, monkeypatch):
    """Nor transformers' own, which stay after a call that asked for hidden states."""
    target = new_target("llama")
    drafter = new_drafter(target, feature_layers=[0])
    check(target, prompt(9), True, drafter)
    monkeypatch.setattr(probe, "_try_ways", None)
    with FeatureTap(target, [0]):
        check(target, prompt(9), True, drafter, output_hidden_states=True)
    check(target, prompt(9), True, drafter)


@dataclass
class Recorder:
    """Has no hash, as it is compared by its values."""

    seen: list = field(default_factory=list)

    def __call__(self, module, inputs, output):
        self.seen.append(output.shape)

    def note(self, module, inputs, output):
        self.seen.append(output.shape)


@pytest.mark.parametrize("make", [Recorder, lambda: Recorder().note, lambda: Mock(return_value=None)])
def test_hooks_of_all_kinds(make):
    target = new_target("llama")
    target.model.layers[1].mlp.register_forward_hook(make())
    for _ in range(2):
        check(target, prompt(9), True)


def test_an_adapter_for_each_row():
    """PEFT registers new hooks in every call, which count the rows."""
    target = new_target("llama")

    def choose(module, inputs, adapter_names):
        assert inputs[0].shape[0] == len(adapter_names)

    tried, ids = [], random_tokens(3, 9)
    drafter, stock = tiny_drafter(target), probe._Trial.__init__
    for _ in range(2):
        hook = partial(choose, adapter_names=["a", "b", "a"])
        handle = target.model.layers[0].mlp.register_forward_pre_hook(hook)
        with patch.object(probe._Trial, "__init__", lambda *args: tried.append(args[2]) or stock(*args)):
            found = target.generate(ids, assistant_model=drafter, max_new_tokens=8, do_sample=False, pad_token_id=0)
        handle.remove()
        expected = target.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert found.tolist() == expected.tolist()
    assert tried == [3]


def test_an_activated_adapter(warnings_given):
    """PEFT's aLoRA adapts the last tokens of each forward, of which a hook for the call says how many."""
    target = new_target("llama")
    check(target, prompt(9), True)
    layer = target.model.layers[0].mlp

    def note(module, inputs, alora_offsets):
        module.offsets = alora_offsets

    handle = layer.register_forward_pre_hook(partial(note, alora_offsets=[9]))
    layer.register_forward_hook(lambda module, _, output: output * (torch.arange(output.shape[1])[:, None] % 2 + 1))
    check(target, prompt(9), False)
    assert "aLoRA" in warnings_given()[0]
    handle.remove()


class Forgetful(nn.Module):
    """An embedding that differs where tokens come one by one, as a state that a forward of several tokens forgets."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.weight = embedding, embedding.weight

    def forward(self, ids):
        return self.embedding(ids) * (2.0 if ids.shape[1] == 1 else 1.0)


@pytest.mark.parametrize("forgets, way", [(False, TREES), (True, PLAIN)])
def test_tokens_that_are_never_written(forgets, way):
    """Their logits are far larger than what shows a fault."""
    target = new_target("llama")
    if forgets:
        target.model.embed_tokens = Forgetful(target.model.embed_tokens)

    def without_three(module, inputs, logits):
        return torch.cat((torch.full_like(logits[..., :3], torch.finfo(logits.dtype).min), logits[..., 3:]), dim=-1)

    target.lm_head.register_forward_hook(without_three)
    assert verdict_of_prompt(target, prompt(9)).way == way


@pytest.mark.parametrize("what", ["forward", "prepare_inputs_for_generation", "embedding"])
def test_a_target_that_changes_is_probed_anew(what, warnings_given):
    """As by soft prompts, which PEFT puts on the instance."""
    target = new_target("llama")
    drafter = tiny_drafter(target)
    check(target, prompt(9), True, drafter)
    own = target.get_input_embeddings()
    if what == "embedding":
        target.set_input_embeddings(Forgetful(own))
    else:
        stock = getattr(target, what)

        @wraps(stock)
        def changed(*args, **kwargs):
            if what == "forward" and kwargs["input_ids"].shape[1] == 1:
                kwargs["input_ids"] = (kwargs["input_ids"] + 1) % 60
            inputs = stock(*args, **kwargs)
            if what != "forward" and inputs["input_ids"].shape[1] == 1:
                inputs["input_ids"] = (inputs["input_ids"] + 1) % 60
            return inputs

        setattr(target, what, changed)
    check(target, prompt(9), False, drafter)
    assert "otherwise than one by one" in warnings_given()[0] or "does not take" in warnings_given()[0]
    if what == "embedding":
        target.set_input_embeddings(own)
    else:
        delattr(target, what)
    check(target, prompt(9), True, drafter)


def test_nothing_is_left_behind():
    """Neither random states, nor what a model keeps of its last text, nor a hook."""
    target = new_target("llama")
    rope = target.model.rotary_emb
    target.model.rope_deltas = kept = torch.tensor([[7]])

    def forward_hook(module, args, output):
        torch.rand(3)
        module.rope_deltas, module.last_length = torch.zeros(1), torch.ones(1)
        rope.inv_freq = rope.inv_freq * 1.0

    handle = target.model.register_forward_hook(forward_hook)
    before = torch.get_rng_state(), rope.inv_freq, {name: dict(vars(each)) for name, each in target.named_modules()}
    assert verdict_of_prompt(target, prompt(9)).way == TREES
    handle.remove()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert rope.inv_freq is before[1] and target.model.rope_deltas is kept
    assert not any(each._forward_hooks for each in target.modules())
    assert torch.is_grad_enabled()


def test_a_failing_target_leaves_nothing_behind():
    target = new_target("llama")
    handle = target.model.norm.register_forward_hook(lambda *_: torch.rand(1) / None)
    state = torch.get_rng_state()
    assert "TypeError" in verdict_of_prompt(target, prompt(9)).reason
    handle.remove()
    assert torch.equal(torch.get_rng_state(), state) and not any(each._forward_hooks for each in target.modules())


@pytest.mark.parametrize("rows", [1, 2])
def test_a_first_sampled_call_is_plain_decodings(rows):
    target = new_target("llama")
    check(target, random_tokens(rows, 9), True, do_sample=True, temperature=0.8, output_scores=rows == 1)


def test_dropout_is_decoded_plainly(warnings_given):
    target = new_target("llama", attention_dropout=0.5).train()
    found = generate(target, prompt(9), assistant_model=tiny_drafter(target))
    assert found.sequences.tolist() == generate(target, prompt(9)).sequences.tolist()
    assert "otherwise than one by one" in warnings_given()[0]


def test_a_target_is_freed():
    target = new_target("llama")
    verdict_of_prompt(target, prompt(9))
    before = len(probe._verdicts)
    del target
    assert len(probe._verdicts) < before


# Experts.


# transformers 5.17 fails for several rows.
@pytest.mark.parametrize("rows, is_argument", itertools.product([1] if IS_OLDEST else [1, 2], [False, True]))
def test_a_router_whose_loss_is_asked_for(rows, is_argument):
    """Its loss reads the mask of a tree as one of padding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 4, "initializer_range": 0.2}
    sizes |= {"output_router_logits": not is_argument, "pad_token_id": 0, "eos_token_id": None}
    target = MixtralForCausalLM(MixtralConfig(**sizes, sliding_window=None)).eval()
    argument = {"output_router_logits": True} if is_argument else {}
    expected = generate(target, random_tokens(rows, 9), **argument)
    found = generate(target, random_tokens(rows, 9), assistant_model=tiny_drafter(target), **argument)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert rows > 1 or found.draft_statistics.accepted_tokens > 0
    assert target.config.output_router_logits is not is_argument


# Tables of positions.


@pytest.mark.parametrize("name", ["gpt2", "opt", "bart", "llama"])
def test_a_text_that_ends_where_the_table_does(name, monkeypatch):
    import shrunken

    end = 40
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    monkeypatch.setattr(shrunken, "_SIZES", {**shrunken._SIZES, **dict.fromkeys(names, end)})
    target = tiny_model(name)
    assert (end, False) in depth_boundaries(target)
    ids = torch.randint(3, SHRUNKEN_VOCAB, (1, 28), generator=torch.Generator().manual_seed(0))
    # The last token of all is not run any more.
    check(target, ids, True, max_new_tokens=end + 1 - 28)


@pytest.mark.skipif("phi3-longrope" not in ROPE_PHI3, reason="this transformers builds no such tiny target")
@pytest.mark.parametrize("length", [23, 24, 25])
def test_a_prompt_that_ends_where_rotary_frequencies_change(length):
    """No tree crosses the place, and behind it the drafter drafts."""
    target, ids = tiny_target("phi3-longrope"), prompt(length)
    drafter = tiny_drafter(target)
    found = generate(target, ids, assistant_model=drafter)
    assert found.sequences.tolist() == generate(target, ids).sequences.tolist()
    assert found.draft_statistics.drafted_tokens > 0


def test_depth_left():
    assert depth_left([], 9) is None
    assert depth_left([(40, False)], 30) == 9
    assert depth_left([(40, False)], 39) == depth_left([(40, False)], 40) == 0
    assert depth_left([(40, False)], 41) is None
    assert depth_left([(40, True)], 41) == 0
    assert depth_left([(40, False), (20, True)], 10) == 9


# Compiled, spread and resized targets.


def test_weights_that_are_spread(warnings_given):
    """Each process has a part of them. Here there is one process only."""
    target = new_target("llama")
    drafter, linear = tiny_drafter(tiny_target("llama")), target.model.layers[0].mlp.up_proj
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh), requires_grad=False)
        assert weights_fingerprint(target) is None
        assert "spread over several processes" in verdict_of_prompt(target, prompt(9)).reason
        assert drafter.config.target_fingerprint is not None
    finally:
        torch.distributed.destroy_process_group()


def test_a_resized_target_with_an_attached_drafter(warnings_given, caplog):
    target = new_target("llama")
    drafter = tiny_drafter(target)
    hf_falcon.attach(target, drafter)
    target.resize_token_embeddings(70)
    expected = generate(target, prompt(9), assistant_model=None)
    for _ in range(2):
        assert generate(target, prompt(9)).sequences.tolist() == expected.sequences.tolist()
    [warning] = [each.getMessage() for each in caplog.records if each.name == "hf_falcon.attaching"]
    assert "The attached drafter is not used" in warning and "has 70" in warning
    with pytest.raises(ValueError, match="but the target has 70"):
        generate(target, prompt(9), assistant_model=drafter)


# Caches of one's own.


class Named(DynamicCache):
    """As transformers' own."""

    name = "mine"


class Sink(DynamicCache):
    """Keeps the first two rows and the last six."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.layers[layer_idx]
        if layer.keys.shape[-2] > 8:
            layer.keys = torch.cat((layer.keys[..., :2, :], layer.keys[..., -6:, :]), dim=-2)
            layer.values = torch.cat((layer.values[..., :2, :], layer.values[..., -6:, :]), dim=-2)
        return keys, values


def patched():
    cache = DynamicCache()
    stock = cache.update
    cache.update = lambda *args, **kwargs: stock(*args, **kwargs)
    return cache


@pytest.mark.parametrize("make, drafts", [(Named, True), (Sink, False), (patched, False)])
def test_a_cache_of_ones_own(make, drafts, warnings_given):
    target, ids = tiny_target("llama"), prompt(5)
    expected = generate(target, ids, past_key_values=make())
    found = generate(target, ids, past_key_values=make(), assistant_model=tiny_drafter(target))
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert (getattr(found, "draft_statistics", None) is not None) == drafts
    assert drafts or ".update`, and may keep something else" in warnings_given()[0]


def windows(target, keeps):
    cache = DynamicCache()
    cache.layers = [DynamicSlidingWindowLayer(keeps) for _ in range(target.config.num_hidden_layers)]
    return cache


def slots(target, keeps):
    return StaticCache(config=target.config, max_cache_len=keeps)


@pytest.mark.parametrize(
    "name, make, keeps, drafts",
    [
        ("llama", windows, 12, False),
        ("llama", windows, 64, True),
        ("mistral", windows, 12, False),
        ("mistral", windows, 32, True),
        ("mistral", slots, 16, False),
        ("mistral", slots, 64, True),
    ],
)
def test_a_cache_that_keeps_fewer_tokens_than_the_target(name, make, keeps, drafts, warnings_given):
    """Plain decoding forgets the oldest tokens then. It does not matter where no text is so long."""
    target = new_target(name, **({"sliding_window": 32} if name == "mistral" else {}))
    ids, options = prompt(8), {"max_new_tokens": 40}
    expected = generate(target, ids, past_key_values=make(target, keeps), **options)
    found = generate(target, ids, past_key_values=make(target, keeps), assistant_model=tiny_drafter(target), **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert (getattr(found, "draft_statistics", None) is not None) == drafts
    assert drafts or "the cache keeps fewer tokens than the target's own windows" in warnings_given()[0]


def test_a_lack_of_memory_is_no_verdict():
    """A later call may have the memory."""
    target = new_target("llama")

    def fail(*args):
        raise torch.OutOfMemoryError("full")

    handle = target.model.norm.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        verdict_of_prompt(target, prompt(9))
    handle.remove()
    assert verdict_of_prompt(target, prompt(9)).way == TREES


def test_a_state_in_a_layer_with_weights_is_left_alone():
    """RecurrentGemma's layers keep it there, between the turns of a text."""

    class Recurrent(nn.Linear):
        recurrent_states = None

        def forward(self, input):
            self.recurrent_states = input.detach().sum()
            return super().forward(input)

    target = new_target("llama")
    target.model.layers[0].mlp.up_proj.__class__ = Recurrent
    target.generate(prompt(5), max_new_tokens=3, do_sample=False)
    state = target.model.layers[0].mlp.up_proj.recurrent_states
    assert state is not None
    verdict_of_prompt(target, prompt(9))
    assert target.model.layers[0].mlp.up_proj.recurrent_states is state


def test_a_buffer_without_values():
    """As accelerate leaves those of offloaded layers."""
    target = new_target("llama")
    target.model.layers[1].register_buffer("of_an_offloaded_layer", torch.zeros(4, device="meta"))
    assert verdict_of_prompt(target, prompt(9)).way == TREES


def test_a_state_that_is_written_in_place_is_left_alone():
    """That of a spectral norm."""
    target = new_target("llama")
    for layer in target.model.layers:
        nn.utils.spectral_norm(layer.mlp.up_proj)
    target.train()
    before = {name: buffer.clone() for name, buffer in target.named_buffers()}
    verdict_of_prompt(target, prompt(9))
    changed = [name for name, buffer in target.named_buffers() if not torch.equal(buffer, before[name])]
    assert changed == []


class Counting(type(tiny_target("llama"))):
    """Another bias after some steps, which it counts."""

    kind = int

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return kwargs | {"step": kwargs.get("step", 0) + 1}

    def prepare_inputs_for_generation(self, input_ids, step=0, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, **kwargs) | {"step": self.kind(step)}

    def forward(self, input_ids=None, step=0, **kwargs):
        outputs = super().forward(input_ids=input_ids, **kwargs)
        if float(step) > 8:
            outputs.logits[..., 5] += 9.0
        return outputs


@pytest.mark.parametrize("kind", [int, float, str])
def test_an_input_that_counts_steps(kind, warnings_given, monkeypatch):
    monkeypatch.setattr(Counting, "kind", kind)
    target, ids = Counting(new_target("llama").config).eval(), prompt(9)
    # The probe looks for the cache there.
    monkeypatch.setattr(Counting.forward, "__signature__", inspect.signature(target.__class__.__base__.forward), False)
    expected = generate(target, ids)
    found = generate(target, ids, assistant_model=tiny_drafter(target))
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert "['step'] of the target's inputs have other values" in warnings_given()[-1]


def test_an_interrupted_tap_collects_nothing(monkeypatch):
    target = new_target("llama")
    tap = FeatureTap(target, [1])

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    for layer in target.model.layers:
        monkeypatch.setattr(layer, "register_forward_hook", interrupted)
    with pytest.raises(KeyboardInterrupt), tap:
        pass
    assert target.model._forward_hooks
    target(prompt(5))
    assert tap.is_empty


def test_a_weight_that_becomes_sparse():
    target, ids = new_target("llama"), prompt(9)
    drafter = tiny_drafter(target)
    assert generate(target, ids, assistant_model=drafter).draft_statistics is not None
    linear = target.model.layers[0].mlp.down_proj
    linear.weight = nn.Parameter(linear.weight.detach().to_sparse_csr())
    expected = generate(target, ids)
    assert generate(target, ids, assistant_model=drafter).sequences.tolist() == expected.sequences.tolist()


def test_an_embedding_without_a_weight(warnings_given, caplog):
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, token_ids):
            return self.inner(token_ids) * 1.1

    target = new_target("llama")
    drafter = tiny_drafter(target)
    hf_falcon.attach(target, drafter)
    target.set_input_embeddings(Wrapped(target.get_input_embeddings()))
    expected = generate(target, prompt(9), assistant_model=None)
    assert generate(target, prompt(9)).sequences.tolist() == expected.sequences.tolist()
    with pytest.raises(ValueError, match="embedding is \\? wide"):
        drafter.check_target(target)


def test_a_field_that_each_layer_has_for_itself():
    """Gemma 4's full attention layers may have other numbers of keys."""
    target = new_target("gemma4", attention_k_eq_v=True, num_global_key_value_heads=1)
    assert verdict_of_prompt(target, prompt(9)).way == TREES
    expected = generate(target, random_tokens(1, 9))
    found = generate(target, random_tokens(1, 9), assistant_model="lookup")
    assert found.sequences.tolist() == expected.sequences.tolist()
