# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Where generation ends, what it hands back, what it is given: all as plain `generate` does."""

import functools
import itertools

import pytest
import torch
from oracle import use_oracle
from quick import one_in
from tiny_models import (
    IS_OLDEST,
    RECURRENT,
    VOCAB,
    WINDOW,
    WITHOUT_TREES,
    hooks_of,
    new_drafter,
    new_target,
    prompt,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)
from transformers import DynamicCache, EosTokenCriteria, GenerationMixin, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import hf_falcon
from hf_falcon import FalconGenerateOutput
from hf_falcon.core import decoding, probe
from hf_falcon.core.probe import CHAINS, PLAIN
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.core.target_run import TargetRun
from hf_falcon.verdicts import verdict_of_prompt

# Full attention, a window, both of them in one model, and positions that are learnt.
SOME = ("llama", "mistral-window", "gemma2", "qwen2-mixed", "gpt2")
DRAFTS = ("random", "oracle")
BUDGETS = [{"max_new_tokens": n} for n in (1, 2, 3, 5, 8)] + [{"max_length": 17}]
SAMPLING = [{}, {"do_sample": True, "top_k": 9}, {"repetition_penalty": 1.5}]
NEW_TOKENS = 30


def plain(target, ids, seed=0, **kwargs):
    torch.manual_seed(seed)
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": NEW_TOKENS, **kwargs})


@pytest.fixture
def assisted(monkeypatch):
    """Generates with a drafter of the given kind; an oracle knows the whole of plain, unstopped decoding."""

    def generate(target, ids, draft="random", seed=0, known=None, block_size=2, **kwargs):
        drafter = tiny_drafter(target, block_size=block_size, num_draft_passes=3)
        if draft == "oracle":
            use_oracle(monkeypatch, plain(target, ids) if known is None else known)
        return plain(target, ids, seed=seed, assistant_model=drafter, **kwargs)

    return generate


def new_tokens(target, ids) -> list[int]:
    return plain(target, ids)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name, draft, budget", one_in(3, SOME, DRAFTS, BUDGETS))
def test_budget(name, draft, budget, assisted):
    target, ids = tiny_target(name), prompt(9)
    kwargs = {"max_new_tokens": None, **budget}
    expected = plain(target, ids, **kwargs)
    assert expected.shape[1] == budget.get("max_length", 9 + budget.get("max_new_tokens", 0))
    assert assisted(target, ids, draft, **kwargs).tolist() == expected.tolist()


@pytest.mark.parametrize("name, draft", one_in(2, SOME, DRAFTS))
def test_eos_at_every_place_of_a_path(name, draft, assisted):
    target, ids = tiny_target(name), prompt(9)
    tokens = new_tokens(target, ids)
    # First occurrences only: a token that came before would end the sequence there.
    places = [place for place, token in enumerate(tokens) if token not in tokens[:place]]
    never = next(token for token in range(VOCAB) if token not in tokens)
    for place in places[:9]:
        eos = tokens[place] if place % 2 else [never, tokens[place]]
        expected = plain(target, ids, eos_token_id=eos, pad_token_id=0)
        output = assisted(target, ids, draft, eos_token_id=eos, pad_token_id=0, return_dict_in_generate=True)
        assert output.sequences.tolist() == expected.tolist()
        assert output.sequences.shape[1] == 9 + place + 1
        # The cache holds no more than plain decoding would leave there.
        assert output.past_key_values.get_seq_length() == 9 + place


@pytest.mark.parametrize("start, draft", one_in(2, range(6), DRAFTS))
def test_stop_string_across_draft_tokens(draft, start, assisted):
    target, ids, tokenizer = tiny_target("llama"), prompt(9), tiny_tokenizer()
    stop = tokenizer.decode(new_tokens(target, ids)[start : start + 3])
    assert len(stop) == 3
    expected = plain(target, ids, stop_strings=[stop, "never"], tokenizer=tokenizer)
    assert expected.shape[1] < 9 + NEW_TOKENS
    output = assisted(target, ids, draft, stop_strings=[stop, "never"], tokenizer=tokenizer)
    assert output.tolist() == expected.tolist()


