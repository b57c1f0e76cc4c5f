# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Batches: every row is what plain decoding of the same batch gives, however far the rows get ahead of each other."""

import itertools

import pytest
import torch
from oracle import FreeDrafting, use_batch_oracle
from tiny_models import TARGETS, VOCAB, hooks_of, prompt, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from hf_falcon.batches import StepNoise
from hf_falcon.core.candidate_generator import FalconCandidateGenerator
from hf_falcon.core.decoding import common_size
from hf_falcon.core.policy import acceptance_stats_of
from hf_falcon.core.verification import TokenSequence

LENGTHS = (5, 11, 1, 8)
NEW_TOKENS = 30
SCHEDULES = {
    "constant": {},
    "heuristic": {"num_assistant_tokens_schedule": "heuristic", "prompt_lookup_num_tokens": 7},
}
# How much each row's draft knows of the truth; rows that know nothing fall behind.
ACCURACIES = {"random": None, "oracle": (1.0, 0.0, 0.7, 1.0)}
WAYS = {
    "greedy": {},
    "sample": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "processors": {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "greedy-processors": {"repetition_penalty": 1.3, "min_new_tokens": 4},
    "ends": {"eos_token_id": list(range(4, 9)), "pad_token_id": 0},
    "sample-ends": {"do_sample": True, "eos_token_id": list(range(4, 7)), "pad_token_id": 0},
    "returned": {"return_dict_in_generate": True, "eos_token_id": list(range(4, 9)), "pad_token_id": 0},
}


def batch(lengths=LENGTHS) -> dict:
    """Prompts of these lengths, padded on the left."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, max(lengths) - length :] = prompt(length, seed=row)[0]
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def plain(target, seed=0, inputs=None, **kwargs):
    """What `generate` gives, and the random number that comes after it."""
    torch.manual_seed(seed)
    inputs = batch() if inputs is None else inputs
    output = target.generate(**inputs, **{"do_sample": False, "max_new_tokens": NEW_TOKENS, **kwargs})
    return output, torch.rand(1).item()


@pytest.fixture
def assisted(monkeypatch):
    """Generates with a drafter; an oracle knows, for each row, some of what plain decoding gives."""

    def generate(target, accuracies=None, truth=None, inputs=None, schedule="constant", block_size=2, **kwargs):
        drafter = tiny_drafter(target, block_size=block_size, num_draft_passes=3, **SCHEDULES[schedule])
        inputs = batch() if inputs is None else inputs
        monkeypatch.setattr("hf_falcon.core.costs.Costs", FreeDrafting)
        if accuracies is not None:
            use_batch_oracle(monkeypatch, truth, itertools.cycle(accuracies))
        try:
            return plain(target, inputs=inputs, assistant_model=drafter, **kwargs)
        finally:
            monkeypatch.undo()

    return generate


def check(assisted, name, draft="oracle", **kwargs):
    """Compares assisted with plain generation."""
    settings = {key: value for key, value in kwargs.items() if key not in ("schedule", "block_size")}
    target = tiny_target(name)
    expected, number = plain(target, **settings)
    truth = expected.sequences if settings.get("return_dict_in_generate") else expected
    output, after = assisted(target, ACCURACIES[draft], truth, **kwargs)
    tokens = output.sequences if settings.get("return_dict_in_generate") else output
    assert tokens.tolist() == truth.tolist(), (name, draft, kwargs)
    # The generator goes on as after plain decoding.
    assert after == number
    return output, expected


@pytest.mark.parametrize("name", TARGETS)
def test_rows_equal_plain_rows(name, assisted):
    # Every target has two of the ways, both drafts and both schedules, and every way has many targets.
    first = list(TARGETS).index(name)
    for step, (draft, schedule) in enumerate(zip(ACCURACIES, SCHEDULES if first % 2 else reversed(SCHEDULES))):
        way = list(WAYS)[(first + 2 * step) % len(WAYS)]
        check(assisted, name, draft, schedule=schedule, block_size=1 + step % 2, **WAYS[way])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TARGETS)
def test_rows_equal_plain_rows_for_all(name, way, assisted):
    first = list(TARGETS).index(name) + list(WAYS).index(way)
    lengths = itertools.islice(itertools.cycle((LENGTHS, (3, 3), (1, 2, 9, 40, 6, 7), (20, 4, 4))), first % 4, None)
    for step, (draft, schedule) in enumerate(itertools.product(ACCURACIES, SCHEDULES)):
        inputs = batch(next(lengths))
        check(assisted, name, draft, schedule=schedule, block_size=1 + (first + step) % 3, inputs=inputs, **WAYS[way])


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3", "gpt2"])
def test_each_row_is_its_own_plain_decoding(name, assisted):
    target = tiny_target(name)
    truth, _ = plain(target)
    output, _ = assisted(target, ACCURACIES["oracle"], truth)
    for row, length in enumerate(LENGTHS):
        alone = target.generate(prompt(length, seed=row), do_sample=False, max_new_tokens=NEW_TOKENS)
        assert output[row, max(LENGTHS) - length :].tolist() == alone[0].tolist()


def test_drafts_are_accepted(assisted):
    """The row that knows everything needs few rounds, and the one that knows nothing one for each token."""
    output, _ = check(assisted, "llama", return_dict_in_generate=True)
    found = output.draft_statistics
    assert found.new_tokens == len(LENGTHS) * NEW_TOKENS
    assert found.accepted_tokens + found.rounds == found.new_tokens - len(LENGTHS)
    # Six tokens a round at best, in two rows; one in another.
    assert 2 * 5 + 29 <= found.rounds < 3 * 29
    assert found.accepted_by_depth[5] > 0


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-mixed", "gemma2"])
def test_cache_is_as_plain_decoding_leaves_it(name, assisted):
    output, expected = check(assisted, name, **WAYS["returned"])
    mask = torch.nn.functional.pad(batch()["attention_mask"], (0, expected.sequences.shape[1] - max(LENGTHS)), value=1)
    assert expected.sequences.shape[1] > max(LENGTHS) + 2
    for own, plains in zip(output.past_key_values.layers, expected.past_key_values.layers):
        assert type(own) is type(plains)
        assert own.get_seq_length() == plains.get_seq_length()
        seen = mask[:, None, :-1, None][:, :, -own.keys.shape[2] :]
        for ours, theirs in ((own.keys, plains.keys), (own.values, plains.values)):
            torch.testing.assert_close(ours * seen, theirs * seen, atol=1e-4, rtol=1e-4)


def test_rows_that_end_leave_the_cache(assisted, monkeypatch):
    """
    The target does not run rows that have ended, unless its cache is wanted: their padding then runs beside the other
    rows, and needs no forward of its own.
    """
    rows: dict[bool, list[int]] = {}
    target = tiny_target("llama")
    for returned in (False, True):
        seen = rows.setdefault(returned, [])
        handle = target.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append(kwargs["input_ids"].shape[0]), with_kwargs=True
        )
        settings = {**WAYS["ends"], "return_dict_in_generate": returned}
        truth, _ = plain(target, **settings)
        # The first call also probes the target.
        for _ in range(2):
            del seen[:]
            assisted(target, ACCURACIES["oracle"], truth.sequences if returned else truth, **settings)
        handle.remove()
    assert rows[False][0] == 4
    assert rows[False][-1] < 4
    assert rows[True] == [4] * len(rows[False])


@pytest.mark.parametrize("returned, rows", [(False, {4, 3, 2, 1}), (True, {4})])
def test_costs_are_of_the_rows_that_run(returned, rows):
    """Where rows that have ended stay, forwards cost as much as before."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, **SCHEDULES["heuristic"])
    settings = {**WAYS["ends"], "return_dict_in_generate": returned}
    plain(target, assistant_model=drafter, **settings)
    found = {key.rows for key in acceptance_stats_of(drafter, target).costs}
    assert 4 in found <= rows and (returned or len(found) > 1)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sample"])
def test_many_sequences_of_one_prompt(settings, assisted):
    target = tiny_target("llama")
    inputs = batch((6, 9))
    settings = {**settings, "num_return_sequences": 3 if settings else 1, "inputs": inputs}
    expected, _ = plain(target, **settings)
    assert expected.shape[0] == (6 if settings["num_return_sequences"] == 3 else 2)
    output, _ = assisted(target, **settings)
    assert output.tolist() == expected.tolist()


def test_rows_are_known_by_their_number(assisted):
    """A function that is told which row it is about is told the row of the batch."""

    def allowed(row, ids):
        return list(range(row * 10 + 1, row * 10 + 11))

    output, _ = check(assisted, "llama", prefix_allowed_tokens_fn=allowed)
    new = output[:, max(LENGTHS) :]
    assert all(set(row.tolist()) <= set(allowed(number, None)) for number, row in enumerate(new))


def test_stop_strings(assisted):
    tokenizer = tiny_tokenizer()
    output, expected = check(
        assisted,
        "llama",
        stop_strings=[tokenizer.decode([token]) for token in range(4, 8)],
        tokenizer=tokenizer,
        eos_token_id=VOCAB - 1,
        pad_token_id=0,
    )
    assert len({int((row[max(LENGTHS) :] != 0).sum()) for row in expected}) > 1


class Columns(BaseStreamer):
    def __init__(self):
        self.put_tensors, self.ended = [], 0

    def put(self, value):
        self.put_tensors.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("way", ["greedy", "ends", "sample-ends"])
def test_a_streamer_gets_whole_steps(way, assisted):
    target, ours, theirs = tiny_target("llama"), Columns(), Columns()
    truth, _ = plain(target, streamer=theirs, **WAYS[way])
    assisted(target, ACCURACIES["oracle"], truth, streamer=ours, **WAYS[way])
    assert ours.put_tensors == theirs.put_tensors
    assert (ours.ended, theirs.ended) == (1, 1)


def test_rows_do_not_get_too_far_ahead_of_their_noise(assisted, monkeypatch):
    most = 3
    monkeypatch.setattr("hf_falcon.batches._MOST_STEPS_AHEAD", most)
    kept = []
    draw = StepNoise.draw

    def watched(self, probs, row, step):
        token = draw(self, probs, row, step)
        kept.append(len(self._steps))
        return token

    monkeypatch.setattr(StepNoise, "draw", watched)
    target = tiny_target("llama")
    truth, number = plain(target, **WAYS["sample"])
    drafter = tiny_drafter(target, num_draft_passes=3)
    use_batch_oracle(monkeypatch, truth, ACCURACIES["oracle"])
    output, after = plain(target, assistant_model=drafter, **WAYS["sample"])
    assert (output.tolist(), after) == (truth.tolist(), number)
    assert 2 < max(kept) <= most + 2


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (4, 1000), (2, 50_000)], ids=str)
def test_noise_is_what_multinomial_draws(shape):
    for temperature in (1.0, 6.0):
        probs = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * temperature).softmax(dim=-1)
        torch.manual_seed(7)
        expected = [torch.multinomial(probs, 1)[:, 0].tolist() for _ in range(4)]
        after = torch.rand(1)
        torch.manual_seed(7)
        noise = StepNoise(shape[0])
        rows = [[int(noise.draw(probs[row : row + 1], row, step)) for step in range(4)] for row in range(shape[0])]
        assert torch.tensor(rows).T.tolist() == expected
        assert torch.rand(1) == after


