# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Writes small random drafters of other projects and their logits, as the package `speculators` computes the logits.

The tests of `hf_falcon.drafters` compare with these files, and do not need the package. The script needs it, in an
environment of its own (Python 3.11 or newer; most of the package's dependencies are for training, and are left out):

    python -m venv ENVIRONMENT
    ENVIRONMENT/bin/pip install torch==2.13.0 transformers==5.19.0
    ENVIRONMENT/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    ENVIRONMENT/bin/pip install "datasets<=5.1.0" loguru openai pydantic-settings
    ENVIRONMENT/bin/python tests/support/make_drafter_references.py

Each folder `tests/drafters/references/<case>/` has `config.json` and the weights as on the Hub, in float32, and
`reference.safetensors`: inputs and outputs, with a batch dimension of 1. Ids of tokens are of the target's
vocabulary, logits are over the drafter's. The target's id of the drafter's id `i` is `i + d2t[i]`. `target_embedding`
is the target's: a drafter uses it where its checkpoint has no embedding, and the checkpoint's own embedding differs
from it. `target_lm_head` is there where the checkpoint has no head.

EAGLE-3 (`eagle3_*`), 12 rows:

- `hidden_states`: the target's hidden states that row `i` reads, of position `i` of the text, concatenated.
- `input_ids`: the token that row `i` reads in the first pass, which is the token at position `i + 1`.
- `logits_0`: the first pass. Row `i` sees rows 0 to `i`, or the last `sliding_window` of them.
- `logits_1`, `logits_2`: passes over fed-back states. Row `i` of pass `p` reads the output of row `i` of pass `p - 1`
  (after the last norm with `norm_output`, else before it) in place of `fc`'s output, and the token `input_ids[i + p]`
  (0 behind the end), not a token that it drafted. The row sees the first pass's rows 0 to `i` (or the same last
  `sliding_window` of them), and row `i` of passes 1 to `p`. Its position is `i + p`. The package adds 1 to all
  positions, which changes no logit.

DFlash (`dflash*`), a context of 9 positions and a block of 4 rows:

- `hidden_states`: the target's hidden states at positions 0 to 8, concatenated.
- `block_ids`: the tokens that the block reads: the token at position 9 (the anchor) and mask tokens. Row `k` has
  position `9 + k`. It sees all of the context and all rows of its block. In a layer with a sliding window of `w` it
  sees positions `9 - w` to 8, for every `k`, and rows 0 to `k`, or all rows with `sliding_window_non_causal`.
- `block_hidden_states`: the output of the last norm.
- `logits`: of each row of the block. Row `k` drafts the token at position `9 + k`, and row 0 drafts none.

DSpark (`dspark*`) has the tensors of DFlash. Row `k` drafts the token at position `10 + k` (`sample_from_anchor`), and
`logits` are without the Markov bias:

