# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Tiny random targets of many architectures, tiny random drafters, and a tiny tokenizer: nothing is downloaded.

`tiny_target(name)` and `tiny_drafter(target, ...)` give models that tests share. `new_target(name, ...)` and
`new_drafter(target, ...)` make a model for one test, with fields of its configuration.
"""

import copy
import string
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_falcon import FalconDraftConfig, FalconDraftModel

VOCAB = 64
HIDDEN = 32
WINDOW = 7
# Large enough that a token depends on its whole context, and that greedy output does not repeat itself.
_STD = 0.3
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": _STD,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def _build(
    prefix: str, model_suffix: str = "ForCausalLM", attention: str = "sdpa", seed: int = 0, **config: Any
) -> PreTrainedModel:
    config_class = getattr(transformers, f"{prefix.replace('ForCausalLM', '')}Config")
    model_class = getattr(transformers, f"{prefix.replace('Text', '')}{model_suffix}")
    torch.manual_seed(seed)
    # Configurations keep the lists that they are given, and Gemma 4's changes them: each target gets lists of its own.
    made = config_class(**copy.deepcopy({**_SIZES, **config}))
    made._attn_implementation = attention
    return model_class(made).eval()


_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": _STD}
_BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "init_std": _STD}
_BART |= {"is_decoder": True, "is_encoder_decoder": False}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24}
_LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}

TARGETS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": partial(_build, "Llama"),
    "qwen2": partial(_build, "Qwen2"),
    "qwen2-window": partial(_build, "Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0),
    "qwen2-mixed": partial(_build, "Qwen2", use_sliding_window=True, sliding_window=WINDOW, **_MIXED),
    "qwen3": partial(_build, "Qwen3", head_dim=8, initializer_range=0.2),
    "qwen3-window": partial(
        _build, "Qwen3", head_dim=8, use_sliding_window=True, sliding_window=WINDOW + 1, max_window_layers=0
    ),
    "mistral": partial(_build, "Mistral", sliding_window=None),
    "mistral-window": partial(_build, "Mistral", sliding_window=WINDOW),
    "phi3": partial(_build, "Phi3", sliding_window=None),
    "phi3-window": partial(_build, "Phi3", sliding_window=WINDOW + 1),
    "gemma2": partial(
        _build,
        "Gemma2",
        attention="eager",
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW + 1,
        initializer_range=0.2,
    ),
    "gemma3": partial(_build, "Gemma3Text", head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW + 1, **_MIXED),
    "gemma4": partial(
        _build,
        "Gemma4Text",
        head_dim=8,
        global_head_dim=16,
        sliding_window=WINDOW + 1,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
        **_MIXED,
    ),
    "gpt2": partial(_build, "GPT2", model_suffix="LMHeadModel", **_GPT2),
    "gpt-neox": partial(_build, "GPTNeoX", seed=1, rotary_pct=0.5),
    "olmo2": partial(_build, "Olmo2", seed=4, num_hidden_layers=3),
    "granite": partial(_build, "Granite", logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.7),
    "cohere": partial(_build, "Cohere", logit_scale=0.25),
    "cohere2": partial(_build, "Cohere2", logit_scale=0.25, sliding_window=WINDOW + 1, **_MIXED),
    "modernbert": partial(
        _build, "ModernBertDecoder", local_attention=2 * WINDOW, bos_token_id=1, eos_token_id=VOCAB, **_MIXED
    ),
    "opt": partial(_build, "OPT", **_OPT),
}
# Rotary frequencies that change once the context is longer than 24 tokens.
ROPE_SCALED: dict[str, Callable[..., PreTrainedModel]] = {
    "llama-dynamic": partial(
        _build,
        "Llama",
        max_position_embeddings=24,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "phi3-longrope": partial(
        _build, "Phi3", sliding_window=None, original_max_position_embeddings=24, rope_parameters=_LONG
    ),
}
# Of the versions that are supported.
IS_OLDEST = transformers.__version__.startswith("5.17.")
# transformers 5.17 loses the context where Phi3's frequencies change.
ROPE_PHI3 = () if IS_OLDEST else ("phi3-longrope",)
# Targets that take no tree: chains are verified, or plain decoding runs.
WITHOUT_TREES: dict[str, Callable[..., PreTrainedModel]] = {
    "bloom": partial(_build, "Bloom", attention="eager", seed=4, n_layer=2, n_head=4, initializer_range=0.2),
    "falcon-alibi": partial(_build, "Falcon", alibi=True, new_decoder_architecture=False, initializer_range=0.2),
    "bart": partial(_build, "Bart", **_BART),
    "bert": partial(_build, "Bert", model_suffix="LMHeadModel", initializer_range=0.2),
    "gpt-neo": partial(
        _build,
        "GPTNeo",
        attention="eager",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
    ),
    "openai-gpt": partial(_build, "OpenAIGPT", model_suffix="LMHeadModel", attention="eager", **_GPT2),
}
# Targets that forget their state in a forward over several tokens: transformers' own assisted decoding refuses them,
# and plain decoding runs here.
RECURRENT: dict[str, Callable[..., PreTrainedModel]] = {
    "mamba": partial(_build, "Mamba", attention="eager", state_size=4)
}


ALL_TARGETS = {**TARGETS, **ROPE_SCALED, **WITHOUT_TREES, **RECURRENT}


@cache
def _shared_target(name: str) -> PreTrainedModel:
    return ALL_TARGETS[name]()


def tiny_target(name: str = "llama") -> PreTrainedModel:
    """The random target of that name, made once: no test may change it."""
    return _shared_target(name)


def new_target(name: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random target for one test, with `changes` in its configuration, or of another `seed`."""
    return ALL_TARGETS[name](**changes)


