# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Draft models with other tokens than the target: the text of plain decoding, and the same text on both sides."""

import random
import string
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from quick import one_in
from tiny_models import SAME_EVERY_ROUND, VOCAB, new_target, prompt, tiny_target, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_falcon
from hf_falcon import CausalLMDrafter
from hf_falcon.drafters import language_model, vocabularies
from hf_falcon.drafters.vocabularies import OtherTokens, SameTokens, tokenizer_of, vocabulary_of

FIXED = {**SAME_EVERY_ROUND, "assistant_confidence_threshold": 0.0}


def byte_tokenizer(*merges, special=(), **names):
    """A byte-level tokenizer with these merges, such as `"a b"`, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(each.split()) for each in merges]
    tokens = [*special, *alphabet, *("".join(pair) for pair in pairs)]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    found.add_special_tokens({"additional_special_tokens": list(special)})
    return found


PLAIN = byte_tokenizer("h e", special=("<s>", "<only>"))
MERGED = byte_tokenizer("a b", "l o", "h e", "ab c", "Ġ a", special=("<s>",))


def character_tokenizer(*pairs):
    """Tokens of one character, those of tiny_tokenizer, in another order, and of pairs of them."""
    characters = list((string.ascii_letters + string.digits + ".,")[:VOCAB])[::-1]
    merges = [tuple(pair) for pair in pairs]
    tokens = [*characters, *pairs]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges, unk_token=","))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=",")


@pytest.mark.parametrize("part", [512, 24])
@pytest.mark.parametrize("seed", range(3))
def test_a_text_is_encoded_anew_where_its_tokens_join(seed, part, monkeypatch):
    """However it is divided, the draft model's tokens are those of the whole text."""
    monkeypatch.setattr(vocabularies, "_PART", part)
    vocabulary = OtherTokens(PLAIN, MERGED, [(0, 0)])
    choose = random.Random(seed)
    text = "".join(choose.choice(["abc", "lo", " a", " ", "he", "\n", "é", "x", " 🙂"]) for _ in range(120))
    whole, translation, found, cuts = PLAIN.encode(text), vocabulary.translate(), [], 0
    while whole:
        count = choose.randint(1, 4)
        kept, tokens = translation.extend(whole[:count])
        cuts += kept < len(found)
        found[kept:], whole = tokens, whole[count:]
    assert found == MERGED.encode(text) and cuts > 3


def test_special_tokens():
    shared = [(0, 0), *((PLAIN.convert_tokens_to_ids(each), MERGED.convert_tokens_to_ids(each)) for each in "ab")]
    translation = OtherTokens(PLAIN, MERGED, shared).translate()
    ids = [*PLAIN.encode("<s>ab"), *PLAIN.encode("<only>"), *PLAIN.encode("c")]
    # What only the target knows stands for no text; and nothing joins across it.
    expected = [0, MERGED.convert_tokens_to_ids("ab"), MERGED.convert_tokens_to_ids("c")]
    assert translation.extend(ids) == (0, expected)
    assert translation.extend([0]) == (3, [0])


def test_the_shared_tokens():
    target, model = new_target(vocab_size=320), new_target(vocab_size=288)
    found = vocabulary_of(target, model, PLAIN, MERGED)
    ids = list(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True))
    texts = [PLAIN.convert_ids_to_tokens(a) for a, _ in ids]
    assert texts == [MERGED.convert_ids_to_tokens(b) for _, b in ids] and len(ids) == found.size
    assert "<only>" not in texts and "he" in texts and len(ids) == 258
    # Rows of the matrix that no token has make no other vocabulary.
    same = vocabulary_of(target, model, PLAIN, PLAIN)
    assert isinstance(same, SameTokens) and same.size == 288 and same.target_ids.tolist() == list(range(288))


