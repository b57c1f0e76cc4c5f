# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Tiny token files, batches and training runs, and fixtures of the tests that train."""

import pytest
import torch
from tiny_models import VOCAB, new_drafter, random_tokens, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_falcon.training.csgd import (
    DistillationWeights,
    DraftBatch,
)
from hf_falcon.training.features import target_features
from hf_falcon.training.token_file import TokenFile
from hf_falcon.training.trainer import (
    DraftSamples,
    FalconTrainer,
    FalconTrainingArguments,
    collate,
)

WEIGHTS = DistillationWeights(regression=0.7, distillation=0.3, soft=0.6)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def each_seeded(samples, first=0):
    return [seeded(first + sample) for sample in range(samples)]


def token_file(samples=7, seed=5, lengths=(10, 20), prompt=4) -> TokenFile:
    generator = seeded(seed)
    tokens = [
        torch.randint(3, VOCAB, (int(length),), generator=generator)
        for length in torch.randint(*lengths, (samples,), generator=generator)
    ]
    return TokenFile.from_samples(tokens, [prompt] * samples, [0.0] * samples, VOCAB)


def draft_batch(target, lengths=(24, 17, 21), prompts=(12, 13, 20), layers=()) -> DraftBatch:
    samples = [
        {"sample": i, "token_ids": random_tokens(n, seed=n), "prompt_length": p}
        for i, (n, p) in enumerate(zip(lengths, prompts))
    ]
    fields = collate(samples)
    return DraftBatch(target_features(target, fields["token_ids"], fields["valid"], layers), **fields)


def trainer(target, folder, callback=None, train_file=None, changes=None, **arguments):
    data = train_file or token_file()
    drafter = new_drafter(target, scale=0, **{"num_lstm_layers": 1, **(changes or {})})
    defaults = {
        "max_steps": 10,
        "per_device_train_batch_size": 2,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = FalconTrainingArguments(output_dir=str(folder), **{**defaults, **arguments})
    held_out = DraftSamples(data, [0, 1, 2], 64)
    found = FalconTrainer(drafter, target, args, DraftSamples(data, list(range(len(data))), 64), held_out)
    if callback is not None:
        found.add_callback(callback)
    return found


def logged(run):
    """What a run logs after its last start, without what depends on the clock."""
    return [
        {name: value for name, value in logs.items() if name != "tokens_per_second"}
        for logs in run.state.log_history
        if "loss" in logs
    ]


def arguments(workplace, output, **changes):
    given = {
        "data": workplace / "tokens.safetensors",
        "target": workplace / "target",
        "target_dtype": "float32",
        "output_dir": output,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        # As in the paper: what has most parts.
        "block_size": 2,
        "num_lstm_layers": 2,
        "num_draft_layers": 1,
        "report_to": "none",
        "use_cpu": True,
        "final_tau_prompts": 0,
        **changes,
    }
    # A flag has no value.
    return [word for name, value in given.items() for word in (f"--{name}", *([] if value is True else [str(value)]))]


@pytest.fixture(scope="session")
def target():
    return tiny_target()


@pytest.fixture(autouse=True)
def no_plot(monkeypatch):
    """Drawing takes longer than the tiny trainings do; the tests of the plot put it back."""
    monkeypatch.setattr("hf_falcon.training.plot.draw", lambda log_history: None)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A target with its tokenizer, and a token file, in folders that no test writes to."""
    folder = tmp_path_factory.mktemp("workplace")
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0")
    tiny_target().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    token_file(samples=30).save(folder / "tokens.safetensors")
    return folder