def test_noise_refuses_what_multinomial_refuses():
    probs = torch.tensor([[0.5, float("nan"), 0.5]])
    sequence = TokenSequence(prompt(3), LogitsProcessorList(), StoppingCriteriaList(), GenerationConfig())
    for draw in (lambda: torch.multinomial(probs, 1), lambda: sequence.emit(int(StepNoise(1).draw(probs, 0, 0)))):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            draw()


class Odd(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores - scores.mean()


class Anywhere(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] == 9).any().expand(input_ids.shape[0])


@pytest.mark.parametrize(
    ("reason", "settings"),
    {
        "Odd may look at all": {"logits_processor": [Odd()]},
        "Anywhere may look": {"stopping_criteria": [Anywhere()], "eos_token_id": 63, "pad_token_id": 0},
        "EncoderNoRepeatNGramLogitsProcessor": {"encoder_no_repeat_ngram_size": 2},
        "without an `eos_token_id`": {"stop_strings": ["b"], "tokenizer": tiny_tokenizer()},
        "`output_scores`": {"output_scores": True, "return_dict_in_generate": True},
    }.items(),
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_plain_decoding_where_rows_cannot_part(reason, settings, assisted, warnings_given):
    target = tiny_target("llama")
    expected, number = plain(target, **settings)
    output, after = assisted(target, **settings)
    if isinstance(expected, dict):
        torch.testing.assert_close(output.scores, expected.scores)
        output, expected = output.sequences, expected.sequences
    assert (output.tolist(), after) == (expected.tolist(), number)
    assert len(warnings_given()) == 1
    assert reason in warnings_given()[0]


def test_a_batch_goes_on_from_a_cache(assisted, warnings_given):
    target = tiny_target("llama")
    first, _ = plain(target, return_dict_in_generate=True, max_new_tokens=5)
    ids = torch.cat((first.sequences, batch()["input_ids"][:, -1:] + 1), dim=1)
    mask = torch.nn.functional.pad(batch()["attention_mask"], (0, 6), value=1)
    expected, _ = plain(target, inputs={"input_ids": ids, "attention_mask": mask})
    own = DynamicCache(config=target.config)
    turn, _ = assisted(target, past_key_values=own, max_new_tokens=5)
    assert turn.tolist() == first.sequences.tolist()
    # The user's own cache has all rows, and the next turn starts from it.
    assert own.get_seq_length() == turn.shape[1] - 1
    assert not warnings_given()
    output, _ = assisted(target, inputs={"input_ids": ids, "attention_mask": mask}, past_key_values=own)
    assert output.tolist() == expected.tolist()
    assert "continues from a cache" in warnings_given()[0]


class Failing(BaseStreamer):
    def __init__(self, steps):
        self.steps = steps

    def put(self, value):
        self.steps -= 1
        if self.steps < 0:
            raise KeyboardInterrupt

    def end(self):
        pass


def test_an_interrupted_batch_leaves_everything_usable(assisted):
    target, own = tiny_target("llama"), DynamicCache(config=tiny_target("llama").config)
    with pytest.raises(KeyboardInterrupt):
        assisted(target, streamer=Failing(9), past_key_values=own)
    assert {type(layer).__module__ for layer in own.layers} == {"transformers.cache_utils"}
    assert hooks_of(target) == 0
    check(assisted, "llama")


def test_a_batch_whose_prompt_fails_leaves_the_cache_its_layers(assisted):
    target = tiny_target("qwen2-mixed")
    own = DynamicCache(config=target.config)
    layers = list(own.layers)

    def fail(*_):
        raise torch.OutOfMemoryError

    handle = target.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        assisted(target, past_key_values=own)
    handle.remove()
    assert len(layers) == 3 and own.layers == layers


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"temperature": 0.7}], ids=["greedy", "sample"])
def test_pipeline(settings):
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.decode([0]), "left"
    texts = ["abc", "hello.World", "q", "0123456", "xyzzy"]

    def generate(**kwargs) -> list:
        torch.manual_seed(0)
        made = pipeline("text-generation", model=target, tokenizer=tokenizer, batch_size=4, **kwargs)
        return made(texts, max_new_tokens=20, **settings)

    assert generate(assistant_model=tiny_drafter(target)) == generate()