@pytest.mark.parametrize(
    "name, rows, schedule, do_sample",
    one_in(2, ["llama", "gemma3", "bloom"], [1, 2], ["constant", "heuristic"], [False, True]),
)
def test_texts_are_those_of_plain_decoding(name, rows, schedule, do_sample):
    pairs = ["ab", "cd", "ef", "gh", "xy", "no", "ij", "AB"]
    target, drafter = tiny_target("llama"), CausalLMDrafter(new_target(name, vocab_size=VOCAB + len(pairs)))
    options = FIXED if schedule == "constant" else {"prompt_lookup_num_tokens": 6}
    ids = torch.cat([prompt(9, seed=row) for row in range(rows)])

    def generate(**more):
        torch.manual_seed(1)
        return target.generate(ids, max_new_tokens=24, do_sample=do_sample, top_k=0, pad_token_id=0, **more)

    found = generate(
        assistant_model=drafter,
        tokenizer=tiny_tokenizer(),
        assistant_tokenizer=character_tokenizer(*pairs),
        return_dict_in_generate=True,
        **options,
    )
    assert found.sequences.tolist() == generate().tolist()
    assert found.draft_statistics is not None
    # The tokenizers are known for this target from now on.
    assert generate(assistant_model=drafter, **options).tolist() == found.sequences.tolist()


def permuted(model, tokenizer, other):
    """A model that computes what `model` does, with the ids of another tokenizer of the same tokens."""
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(each) for each in other.convert_ids_to_tokens(range(VOCAB))])
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight.copy_(layer.weight[ids])
    return model