- `previous_ids`: the token at position `9 + k`, before the one that row `k` drafts.
- `markov_bias`: what is added to `logits`, for these tokens. The state of a recurrent head starts with zeros.
- `confidence_logits`: the logit of each row's probability to be accepted, for these tokens.
"""

import copy
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.convert.dflash.converter import DFlashConverter
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import DynamicCache, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.utils.logging import disable_progress_bar

FOLDER = Path(__file__).resolve().parents[1] / "drafters" / "references"
VOCAB, DRAFT_VOCAB, HIDDEN = 48, 20, 16
ROWS, PASSES = 12, 3
CONTEXT, BLOCK, MASK_ID = 9, 4, 47
TARGET_LAYERS = 8
TARGET = "a-user/a-target"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Of the original layouts.
PLAIN_LLAMA = {**{k: v for k, v in SIZES.items() if k != "head_dim"}, "model_type": "llama", "num_hidden_layers": 1}
PLAIN_QWEN3 = {
    **SIZES,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "attention_bias": False,
    "rope_theta": 1000000.0,
}
Tensors = dict[str, torch.Tensor]


def main() -> None:
    torch.set_num_threads(1)
    logger.disable("speculators")
    disable_progress_bar()
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        for case, arguments in EAGLE3.items():
            _Case(case, scratch).eagle3(**arguments)
        for case, arguments in ORIGINAL_EAGLE3.items():
            _Case(case, scratch).original_eagle3(**arguments)
        for case, arguments in BLOCKS.items():
            _Case(case, scratch).block(**arguments)
        _Case("dflash_original", scratch).original_dflash()
        _Case("dspark_original", scratch).original_dspark()
    size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    print(f"{len(list(FOLDER.iterdir()))} cases, {size / 1000:.0f} kB in {FOLDER}")


EAGLE3: dict[str, dict[str, Any]] = {
    "eagle3_llama": {"own_embedding": True},
    "eagle3_qwen3": {"layers": Qwen3Config},
    "eagle3_norm_before_residual": {"norm_before_residual": True},
    "eagle3_norm_before_fc": {"norm_before_fc": True},
    "eagle3_fc_norm": {"fc_norm": True},
    "eagle3_norm_output": {"norm_output": True},
    "eagle3_two_layers": {"num_hidden_layers": 2, "norm_before_residual": True},
    "eagle3_biases": {"attention_bias": True, "mlp_bias": True},
    "eagle3_llama3_rope": {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10000.0}},
    "eagle3_sliding_window": {
        "layers": Qwen3Config,
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "eagle3_full_vocabulary": {"draft_vocab_size": VOCAB, "own_embedding": True},
    "eagle3_two_hidden_states": {"layer_ids": [3, TARGET_LAYERS]},
}

ORIGINAL_EAGLE3: dict[str, dict[str, Any]] = {
    # The fields that SafeAILab publishes, then its kind of file, then the fields of SpecForge and NVIDIA.
    "eagle3_original": {},
    "eagle3_original_binary": {"binary": True, "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
    "eagle3_original_eagle_config": {
        "own_embedding": True,
        "head_dim": 8,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
    },
    "eagle3_original_fc_norm": {"fc_norm": True, "norm_output": True},
    # Such a drafter cannot read the target's embedding.
    "eagle3_original_target_hidden_size": {"target_hidden_size": 24, "own_embedding": True},
}

BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash_sliding_window": {"window": 3},
    "dflash_full_vocabulary": {"draft_vocab_size": VOCAB, "window": 3, "sliding_window_non_causal": True},
    "dspark": {"markov_rank": 6},
    "dspark_gated": {"markov_rank": 6, "markov_head_type": "gated", "confidence_head_with_markov": False},
    "dspark_rnn": {"markov_rank": 6, "markov_head_type": "rnn"},
}


class _Case:
    """One folder: its name seeds its random numbers."""

    def __init__(self, name: str, scratch: str) -> None:
        self.name, self.folder = name, FOLDER / name
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        # The package reads the target's weights from a folder: only these three, and the configuration.
        self.target_folder = str(Path(scratch, name, "target"))
        self.converted = Path(scratch, name, "converted")
        LlamaConfig(**SIZES, num_hidden_layers=TARGET_LAYERS).save_pretrained(self.target_folder)
        self.target_embedding = self.normal(VOCAB, HIDDEN)
        self.target_lm_head = 0.3 * self.normal(VOCAB, HIDDEN)
        target = {
            "model.embed_tokens.weight": self.target_embedding,
            "lm_head.weight": self.target_lm_head,
            "model.norm.weight": torch.ones(HIDDEN),
        }
        save_file(target, Path(self.target_folder, "model.safetensors"))

    def eagle3(self, own_embedding: bool = False, layers: type[PreTrainedConfig] = LlamaConfig, **fields: Any) -> None:
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        config = Eagle3SpeculatorConfig(
            **{flag: fields.pop(flag, False) for flag in flags},
            draft_vocab_size=fields.pop("draft_vocab_size", DRAFT_VOCAB),
            eagle_aux_hidden_state_layer_ids=fields.pop("layer_ids", [2, 4, 5]),
            transformer_layer_config=layers(**{**SIZES, "num_hidden_layers": 1, **fields}),
            speculators_config=_speculators_config("eagle3", TARGET, 3),
        )
        self.save_config(config)
        weights = self.random_weights(Eagle3DraftModel(copy.deepcopy(config)))
        if not own_embedding:
            del weights["embed_tokens.weight"]
        self.save_weights(weights)
        self.save_eagle3(self.loaded(Eagle3DraftModel, config, self.folder), weights, HIDDEN)

    def original_eagle3(self, own_embedding: bool = False, binary: bool = False, **fields: Any) -> None:
        published = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **PLAIN_LLAMA,
            "draft_vocab_size": DRAFT_VOCAB,
            "torch_dtype": "float32",
            **fields,
        }
        self.save_config(published)
        # The converter's own description of the drafter gives the names and shapes of the weights.
        converter = Eagle3Converter()
        config = converter._build_eagle3_speculator_config(
            {**published, "target_vocab_size": VOCAB}, self.target_folder, eagle_aux_hidden_state_layer_ids=[2, 4, 5]
        )
        target_hidden = fields.get("target_hidden_size", HIDDEN)
        weights = self.random_weights(_with_fc(_eager(config), target_hidden))
        if not own_embedding:
            del weights["embed_tokens.weight"]
        original = {key.replace("layers.0.", "midlayer."): tensor for key, tensor in weights.items()}
        self.save_weights(original, binary)
        if fields.get("fc_norm") or target_hidden != HIDDEN:
            # The converter does not know these weights: the same names are loaded here.
            model = _with_fc(_eager(config), target_hidden)
            embedding = {"embed_tokens.weight": weights.get("embed_tokens.weight", self.target_embedding)}
            model.load_state_dict({**_verifier_weights(model), **weights, **embedding})
        else:
            converter.convert(self.folder, self.converted, self.target_folder, validate=False)
            config = Eagle3SpeculatorConfig.from_pretrained(self.converted)
            model = self.loaded(Eagle3DraftModel, config, self.converted)
        if target_hidden != HIDDEN:
            self.target_embedding = self.normal(VOCAB, target_hidden)
        self.save_eagle3(model, weights, target_hidden)

    def block(self, window: int | None = None, **fields: Any) -> None:
        dspark = "markov_rank" in fields
        sliding = {"use_sliding_window": True, "sliding_window": window} if window else {}
        types = ["sliding_attention" if window else "full_attention", "full_attention"]
        layers = Qwen3Config(**SIZES, num_hidden_layers=2, layer_types=types, **sliding)
        config_class, model_class = (
            (DSparkSpeculatorConfig, DSparkDraftModel) if dspark else (DFlashSpeculatorConfig, DFlashDraftModel)
        )
        config = config_class(
            **{"draft_vocab_size": DRAFT_VOCAB, **fields},
            block_size=BLOCK,
            aux_hidden_state_layer_ids=[2, 4, 5],
            mask_token_id=MASK_ID,
            transformer_layer_config=layers,
            speculators_config=_speculators_config("dspark" if dspark else "dflash", TARGET, BLOCK - (not dspark)),
        )
        self.save_config(config)
        # What the package saves: no embedding, and no head where it is the target's.
        full = config.draft_vocab_size == VOCAB
        weights = self.random_weights(model_class(_of_target(config, self.target_folder)))
        for name in ("embed_tokens.weight", "lm_head.weight")[: 1 + full]:
            del weights[name]
        self.save_weights(weights)
        self.save_block(self.loaded(model_class, config, self.folder), weights)

    def original_dflash(self) -> None:
        published = {
            "architectures": ["DFlashDraftModel"],
            **PLAIN_QWEN3,
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": BLOCK,
            "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [1, 3, 4]},
            "dtype": "float32",
            "layer_types": ["full_attention"] * 2,
            "num_target_layers": TARGET_LAYERS,
        }
        self.save_config(published)
        config = DFlashConverter()._build_config(published, self.target_folder, None)
        weights = self.random_weights(DFlashDraftModel(_of_target(config, self.target_folder)))
        for name in ("embed_tokens.weight", "lm_head.weight"):
            del weights[name]
        self.save_weights(weights)
        DFlashConverter().convert(self.folder, self.converted, self.target_folder, validate=False)
        config = DFlashSpeculatorConfig.from_pretrained(self.converted)
        self.save_block(self.loaded(DFlashDraftModel, config, self.converted), weights)

    def original_dspark(self) -> None:
        heads = {
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "markov_rank": 6,
            "markov_head_type": "vanilla",
        }
        published = {
            "architectures": ["Qwen3DSparkModel"],
            **PLAIN_QWEN3,
            **heads,
            "block_size": BLOCK,
            "dtype": "float32",
            "layer_types": ["full_attention"] * 2,
            "mask_token_id": MASK_ID,
            "num_anchors": 512,
            "num_target_layers": TARGET_LAYERS,
            # The id of a layer whose output is read, and -1 is the embedding.
            "target_layer_ids": [-1, 3, 4],
        }
        self.save_config(published)
        # The package has no converter for this layout: names and computation are the same, and all weights are there.
        layers = Qwen3Config(**{key: value for key, value in published.items() if key != "architectures"})
        config = DSparkSpeculatorConfig(
            **heads,
            block_size=BLOCK,
            draft_vocab_size=VOCAB,
            aux_hidden_state_layer_ids=[0, 4, 5],
            mask_token_id=MASK_ID,
            transformer_layer_config=layers,
            speculators_config=_speculators_config("dspark", None, BLOCK),
        )
        layers._attn_implementation = "eager"
        model = DSparkDraftModel(config)
        weights = self.random_weights(model)
        self.save_weights(weights)
        model.load_state_dict({**_verifier_weights(model), **weights})
        self.save_block(model, weights)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def ids(self, count: int) -> torch.Tensor:
        return torch.randint(1, VOCAB - 1, (1, count), generator=self.generator)

    def random_weights(self, model: torch.nn.Module) -> Tensors:
        """All weights but the target's. They are so large that each of them, and each flag, changes the logits."""
        weights: Tensors = {}
        for name, tensor in model.state_dict().items():
            if name.startswith("verifier_") or name in ("t2d", "d2t"):
                continue
            if "norm" in name:
                weights[name] = 0.5 + torch.rand(tensor.shape, generator=self.generator)
            elif name in ("embed_tokens.weight", "markov_head.markov_w1.weight"):
                weights[name] = self.normal(*tensor.shape)
            else:
                weights[name] = 0.3 * self.normal(*tensor.shape)
        if model.use_draft_vocab:
            chosen = torch.randperm(VOCAB, generator=self.generator)[:DRAFT_VOCAB].sort().values
            weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
            weights["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
        return weights

    def loaded(self, model_class: Any, config: Any, folder: Path) -> Any:
        """The package's model with the weights of the folder, and the target's where the folder has none."""
        # `from_pretrained` leaves a missing embedding uninitialised. The package replaces it only if it has a NaN.
        model = model_class(_of_target(config, self.target_folder))
        unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False).unexpected_keys
        assert not unexpected, unexpected
        model.load_verifier_weights()
        return model

    def save_config(self, config: Any) -> None:
        self.folder.mkdir(parents=True)
        if isinstance(config, dict):
            text = json.dumps(config, indent=2, sort_keys=True)
            (self.folder / "config.json").write_text(f"{text}\n", encoding="utf-8")
        else:
            # The package saves its own code beside it, which does not belong here.
            config.save_pretrained(self.converted)
            shutil.copy(self.converted / "config.json", self.folder)

    def save_weights(self, weights: Tensors, binary: bool = False) -> None:
        if binary:
            torch.save(weights, self.folder / "pytorch_model.bin")
        else:
            save_file(weights, self.folder / "model.safetensors", metadata={"format": "pt"})

    def save_eagle3(self, model: Eagle3DraftModel, weights: Tensors, target_hidden: int) -> None:
        self.check_loaded(model, weights)
        num_states = model.fc.in_features // target_hidden
        hidden_states, input_ids = self.normal(1, ROWS, num_states * target_hidden), self.ids(ROWS)
        logits = _eagle3_logits(model, hidden_states, input_ids)
        _check_eagle3(model, hidden_states, input_ids, logits)
        reference = {f"logits_{index}": tensor for index, tensor in enumerate(logits)}
        self.save_reference({"hidden_states": hidden_states, "input_ids": input_ids, **reference}, weights)

    def save_block(self, model: DFlashDraftModel, weights: Tensors) -> None:
        self.check_loaded(model, weights)
        hidden_states = self.normal(1, CONTEXT, model.fc.in_features)
        block_ids = torch.full((1, BLOCK), MASK_ID)
        block_ids[:, :1] = self.ids(1)
        block_hidden, logits = _block_logits(model, hidden_states, block_ids)
        _check_block(model, hidden_states, block_ids, block_hidden)
        reference = {
            "hidden_states": hidden_states,
            "block_ids": block_ids,
            "block_hidden_states": block_hidden,
            "logits": logits,
        }
        if isinstance(model, DSparkDraftModel):
            previous = torch.cat([block_ids[:, :1], self.ids(BLOCK - 1)], dim=1)
            # As `DSparkDraftModel.forward` does it.
            embedded = model.markov_head.prev_embeddings(previous)
            bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=block_hidden, prev_emb=embedded)
            with_markov = model.config.confidence_head_with_markov
            features = torch.cat([block_hidden, embedded], dim=-1) if with_markov else block_hidden
            confidence = model.confidence_head(features)
            reference |= {"previous_ids": previous, "markov_bias": bias, "confidence_logits": confidence}
        self.save_reference(reference, weights)

    def check_loaded(self, model: Any, weights: Tensors) -> None:
        """The model must have all weights of the file, and the target's where the file has none."""
        assert model._attn_impl == "eager", model._attn_impl
        target = {"embed_tokens.weight": self.target_embedding, "lm_head.weight": self.target_lm_head}
        loaded = model.eval().state_dict()
        for name, tensor in {**target, **weights}.items():
            assert torch.equal(loaded[name], tensor), f"{self.name}: {name} was not loaded."

    def save_reference(self, tensors: Tensors, weights: Tensors) -> None:
        tensors["target_embedding"] = self.target_embedding
        if "lm_head.weight" not in weights:
            tensors["target_lm_head"] = self.target_lm_head
        assert all(tensor.isfinite().all() for tensor in tensors.values()), self.name
        tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, self.folder / "reference.safetensors")