def gains_of(*rows):
    return torch.tensor(rows)


def test_one_row_alone_takes_what_pays_most():
    assert common_size(gains_of([0.0, 0.4, 0.9, 0.7, -torch.inf]), torch.tensor([1000])) == 2


def test_a_batch_is_as_slow_as_its_slowest_row():
    """Where a single row would gain, all rows would wait for it."""
    ahead, waiting = [0.0, 4.0, 8.0], [0.0, -1.0, -2.0]
    equal = torch.tensor([16, 16, 16, 16])
    assert sum(gains_of(ahead, waiting, waiting, waiting)[:, 2]) > 0
    assert common_size(gains_of(ahead, waiting, waiting, waiting), equal) == 0
    # It is the slowest, or all gain.
    assert common_size(gains_of(ahead, waiting, waiting, waiting), torch.tensor([64, 16, 16, 16])) == 2
    assert common_size(gains_of(ahead, ahead, ahead, ahead), equal) == 2
    # While much is left any row may turn out to be the slowest.
    assert common_size(gains_of(ahead, waiting, waiting, waiting), 100 * equal) == 2


def test_a_row_that_ends_at_once_leaves_the_other_its_prompt(monkeypatch):
    target, inputs, started = tiny_target("llama"), batch((9, 4)), []
    first = plain(target, inputs=inputs, max_new_tokens=1)[0][:, -1].tolist()
    assert first[0] != first[1]
    start = FalconCandidateGenerator.start
    monkeypatch.setattr(
        FalconCandidateGenerator, "start", lambda self, *args: started.append(args[:3]) or start(self, *args)
    )
    ways = {"assistant_model": tiny_drafter(target), "eos_token_id": first[0], "pad_token_id": 0}
    found = plain(target, inputs=inputs, **ways)[0]
    ways.pop("assistant_model")
    assert found.tolist() == plain(target, inputs=inputs, **ways)[0].tolist()
    # Features, position and padding of the row that is left.
    assert [(features.shape[1], position, padding) for features, position, padding in started] == [(4, 0, 5)]


