# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Several roots a round: biased, but every token is one that the target may write there."""

import pytest
import torch
from quick import one_in
from tiny_models import new_drafter, new_target, prompt, random_tokens, tiny_drafter, tiny_target
from transformers import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_falcon import sampling as multi_root
from hf_falcon.core.draft_statistics import StatisticsRecorder

DRAFTERS = [(1, 0, "nothing"), (2, 0, "conditioning"), (2, 1, "layers"), (3, 2, "nothing")]


def set_options(drafter, verification="multi_root", **options):
    for name, value in {"verification": verification, **options}.items():
        setattr(drafter.generation_config, name, value)


@pytest.mark.parametrize("length, kind", one_in(2, [1, 2, 9], DRAFTERS))
def test_one_root_is_plain_sampling(length, kind):
    """The same tokens under the same seed: with one root nothing is chosen."""
    target, ids = tiny_target("llama"), prompt(length)
    settings = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.3}
    torch.manual_seed(0)
    expected = target.generate(ids, **settings)
    drafter = tiny_drafter(target, *kind, verification="multi_root", draft_top_k=1)
    torch.manual_seed(0)
    output = target.generate(ids, assistant_model=drafter, **settings, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert output.past_key_values.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2-window", "phi3-longrope"])
def test_roots_without_probability_are_never_written(name):
    target, ids = tiny_target(name), prompt(9)
    expected = target.generate(ids, max_new_tokens=24, do_sample=False)
    drafter = tiny_drafter(target, verification="multi_root")
    for settings in ({"do_sample": True, "top_k": 1}, {"do_sample": False}):
        output = target.generate(ids, assistant_model=drafter, max_new_tokens=24, **settings)
        assert output.tolist() == expected.tolist()


class Collected(BaseStreamer):
    """Tokens, and whether the end was told."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


@pytest.fixture(scope="module")
def few_tokens():
    """A target of so few tokens that any drafter foresees some of them."""
    return new_target(vocab_size=6)


@pytest.mark.parametrize(
    "kind", [{"block_size": 1, "num_lstm_layers": 0}, {"block_size": 2}, {"conditioning_size": 24}]
)
def test_tokens_are_ones_that_the_target_may_write(few_tokens, kind):
    target, ids = few_tokens, 1 + random_tokens(1, 9) % 5
    drafter = new_drafter(target, **kind)
    for verification in ("exact", "multi_root"):
        set_options(drafter, verification=verification, num_draft_passes=2)
        streamer = Collected()
        torch.manual_seed(0)
        output = target.generate(
            ids,
            assistant_model=drafter,
            max_new_tokens=60,
            do_sample=True,
            top_k=2,
            streamer=streamer,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        statistics, found = output.draft_statistics, output.sequences
        assert found.shape == (1, 69) and streamer.tokens == found[0].tolist() and streamer.ended
        assert statistics.rounds + statistics.accepted_tokens == statistics.new_tokens - 1 == 59
        # What the target says of the text as a whole is what it said of the trees.
        with torch.no_grad():
            expected = target(found).logits[0, 8:-1]
        torch.testing.assert_close(torch.cat(output.logits), expected, rtol=1e-4, atol=1e-4)
        scores = torch.cat(output.scores)
        assert (scores.isfinite().sum(dim=1) == 2).all() and scores.gather(1, found[0, 9:, None]).isfinite().all()
        assert statistics.accepted_tokens > 0


def test_the_root_is_kept_that_most_is_accepted_behind(few_tokens, monkeypatch):
    counts, rounds, verify, add_round = [], [], multi_root.verify, StatisticsRecorder.add_round

    def verified(tree, logits, fork):
        path, accepted = verify(tree, logits, fork)
        counts.append((accepted, fork.input_ids[0].tolist()))
        return path, accepted

    def counted(self, drafted, accepted):
        rounds.append((accepted, counts.copy()))
        counts.clear()
        add_round(self, drafted, accepted)

    monkeypatch.setattr(multi_root, "verify", verified)
    monkeypatch.setattr(StatisticsRecorder, "add_round", counted)
    ids = 1 + random_tokens(1, 9) % 5
    drafter = new_drafter(few_tokens, block_size=1, num_lstm_layers=0)
    set_options(drafter, num_assistant_tokens=40)
    torch.manual_seed(0)
    settings = {"max_new_tokens": 60, "do_sample": True, "temperature": 3.0}
    text = few_tokens.generate(ids, assistant_model=drafter, **settings)[0].tolist()
    others = 0
    for accepted, found in rounds:
        # The first of the best, and the first of all is the target's own.
        best = max(found, key=lambda each: each[0])
        assert accepted == best[0] and text[: len(best[1]) - 1] == best[1][:-1]
        others += best is not found[0]
    assert others > 2


def test_a_tree_of_all_tokens_is_walked_to_its_end(few_tokens):
    """Behind every root, whichever is chosen."""
    target, ids = few_tokens, 1 + random_tokens(1, 9) % 5
    drafter = new_drafter(target, block_size=1, num_lstm_layers=0)
    set_options(drafter, num_assistant_tokens=300, draft_top_k=6, draft_width=36, num_draft_passes=2)
    set_options(drafter, assistant_confidence_threshold=0.0)
    settings = {"max_new_tokens": 37, "do_sample": True, "return_dict_in_generate": True}
    torch.manual_seed(0)
    output = target.generate(ids, assistant_model=drafter, **settings)
    # Rounds of two tokens and the target's own, after the prompt's.
    assert (output.draft_statistics.rounds, output.draft_statistics.tau) == (12, 2.0)


def test_the_text_ends_where_it_should(few_tokens):
    target, ids = few_tokens, 1 + random_tokens(1, 9) % 5
    drafter = new_drafter(target, block_size=1, num_lstm_layers=0)
    set_options(drafter)
    lengths = set()
    for seed in range(12):
        torch.manual_seed(seed)
        settings = {"max_new_tokens": 30, "do_sample": True, "eos_token_id": 4, "temperature": 2.0}
        new = target.generate(ids, assistant_model=drafter, **settings)[0, 9:].tolist()
        assert 4 not in new[:-1] and (new[-1] == 4 or len(new) == 30)
        lengths.add(len(new))
    assert len(lengths) > 3


def test_warns_of_the_bias_once(few_tokens, warnings_given):
    drafter = new_drafter(few_tokens)
    set_options(drafter)
    ids = 1 + random_tokens(1, 9) % 5
    few_tokens.generate(ids, assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert not any("biased" in message for message in warnings_given())
    for _ in range(2):
        few_tokens.generate(ids, assistant_model=drafter, max_new_tokens=4, do_sample=True)
    assert sum("samples are biased" in message for message in warnings_given()) == 1


@pytest.mark.parametrize("verification", ["exact", "multi_root"])
def test_a_criterion_that_lets_a_text_be_longer_than_its_configuration(verification):
    target = tiny_target("llama")
    drafter = tiny_drafter(target, verification=verification)
    criteria = StoppingCriteriaList([MaxLengthCriteria(48)])
    # Without a limit of its own a configuration has one of 20 new tokens.
    output = target.generate(prompt(9), assistant_model=drafter, stopping_criteria=criteria, do_sample=True)
    assert output.shape[1] == 48