def test_max_time_ends_after_one_token(assisted):
    target, ids = tiny_target("llama"), prompt(9)
    output = assisted(target, ids, "oracle", max_time=1e-9)
    assert output.tolist() == plain(target, ids, max_time=1e-9).tolist()
    assert output.shape[1] == 10


class Recorder(StoppingCriteria):
    """Remembers every question, and stops at a length."""

    def __init__(self, length: int):
        self.length = length
        self.asked: list[list[int]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("name, draft, do_sample", one_in(3, SOME, DRAFTS, [False, True]))
def test_stopping_criteria_are_asked_once_a_token(name, draft, do_sample, assisted):
    target, ids = tiny_target(name), prompt(9)
    ours, theirs = Recorder(24), Recorder(24)
    expected = plain(target, ids, stopping_criteria=[theirs], do_sample=do_sample)
    known = plain(target, ids, do_sample=do_sample)
    output = assisted(target, ids, draft, known=known, stopping_criteria=[ours], do_sample=do_sample)
    assert output.tolist() == expected.tolist()
    assert ours.asked == theirs.asked
    assert len(ours.asked) == 15


class Tape(BaseStreamer):
    """Remembers what it is given."""

    def __init__(self):
        self.given: list[tuple[tuple[int, ...], list]] = []
        self.ends = 0

    def put(self, value):
        assert self.ends == 0
        self.given.append((tuple(value.shape), value.tolist()))

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("stop", ["budget", "eos"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_streamer(draft, stop, assisted):
    target, ids = tiny_target("llama"), prompt(9)
    tokens = new_tokens(target, ids)
    eos = next(token for place, token in enumerate(tokens) if place >= 4 and token not in tokens[:place])
    kwargs = {"eos_token_id": eos, "pad_token_id": 0} if stop == "eos" else {}
    ours, theirs = Tape(), Tape()
    plain(target, ids, streamer=theirs, **kwargs)
    assisted(target, ids, draft, streamer=ours, **kwargs)
    assert ours.given == theirs.given
    assert ours.ends == theirs.ends == 1


@pytest.mark.parametrize("name, draft, sampling", one_in(3, SOME, DRAFTS, SAMPLING))
def test_scores_and_logits(name, draft, sampling, assisted):
    target, ids = tiny_target(name), prompt(9)
    kwargs = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, **sampling}
    expected = plain(target, ids, **kwargs)
    output = assisted(target, ids, draft, known=expected.sequences, **kwargs)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for field in ("scores", "logits"):
        ours, theirs = getattr(output, field), getattr(expected, field)
        assert len(ours) == NEW_TOKENS
        assert [row.shape for row in ours] == [row.shape for row in theirs]
        torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("only_new_tokens, name, draft", one_in(3, [False, True], SOME, DRAFTS))
def test_conversation_goes_on_from_the_returned_cache(name, draft, only_new_tokens, assisted):
    """Two turns; each of plain and assisted decoding starts the second one from the other's cache and from its own."""
    target, ids = tiny_target(name), prompt(5)
    kwargs = {"return_dict_in_generate": True, "max_new_tokens": 12}

    def first_turn(run):
        output = run(target, ids, past_key_values=DynamicCache(config=target.config), **kwargs)
        return torch.cat((output.sequences, prompt(4, seed=3)), dim=1), output.past_key_values

    def second_turn(run, sequence, cache, **more):
        given = {"attention_mask": torch.ones_like(sequence)}
        tokens = sequence[:, cache.get_seq_length() :] if only_new_tokens else sequence
        output = run(target, tokens, past_key_values=cache, **given, **kwargs, **more)
        return output.sequences[0, tokens.shape[1] :].tolist()

    sequence = first_turn(plain)[0]
    whole = plain(target, sequence, attention_mask=torch.ones_like(sequence), max_new_tokens=12)
    reference = whole[0, -12:].tolist()
    known = {"draft": draft, "known": whole}
    if only_new_tokens:
        # The oracle counts positions from the first token, the call only from the first new one.
        known = {"draft": "random"}
    assert second_turn(plain, *first_turn(plain)) == reference
    assert second_turn(assisted, *first_turn(plain), **known) == reference
    assert second_turn(plain, *first_turn(assisted)) == reference
    assert second_turn(assisted, *first_turn(assisted), **known) == reference


@pytest.mark.parametrize("name, draft", one_in(2, SOME, DRAFTS))
def test_cache_without_windows(name, draft, assisted):
    """A user's own cache may keep more than a layer's window; the window holds all the same."""
    target, ids = tiny_target(name), prompt(2 * WINDOW)
    output = assisted(target, ids, draft, past_key_values=DynamicCache())
    assert output.tolist() == plain(target, ids).tolist()


@pytest.mark.parametrize("name, length, draft", one_in(3, (*SOME, "opt"), [3, 20], DRAFTS))
def test_left_padding(name, length, draft, assisted):
    target = tiny_target(name)
    ids = torch.cat((torch.zeros(1, 4, dtype=torch.long), prompt(length)), dim=1)
    mask = (ids != 0).long()
    expected = plain(target, ids, attention_mask=mask)
    # Padding changes nothing, so a mask that hid nothing would show.
    assert expected[0, 4:].tolist() == plain(target, prompt(length))[0].tolist()
    assert assisted(target, ids, draft, known=expected, attention_mask=mask).tolist() == expected.tolist()


@pytest.mark.parametrize("name, chunk", one_in(3, SOME, [1, 4, 64]))
def test_prefill_in_chunks(name, chunk, assisted):
    target, ids = tiny_target(name), prompt(19)
    assert assisted(target, ids, "oracle", prefill_chunk_size=chunk).tolist() == plain(target, ids).tolist()


def test_drafter_of_another_target_is_refused():
    drafter = tiny_drafter(tiny_target("llama"))
    with pytest.raises(ValueError, match="`target_model_type` is 'llama', but the target has 'qwen2'"):
        plain(tiny_target("qwen2"), prompt(9), assistant_model=drafter)


@pytest.mark.parametrize("draft, block_size, do_sample", one_in(2, DRAFTS, [1, 3], [False, True]))
def test_statistics_agree_with_one_another(draft, block_size, do_sample, assisted):
    target, ids = tiny_target("llama"), prompt(9)
    known = plain(target, ids, do_sample=do_sample)
    kwargs = {"known": known, "block_size": block_size, "do_sample": do_sample, "return_dict_in_generate": True}
    output = assisted(target, ids, draft, **kwargs)
    assert isinstance(output, FalconGenerateOutput)
    found = output.draft_statistics
    assert found.new_tokens == NEW_TOKENS == output.sequences.shape[1] - 9
    # Prefill gives one token; a round gives what it accepts and one more, the last one maybe not.
    assert found.new_tokens - 1 - found.rounds <= found.accepted_tokens <= found.new_tokens - found.rounds
    assert found.tau == pytest.approx(found.accepted_tokens / found.rounds)
    assert found.alpha == pytest.approx(found.accepted_tokens / found.new_tokens)
    assert sum(found.accepted_by_depth) == found.accepted_tokens <= found.drafted_tokens
    assert found.accepted_by_depth == sorted(found.accepted_by_depth, reverse=True)
    assert set(found.time) == {"target", "drafter", "other"}
    assert min(found.time.values()) >= 0
    if draft == "oracle":
        assert len(found.accepted_by_depth) == 3 * block_size
        # The last round may have room for the target's own token alone.
        assert found.accepted_by_depth[-1] >= found.rounds - 1


def test_one_token_takes_no_round(assisted):
    output = assisted(tiny_target("llama"), prompt(9), max_new_tokens=1, return_dict_in_generate=True)
    found = output.draft_statistics
    assert (found.rounds, found.new_tokens, found.tau, found.alpha) == (0, 1, 0.0, 0.0)
    assert found.accepted_by_depth == []


def test_short_calls_after_the_first_are_plain(monkeypatch):
    """They have nothing to draft, and do without what a round needs. Statistics are counted where asked for."""
    target = new_target("llama")
    drafter = new_drafter(target)
    options = {"do_sample": False, "assistant_model": drafter}
    target.generate(prompt(9), max_new_tokens=1, **options)
    runs = []
    monkeypatch.setattr(decoding, "TargetRun", lambda *args: runs.append(TargetRun(*args)) or runs[-1])
    for tokens, expected in ((1, 0), (2, 0), (3, 1), (2, 1)):
        found = target.generate(prompt(9), max_new_tokens=tokens, **options)
        assert found.equal(target.generate(prompt(9), max_new_tokens=tokens, do_sample=False))
        assert len(runs) == expected
    found = target.generate(prompt(9), max_new_tokens=2, return_dict_in_generate=True, **options)
    assert found.draft_statistics.rounds == 1 and len(runs) == 2


# Fallbacks: plain decoding, and one warning that says why.


def check_fallback(target, warnings_given, reason, *args, **kwargs):
    drafter = tiny_drafter(target)
    expected = plain(target, *args, **kwargs)
    for _ in range(2):
        output = plain(target, *args, assistant_model=drafter, **kwargs)
        for field in expected if isinstance(expected, dict) else ():
            if field not in (CACHE_NAME, "draft_statistics"):
                torch.testing.assert_close(output[field], expected[field])
        if not isinstance(expected, dict):
            assert output.tolist() == expected.tolist()
    assert len(warnings_given()) == 1
    assert reason in warnings_given()[0]
    return output


WITHOUT_A_CACHE = {"bert": "keeps no cache", "openai-gpt": f"no `{CACHE_NAME}`"}


@pytest.mark.parametrize("name", WITHOUT_TREES)
def test_targets_without_trees(name, warnings_given, monkeypatch):
    target = tiny_target(name)
    if name in WITHOUT_A_CACHE:
        check_fallback(target, warnings_given, WITHOUT_A_CACHE[name], prompt(9))
        return
    expected = plain(target, prompt(9))
    use_oracle(monkeypatch, expected, accuracy=0.8)
    output = plain(target, prompt(9), assistant_model=tiny_drafter(target), return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert output.draft_statistics.accepted_tokens > 0


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_mask(implementation, monkeypatch):
    """No tree is tried: flex attention's CPU kernel would end the process, as flash attention's on a GPU."""
    target = new_target("llama")
    monkeypatch.setattr(target.config, "_attn_implementation_internal", implementation)
    monkeypatch.setattr(probe, "probe", lambda *args, tries_trees: probe.Verdict(PLAIN if tries_trees else CHAINS))
    verdict = verdict_of_prompt(target, prompt(9))
    assert verdict.way == CHAINS and implementation in verdict.reason


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_targets(name, warnings_given):
    """Stock assisted decoding refuses them."""
    check_fallback(tiny_target(name), warnings_given, "otherwise than one by one", prompt(9))


def test_other_weights_than_trained_for_warn_once(warnings_given, monkeypatch):
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    monkeypatch.setattr(drafter.config, "target_fingerprint", "0" * 16)
    for _ in range(2):
        output = plain(target, prompt(9), assistant_model=drafter)
    assert output.tolist() == plain(target, prompt(9)).tolist()
    assert len(warnings_given()) == 1
    assert "weights are not those" in warnings_given()[0]


class Failing(LogitsProcessor):
    """Raises at a length."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 15:
            raise RuntimeError("at length 15")
        return scores


@pytest.mark.parametrize("processors", [[], [Failing()]], ids=["ends", "raises"])
def test_no_hook_stays_on_the_target(processors, assisted):
    target, ids = tiny_target("llama"), prompt(9)
    try:
        assisted(target, ids, logits_processor=processors)
        assert not processors
    except RuntimeError as error:
        assert str(error) == "at length 15"
    assert hooks_of(target) == 0
    assert assisted(target, ids).tolist() == plain(target, ids).tolist()


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_criterion_that_reads_the_streamer(draft, assisted):
    target, ids = tiny_target("llama"), prompt(9)
    found = []
    for way in (plain, assisted):
        tape = Tape()
        criteria = [lambda ids, scores, tape=tape, **_: torch.full((1,), len(tape.given) >= 6)]
        kwargs = {"streamer": tape, "stopping_criteria": criteria}
        output = plain(target, ids, **kwargs) if way is plain else assisted(target, ids, draft, **kwargs)
        found.append((output.tolist(), tape.given))
    assert found[0] == found[1]


def test_a_criterion_for_one_token_id(assisted):
    target, ids = tiny_target("llama"), prompt(9)
    end = torch.tensor(new_tokens(target, ids)[5])
    kwargs = {"stopping_criteria": [EosTokenCriteria(end)], "pad_token_id": 0}
    assert assisted(target, ids, DRAFTS[0], **kwargs).tolist() == plain(target, ids, **kwargs).tolist()


@pytest.mark.parametrize("name", ["gemma2", "mistral-window"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_shapes_of_the_outputs_of_layers(name, cache):
    target, ids = new_target(name), prompt(9)
    target.set_attn_implementation("eager")
    kwargs = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
    if cache == "static":
        kwargs |= {"cache_implementation": "static", "disable_compile": True}
    found, expected = (
        plain(target, ids, **kwargs, **more) for more in ({"assistant_model": tiny_drafter(target)}, {})
    )
    assert found.draft_statistics is not None
    for field in ("attentions", "hidden_states"):
        ours, theirs = getattr(found, field), getattr(expected, field)
        assert [[one.shape for one in step] for step in ours] == [[one.shape for one in step] for step in theirs]
        for mine, other in zip(itertools.chain(*ours), itertools.chain(*theirs)):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_outputs_of_some_layers():
    # transformers leaves hooks on it.
    target, ids = new_target("llama"), prompt(9)
    kwargs = {"output_hidden_states": [-1], "return_dict_in_generate": True}
    found, expected = (
        plain(target, ids, **kwargs, **more) for more in ({"assistant_model": tiny_drafter(target)}, {})
    )
    steps = [[[state is None for state in step] for step in each.hidden_states] for each in (found, expected)]
    assert steps[0] == steps[1] and found.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("wraps", [False, True])
def test_a_loop_of_another_library(wraps, monkeypatch, warnings_given):
    """It has replaced that of all models."""
    stock = GenerationMixin._sample

    def own(self, input_ids, **kwargs):
        return stock(self, input_ids, **kwargs).flip(0, 1)

    target, ids = new_target("llama"), prompt(9)
    monkeypatch.setattr(GenerationMixin, "_sample", functools.wraps(stock)(own) if wraps else own)
    expected = target.generate(ids, max_new_tokens=5).tolist()
    assert target.generate(ids, max_new_tokens=5, assistant_model=tiny_drafter(target)).tolist() == expected
    assert "a decoding loop of its own" in warnings_given()[-1]


def test_a_target_with_a_loop_of_its_own(warnings_given):
    class Own(type(tiny_target("llama"))):
        def _sample(self, input_ids, **kwargs):
            return torch.cat((input_ids, input_ids[:, :1]), dim=1)

    target, ids = Own(new_target("llama").config).eval(), prompt(9)
    expected = target.generate(ids, max_new_tokens=5).tolist()
    assert len(expected[0]) == 10
    assert target.generate(ids, max_new_tokens=5, assistant_model=tiny_drafter(target)).tolist() == expected
    assert "a decoding loop of its own" in warnings_given()[-1]
    hf_falcon.attach(target, tiny_drafter(target))
    assert target.generate(ids, max_new_tokens=5).tolist() == expected
    hf_falcon.detach(target)


@pytest.mark.skipif(IS_OLDEST, reason="this transformers fails with such a cache")
def test_a_cache_that_records_its_past(warnings_given):
    target, ids = tiny_target("mistral-window"), prompt(9)
    outputs = []
    for more in ({}, {"assistant_model": tiny_drafter(target)}):
        cache = DynamicCache(config=target.config)
        cache.activate_past_recording()
        outputs.append(plain(target, ids, past_key_values=cache, **more))
        cache.crop(-5)
        outputs[-1] = [outputs[-1].tolist(), plain(target, outputs[-1][:, :-5], past_key_values=cache).tolist()]
    assert outputs[0] == outputs[1]
    assert "activate_past_recording" in warnings_given()[-1]