@pytest.mark.parametrize("verification", ["exact", "speculative"])
def test_a_copy_of_the_target_with_other_ids_is_always_right(verification):
    """Its proposals, and what it reads, are the same text; the ids are others."""
    target, other = tiny_target("llama"), character_tokenizer()
    drafter = CausalLMDrafter(permuted(new_target("llama"), tiny_tokenizer(), other), other)
    # With vocabularies of one size, they are asked for.
    settings = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": other, "max_new_tokens": 21, **FIXED}
    settings |= {"draft_tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "verification": verification}
    settings |= {"do_sample": verification == "speculative", "pad_token_id": 0, "return_dict_in_generate": True}
    assert target.generate(prompt(9), assistant_model=drafter, **settings).draft_statistics.tau == 4


def test_tokenizers_are_found_by_the_names_of_the_models(tmp_path):
    pairs = ["ab", "cd"]
    target, model = new_target(), new_target(vocab_size=VOCAB + 2)
    for each, tokenizer, name in ((target, tiny_tokenizer(), "target"), (model, character_tokenizer(*pairs), "draft")):
        each.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    kind = type(target)
    target = kind.from_pretrained(tmp_path / "target")
    expected = target.generate(prompt(9), max_new_tokens=12, do_sample=False, pad_token_id=0)
    found = target.generate(
        prompt(9), assistant_model=str(tmp_path / "draft"), max_new_tokens=12, do_sample=False, pad_token_id=0, **FIXED
    )
    assert found.tolist() == expected.tolist()
    assert len(tokenizer_of(target)) == VOCAB and tokenizer_of(new_target()) == "it has no name"


def test_threads_find_the_tokenizers_once(tmp_path, monkeypatch):
    target, model = new_target(), new_target(vocab_size=VOCAB + 2)
    target.name_or_path, model.name_or_path = "target", "draft"
    found = {"target": tiny_tokenizer(), "draft": character_tokenizer("ab", "cd")}
    asked = []

    def load(name):
        asked.append(name)
        time.sleep(0.05)
        return found[name]

    monkeypatch.setattr(vocabularies.transformers, "AutoTokenizer", SimpleNamespace(from_pretrained=load))
    drafter = CausalLMDrafter(model)
    with ThreadPoolExecutor(3) as pool:
        shared = list(pool.map(lambda _: drafter.vocabulary_of(target).size, range(3)))
    assert shared == [VOCAB] * 3 and sorted(asked) == ["draft", "target"]


def test_the_reason_why_there_is_no_tokenizer(monkeypatch):
    target, model = new_target(), new_target(vocab_size=VOCAB + 2)
    target.name_or_path = model.name_or_path = "private/model"

    def refused(name):
        raise OSError("401: log in\nfirst.")

    monkeypatch.setattr(vocabularies.transformers, "AutoTokenizer", SimpleNamespace(from_pretrained=refused))
    with pytest.raises(ValueError, match=r"for the target \(OSError: 401: log in first\) and the draft model \(OSErr"):
        CausalLMDrafter(model).vocabulary_of(target)


def test_added_tokens_that_are_text_are_read():
    """Such as Gemma's line breaks."""
    target = byte_tokenizer("h e", special=("<s>",))
    target.add_tokens(["\n\n"])
    text = "he\n\nhe<s>"
    vocabulary = OtherTokens(target, MERGED, [(0, 0)])
    _, tokens = vocabulary.translate().extend(target.encode(text))
    assert target.encode("\n\n") == [len(target) - 1]
    assert MERGED.decode(tokens) == text


def test_given_tokenizers_are_compared_once(monkeypatch):
    target, drafter = tiny_target(), CausalLMDrafter(new_target(vocab_size=VOCAB + 2))
    compared, stock = [], language_model.vocabulary_of
    monkeypatch.setattr(language_model, "vocabulary_of", lambda *args: compared.append(args) or stock(*args))
    own = tiny_tokenizer()
    for other in (character_tokenizer("ab", "cd"), character_tokenizer("ab", "ef")):
        for _ in range(2):
            drafter.vocabulary_of(target, own, other)
    assert len(compared) == 2


@pytest.mark.parametrize("size", [VOCAB - 8, VOCAB + 8])
def test_a_target_whose_vocabulary_was_resized_is_compared_again(size):
    target, drafter = new_target(), CausalLMDrafter(new_target())
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    hf_falcon.attach(target, drafter)
    assert target.generate(prompt(9), **options).draft_statistics is not None
    target.resize_token_embeddings(size, mean_resizing=False)
    ids = prompt(9).clamp(max=size - 1)
    ids[0, 4] = size - 1
    # The attached drafter is not used.
    found = target.generate(ids, **options)
    assert not hasattr(found, "draft_statistics")
    assert found.sequences.tolist() == target.generate(ids, assistant_model=None, **options).sequences.tolist()
    with pytest.raises(ValueError, match=f"`vocab_size` is {VOCAB}, but the target has {size}"):
        target.generate(ids, assistant_model=drafter, **options)


def test_two_tokenizers_count_wherever_they_are_given():
    other = character_tokenizer("ab", "cd")
    target, drafter = tiny_target(), CausalLMDrafter(new_target(), other)
    # By their sizes alone the tokens are the same.
    assert isinstance(drafter.vocabulary_of(target), SameTokens)
    assert isinstance(drafter.vocabulary_of(target, tiny_tokenizer()), OtherTokens)
    assert isinstance(drafter.vocabulary_of(target), OtherTokens)


def test_what_cannot_be_matched():
    target, drafter = tiny_target(), CausalLMDrafter(new_target(vocab_size=VOCAB + 2))
    message = "`vocab_size` is 66, but the target has 64.*no tokenizer was found for the target .*and the draft model"
    with pytest.raises(ValueError, match=message):
        target.generate(prompt(9), assistant_model=drafter)
    message = "no tokenizer was found for the draft model"
    with pytest.raises(ValueError, match=message):
        target.generate(prompt(9), assistant_model=drafter, tokenizer=tiny_tokenizer(), assistant_tokenizer=None)
    foreign = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?!": 0}, unk_token="?!")))
    with pytest.raises(ValueError, match="no token in common"):
        target.generate(prompt(9), assistant_model=drafter, tokenizer=tiny_tokenizer(), assistant_tokenizer=foreign)


def test_a_text_without_spaces_is_not_searched_again_for_every_token(monkeypatch):
    monkeypatch.setattr(vocabularies, "_PART", 24)
    vocabulary, decoded = OtherTokens(PLAIN, MERGED, [(0, 0)]), []

    def decode(*token_ids, stock=vocabulary.decode):
        decoded.append(token_ids)
        return stock(*token_ids)

    vocabulary.decode = decode
    translation, found = vocabulary.translate(), []
    for token in PLAIN.encode("abcloheé" * 20):
        kept, tokens = translation.extend([token])
        found[kept:] = tokens
    assert found == MERGED.encode("abcloheé" * 20)
    # Two for each token, and some hundreds of searches for a place where the part may be divided.
    assert len(decoded) < 1000


def test_a_long_text_is_divided_although_the_first_space_of_a_text_is_left_out(monkeypatch):
    """As by the tokenizers of SentencePiece, whose decoders strip it."""
    monkeypatch.setattr(vocabularies, "_PART", 24)
    tokenizer = byte_tokenizer("h e")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    vocabulary, encoded = OtherTokens(tokenizer, MERGED, [(0, 0)]), []

    def encode(text, stock=vocabulary.encode):
        encoded.append(text)
        return stock(text)

    vocabulary.encode = encode
    translation, found, text = vocabulary.translate(), [], "he" + " ab lo he abc" * 20
    for token in tokenizer.encode(text):
        kept, tokens = translation.extend([token])
        found[kept:] = tokens
    assert found == MERGED.encode(text) and max(map(len, encoded)) < 40