def hooks_of(model: PreTrainedModel) -> int:
    """Our hooks on a model. transformers leaves some of its own there, once hidden states were asked for."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return sum(hook.__module__.startswith("hf_falcon") for hook in hooks)


# The same tree every round, whatever that costs.
SAME_EVERY_ROUND = {
    "num_assistant_tokens": 12,
    "num_draft_passes": 4,
    "num_assistant_tokens_schedule": "constant",
    "prompt_lookup_num_tokens": 0,
}
# What a drafter may have beside the paper's parts.
EXTRAS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "conditioning": {"conditioning_size": 24},
    "layers": {"feature_layers": [1, 0]},
    "norms": {"attention_bias": True, "use_qk_norm": True, "use_post_norms": True},
}


@lru_cache(maxsize=256)
def _drafter(target: PreTrainedModel, block_size: int, num_lstm_layers: int, extra: str) -> FalconDraftModel:
    torch.manual_seed(1)
    config = FalconDraftConfig.from_target(
        target,
        block_size=block_size,
        num_lstm_layers=num_lstm_layers,
        num_hidden_layers=1,
        **EXTRAS[extra],
        intermediate_size=48,
        initializer_range=0.2,
    )
    return FalconDraftModel(config).eval()


def tiny_drafter(
    target: PreTrainedModel,
    block_size: int = 2,
    num_lstm_layers: int = 1,
    extra: str = "nothing",
    **options: Any,
) -> FalconDraftModel:
    """
    A random drafter for `target`, whose weights tests share; `options` are set on its generation configuration. By
    default it drafts the same tree every round, whatever that costs, and nothing is looked up.
    """
    drafter = _drafter(target, block_size, num_lstm_layers, extra)
    drafter.generation_config = transformers.GenerationConfig(
        **{**SAME_EVERY_ROUND, "assistant_confidence_threshold": 0.0, **options}
    )
    return drafter


def new_drafter(target: PreTrainedModel, seed: int = 1, scale: float = 0.3, **config: Any) -> FalconDraftModel:
    """
    A drafter for one test, with fields of its configuration, random weights, large enough that every one of them
    matters, and random feature statistics; `scale=0` keeps the weights that it is made with. It drafts the same tree
    every round.
    """
    torch.manual_seed(seed)
    drafter = FalconDraftModel(FalconDraftConfig.from_target(target, **{"intermediate_size": 48, **config})).eval()
    for name, value in SAME_EVERY_ROUND.items():
        setattr(drafter.generation_config, name, value)
    fields = drafter.config
    if fields.draft_vocab_size is not None:
        drafter.draft_vocab_ids.copy_(torch.randperm(fields.vocab_size)[: fields.draft_vocab_size].sort().values)
    if scale:
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, scale)
            drafter.feature_mean.normal_(0.0, 0.5)
            drafter.feature_std.uniform_(0.5, 1.5)
    return drafter


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, none of them the padding token."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids of shape `(1, length)`, none of them the padding token."""
    return random_tokens(1, length, seed=seed)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One character is one token. A new one each time: some tests give theirs a chat template."""
    characters = (string.ascii_letters + string.digits + ".,")[:VOCAB]
    tokenizer = Tokenizer(WordLevel({c: i for i, c in enumerate(characters)}, unk_token=","))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=",")