def _speculators_config(algorithm: str, target: str | None, tokens: int) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=target, architectures=["LlamaForCausalLM"]),
    )


def _of_target(config: Any, folder: str) -> Any:
    """The same configuration, for the target in the folder, and with dense attention masks."""
    config = copy.deepcopy(config)
    config.speculators_config.verifier.name_or_path = folder
    config.transformer_layer_config._attn_implementation = "eager"
    return config


def _eager(config: Eagle3SpeculatorConfig) -> Eagle3DraftModel:
    config = copy.deepcopy(config)
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel(config)


def _with_fc(model: Eagle3DraftModel, target_hidden: int) -> Eagle3DraftModel:
    """The package's model assumes that the target is as wide as the drafter; the rest of the model does not see it."""
    if target_hidden != HIDDEN:
        model.fc = torch.nn.Linear(3 * target_hidden, HIDDEN, bias=False)
    return model


def _verifier_weights(model: torch.nn.Module) -> Tensors:
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith("verifier_")}


@torch.no_grad()
def _eagle3_logits(model: Eagle3DraftModel, hidden_states: torch.Tensor, input_ids: torch.Tensor) -> Any:
    """The logits of each pass. `forward` returns the most probable tokens only."""
    logits: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    document_ids = torch.zeros_like(input_ids)
    drafted = model(hidden_states, input_ids, document_ids, ttt_steps=PASSES)
    hook.remove()
    assert len(logits) == PASSES and all(torch.equal(a.argmax(-1), b) for a, b in zip(logits, drafted, strict=True))
    return logits


