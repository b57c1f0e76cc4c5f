# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A tiny target with a chat template, and dialogues, for `hf-falcon prepare`."""

import json

import torch
from tiny_models import new_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(24)]
SPECIAL = ["<unk>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]
EOS, PAD = 1, 2
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_target():
    vocabulary = {token: index for index, token in enumerate(SPECIAL + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", chat_template=TEMPLATE
    )
    model = new_target(vocab_size=len(vocabulary), max_position_embeddings=128, eos_token_id=EOS, pad_token_id=PAD)
    # Wider logits, so that some of the greedy responses end by themselves.
    model.lm_head.weight.data[EOS] *= 3
    # Random weights would choose it like any other token, and hide padding that was taken for a response.
    model.generation_config.suppress_tokens = [PAD]
    return model, tokenizer


def dialogues(n=14):
    """Prompts of 1 to 7 words, all different."""
    generator = torch.Generator().manual_seed(1)
    texts = [
        " ".join([WORDS[i]] + [WORDS[j] for j in torch.randint(24, (i % 7,), generator=generator)]) for i in range(n)
    ]
    return [[{"role": "user", "content": text}, {"role": "assistant", "content": "w1 w2 w3"}] for text in texts]


def write_data(path, records):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in records))
    return str(path)