def test_a_row_of_a_prompt_that_has_no_allowed_token():
    # Its only allowed token may not come yet, and another row of the prompt has allowed tokens.
    settings = {
        "do_sample": True,
        "num_return_sequences": 3,
        "prefix_allowed_tokens_fn": lambda row, ids: [2] if ids[-1] % 2 else list(range(4, 40)),
        "remove_invalid_values": True,
        "min_new_tokens": 10,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    target, inputs = tiny_target("llama"), batch((5, 7))
    found = plain(target, assistant_model=tiny_drafter(target), inputs=inputs, **settings)
    expected = plain(target, inputs=inputs, **settings)
    assert found[0].tolist() == expected[0].tolist() and found[1] == expected[1]


def test_a_processor_that_knows_of_several_rows_of_a_prompt():
    target, inputs = tiny_target("llama"), batch((5, 7))
    allowed = {0: list(range(4, 20)), 1: list(range(20, 40))}
    processor = PrefixConstrainedLogitsProcessor(lambda row, ids: allowed[row], num_beams=3)
    settings = {"do_sample": True, "num_return_sequences": 3, "logits_processor": [processor], "inputs": inputs}
    found = plain(target, assistant_model=tiny_drafter(target), **settings)
    expected = plain(target, **settings)
    assert found[0].tolist() == expected[0].tolist() and found[1] == expected[1]