@torch.no_grad()
def _check_eagle3(model: Eagle3DraftModel, hidden_states: torch.Tensor, input_ids: torch.Tensor, logits: Any) -> None:
    """The same logits, as a drafter computes them: row after row, with the keys of the rows that it may see."""
    states = hidden_states
    if model.input_norm is not None:
        states = model.input_norm(states)
    if model.fc_norm is not None:
        chunks = states.chunk(len(model.fc_norm), dim=-1)
        states = torch.cat([norm(chunk) for norm, chunk in zip(model.fc_norm, chunks, strict=True)], dim=-1)
    states = model.fc(states)
    cache = DynamicCache()
    for row in range(ROWS):
        if row > 0:
            cache.crop(row - cache.get_seq_length())
        hidden = states[:, row : row + 1]
        for index in range(min(PASSES, ROWS - row)):
            embedded = model.embed_tokens(input_ids[:, row + index : row + index + 1])
            hidden = torch.cat([embedded, hidden], dim=-1)
            rotation = model.rotary_emb(hidden, torch.tensor([[row + index]]))
            for number, layer in enumerate(model.layers):
                visible = torch.zeros(1, 1, 1, row + index + 1)
                if number in model.sliding_window_indices:
                    visible[..., : max(0, row + 1 - model.sliding_window)] = float("-inf")
                hidden = layer(hidden, visible, past_key_values=cache, position_embeddings=rotation)
            normed = model.norm(hidden)
            torch.testing.assert_close(model.lm_head(normed)[:, 0], logits[index][:, row], atol=2e-5, rtol=2e-5)
            hidden = normed if model.config.norm_output else hidden


@torch.no_grad()
def _block_logits(model: DFlashDraftModel, hidden_states: torch.Tensor, block_ids: torch.Tensor) -> Any:
    """The last norm's output and the logits of the block, by the package's training pass with a single anchor."""
    length = CONTEXT + BLOCK + 1
    # What lies behind the anchor must not be seen.
    padded = torch.full((1, length, hidden_states.shape[-1]), 1e3)
    padded[:, :CONTEXT] = hidden_states
    input_ids = torch.ones(1, length, dtype=torch.long)
    input_ids[:, CONTEXT] = block_ids[:, 0]
    anchor = torch.zeros(1, length).index_fill_(1, torch.tensor([CONTEXT]), 1.0)
    last = torch.zeros(1, length, HIDDEN)
    hidden, logits, *_ = model._backbone_forward(
        padded, input_ids, anchor, last, torch.zeros_like(input_ids), max_anchors=1
    )
    return hidden, logits


@torch.no_grad()
def _check_block(model: DFlashDraftModel, hidden_states: torch.Tensor, block_ids: torch.Tensor, expected: Any) -> None:
    """The same output, with masks as the text at the top says."""
    context = model.hidden_norm(model.fc(hidden_states))
    hidden = model.embed_tokens(block_ids)
    rotation = model.rotary_emb(hidden, torch.arange(CONTEXT + BLOCK)[None])
    for number, layer in enumerate(model.layers):
        visible = torch.ones(BLOCK, CONTEXT + BLOCK, dtype=torch.bool)
        if number in model.sliding_window_indices:
            visible[:, : CONTEXT - model.sliding_window] = False
            if not model.sliding_window_non_causal:
                visible[:, CONTEXT:] = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()
        mask = torch.zeros(1, 1, *visible.shape).masked_fill_(~visible, float("-inf"))
        hidden = layer(context, hidden, mask, position_embeddings=rotation)
    torch.testing.assert_close(model.norm(hidden), expected, atol=2e-5, rtol=2e-5)


if __name__ == "__main__":
    main()
