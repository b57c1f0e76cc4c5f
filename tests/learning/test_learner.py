# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A drafter that learns from its calls: it gets better, never writes another token, and stays within its limits."""

import gc
import logging
import math
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from eagle3_models import new_eagle3
from learners import CALL, FAST, SIZES, Clock, call, learner, pair, replay_calls, serve, tau
from quick import quick
from tiny_models import VOCAB, new_drafter, new_target, prompt
from toy_drafter import toy_drafter

import hf_falcon
from hf_falcon import Learner, LearningOptions
from hf_falcon.cpu.packing import is_packed
from hf_falcon.learning import learner as learner_module
from hf_falcon.learning.budget import Budget
from hf_falcon.learning.learner import learner_of
from hf_falcon.learning.serving_weights import replace_weights
from hf_falcon.learning.state import STATE_NAME, LearnerState


@pytest.fixture(autouse=True)
def closed():
    """No learner outlives its test."""
    from hf_falcon.learning.learner import _close_all

    yield
    _close_all()


def weights_of(drafter):
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", quick(["one"], ["one", "eagle3", "blocks", "lstm"]))
def test_a_drafter_gets_better_by_use(kind):
    if kind == "eagle3":
        target = new_target("llama", num_hidden_layers=4)
        drafter = new_eagle3(target, scale=0.1, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    else:
        changes = {"one": {}, "blocks": {"block_size": 2, "conditioning_size": 16}, "lstm": {"num_lstm_layers": 1}}
        target, drafter = pair(**changes[kind])
    with learner(drafter, target) as found:
        before = tau(target, drafter, range(900, 908))
        for seed in range(32):
            call(target, drafter, seed)
        assert found.learn(32) == 32
        statistics = found.statistics
        assert statistics.steps == 32 and statistics.replacements > 0
        assert statistics.acceptance_now > statistics.acceptance_before
    assert tau(target, drafter, range(900, 908)) > before + 0.05
    serve(target, drafter, range(100, 104))


def test_rejected_tokens_are_recorded_with_what_the_target_computes_behind_them():
    target, drafter = pair()
    with learner(drafter, target) as found:
        serve(target, drafter, range(6))
        records = list(found._buffer.records)
    paths = [(record, path) for record in records for path in record.rejected]
    assert paths
    for record, path in paths:
        text = torch.cat((record.token_ids[: path.place + 1], path.token_ids))
        # The prompts are short: the record has all of them.
        with torch.no_grad():
            features = target.base_model(text[None]).last_hidden_state[0]
        torch.testing.assert_close(path.features.float(), features[path.place + 1 :], rtol=0, atol=0.03)
        torch.testing.assert_close(
            record.features[: path.place + 1].float(), features[: path.place + 1], rtol=0, atol=0.03
        )
        # They were rejected: the target went on with another token.
        assert record.token_ids[path.place + 1] != path.token_ids[0]


@pytest.mark.parametrize("kind", ["batch", "sampling", "inference mode", "speculative"])
def test_calls_of_other_kinds_are_learnt_from(kind):
    target, drafter = pair()
    options = dict(CALL)
    if kind != "batch":
        options |= {"do_sample": True} if kind != "inference mode" else {}
    if kind == "speculative":
        options["verification"] = "speculative"
    with learner(drafter, target, held_out=0.01) as found, torch.inference_mode(kind == "inference mode"):
        rows = 3 if kind == "batch" else 1
        for seed in range(6):
            target.generate(prompt(9, seed=seed).repeat(rows, 1).roll(seed), assistant_model=drafter, **options)
        assert found.learn(2) == 2
        assert all(len(record.features) == len(record.token_ids) - 1 for record in found._buffer.records)


def test_embeddings_as_a_prompt():
    target, drafter = pair()
    embeds = target.get_input_embeddings()(prompt(12)).detach()
    plain = target.generate(inputs_embeds=embeds, **CALL)
    with learner(drafter, target) as found:
        assert torch.equal(target.generate(inputs_embeds=embeds, assistant_model=drafter, **CALL), plain)
        # They have no tokens to learn from.
        assert found.learn(1) == 0


def test_a_call_that_drafts_nothing_has_nothing_to_learn_from():
    target, drafter = pair()
    with learner(drafter, target) as found:
        call(target, drafter, 0, num_draft_passes=0)
        assert found.statistics.calls == 1 and found.statistics.texts == 0
        replay_calls(found, 6)
        assert found.learn(2) == 2


def test_the_default_device_is_not_that_of_learning():
    target, drafter = pair()
    with learner(drafter, target) as found:
        replay_calls(found, 30)
        torch.set_default_device("meta")
        try:
            # With a comparison after four steps.
            assert found.learn(5) == 5
        finally:
            torch.set_default_device(None)
        assert found.statistics.acceptance_now is not None


def test_outputs_are_exact_while_another_thread_replaces_weights():
    target, drafter = pair()
    found = learner(drafter, target, gate_steps=2)
    replay_calls(found, 30)
    plain = [call(target, None, seed) for seed in range(200, 206)]
    ended = threading.Event()
    versions = []

    def learn():
        chance = torch.Generator().manual_seed(0)
        while not ended.is_set():
            found.learn(1)
            # Also in the middle of calls, which a learner itself never does.
            noise = {
                name: each + 0.3 * torch.randn(each.shape, generator=chance)
                for name, each in drafter.named_parameters()
            }
            replace_weights(drafter, noise)
            versions.append(found._version)

    thread = threading.Thread(target=learn)
    thread.start()
    try:
        texts = [call(target, drafter, seed) for seed in range(200, 206)]
    finally:
        ended.set()
        thread.join()
    assert versions and all(map(torch.equal, texts, plain))
    found.close()


def test_weights_are_replaced_at_the_boundary_of_calls_only():
    target, drafter = pair()
    found = learner(drafter, target)
    replay_calls(found, 40)
    before = weights_of(drafter)
    kept = []

    class Streamer:
        """Learns in the middle of a call, as another thread may."""

        def put(self, value):
            while value.numel() == 1 and found._replacements == 0:
                assert found.learn(4) == 4
            kept.append(same(weights_of(drafter), before))

        def end(self):
            pass

    target.generate(prompt(8, seed=500), assistant_model=drafter, streamer=Streamer(), **CALL)
    assert found._replacements > 0 and all(kept)
    # The call has ended.
    assert not same(weights_of(drafter), before)


def test_several_threads_share_a_drafter_that_learns():
    target, drafter = pair()
    found = learner(drafter, target, share=1.0, idle_share=1.0, idle_after=0.0, gate_steps=2)
    plain = [call(target, None, seed) for seed in range(24)]
    texts = [None] * 24

    def work(first):
        for seed in range(first, 24, 3):
            texts[seed] = call(target, drafter, seed)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, texts, plain))
    assert found.statistics.calls == 24 and found._active == 0


@pytest.mark.parametrize("way", ["packed", "bfloat16"])
def test_what_drafts_follows_the_weights(way):
    target, drafter = pair()
    if way == "bfloat16":
        target, drafter = target.bfloat16(), drafter.bfloat16()
    found = learner(drafter, target)
    if way == "packed":
        hf_falcon.pack_weights(drafter)
    replay_calls(found, 39)
    call(target, drafter, 39)
    found.learn(24)
    assert found._replacements > 0
    assert is_packed(drafter) == (way == "packed")
    for name, tensor in drafter.named_parameters():
        assert torch.equal(tensor.to_dense() if way == "packed" else tensor, found._drafting[name]), name
    if way == "packed":
        serve(target, drafter, range(100, 103))


def test_a_packed_drafter_learns():
    target, drafter = pair()
    hf_falcon.pack_weights(drafter)
    with learner(drafter, target) as found:
        serve(target, drafter, range(10))
        assert found.learn(4) == 4


@pytest.mark.parametrize("is_packed_before", [False, True])
def test_weights_whose_replacement_was_interrupted_are_replaced_again(monkeypatch, is_packed_before):
    target, drafter = pair()
    if is_packed_before:
        hf_falcon.pack_weights(drafter)
    copy_ = torch.Tensor.copy_

    def interrupt(tensor, source):
        # In the middle: some weights are new, some are not.
        if any(tensor is each for each in list(drafter.parameters())[1:]):
            raise KeyboardInterrupt
        return copy_(tensor, source)

    with learner(drafter, target) as found:
        replay_calls(found, 40)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(torch.Tensor, "copy_", interrupt)
            found.learn(200)
        assert found._replacements > 0
        serve(target, drafter, range(500, 501))
        assert is_packed(drafter) == is_packed_before
        hf_falcon.unpack_weights(drafter)
        assert same(found._drafting, dict(drafter.named_parameters()))


# The budget, by a clock that a test sets.


def counted(found, clock, seconds):
    """Makes each unit of learning take some seconds, and returns the list of their times."""
    units, work = [], found._units

    def units_that_take_time():
        for did in work():
            if did:
                units.append(clock.now)
                clock.now += seconds
            yield did

    found._units = units_that_take_time
    found._work = units_that_take_time()
    return units


class Slow:
    """A streamer of a call that takes some seconds."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def put(self, value):
        pass

    def end(self):
        self.clock.now += self.seconds


@pytest.mark.parametrize("share", [0.0, 0.04, 0.25])
def test_learning_between_calls_takes_its_share_of_their_time(share):
    target, drafter = pair()
    clock = Clock()
    with learner(drafter, target, clock, share=share, uses=1000) as found:
        units = counted(found, clock, 0.5)
        for seed in range(15):
            call(target, drafter, seed, streamer=Slow(clock, 8.0))
        assert len(units) * 0.5 <= share * 120 + 0.5
        assert len(units) * 0.5 >= share * 120 - 2 * 0.5
        assert found.statistics.learning_seconds == pytest.approx(0.5 * len(units))


def test_learning_while_idle_takes_its_share():
    target, drafter = pair()
    clock = Clock()
    with learner(drafter, target, clock, uses=1000, idle_after=3.0) as found:
        replay_calls(found, 10)
        found.options.idle_share = 0.25
        units = counted(found, clock, 1.0)
        assert found.idle_turn() == 3.0 and not units
        clock.now += 3.0
        start = clock.now
        while clock.now < start + 400:
            wait = found.idle_turn()
            clock.now += wait
        assert len(units) == pytest.approx(100, abs=2)


def test_nothing_is_learnt_while_a_call_runs_unless_asked_for():
    target, drafter = pair()
    for during_calls in (False, True):
        clock = Clock()
        with learner(drafter, target, clock, uses=1000, idle_after=0.0, during_calls=during_calls) as found:
            replay_calls(found, 10)
            found.options.idle_share = 1.0
            units = counted(found, clock, 1.0)
            found.begin_call()
            found.idle_turn()
            assert bool(units) == during_calls
            found.options.idle_share = 0.0
            found.observer().__exit__()
            assert found._active == 0


def test_steps_a_minute():
    target, drafter = pair()
    clock = Clock()
    with learner(drafter, target, clock, uses=1000, step_tokens=1, steps_a_minute=3) as found:
        replay_calls(found, 10)
        found.options.idle_share = 1.0
        clock.now += 1
        while clock.now < 601:
            clock.now += max(0.1, found.idle_turn())
        assert 27 <= found.statistics.steps <= 33


def test_the_thread_learns_while_idle_and_ends_with_the_learner():
    target, drafter = pair()
    found = learner(drafter, target, idle_share=1.0, idle_after=0.0)
    threads = torch.get_num_threads()
    replay_calls(found, 10)
    end = time.monotonic() + 60
    while found.statistics.steps < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert found.statistics.steps >= 2
    thread = found._thread
    found.close()
    assert not thread.is_alive() and torch.get_num_threads() == threads
    steps = found.statistics.steps
    serve(target, drafter, range(20, 23))
    assert found.statistics.steps == steps and found.statistics.calls == 10


# The buffer, and the gate.


def test_the_buffer_is_bounded():
    target, drafter = pair()
    with learner(drafter, target, memory=0.01) as found:
        sizes = []
        for seed in range(40):
            call(target, drafter, seed)
            sizes.append(found.statistics.memory)
        assert max(sizes) <= 0.01 * 2**20 and found.statistics.texts > 0
        # The newest are kept.
        assert found._buffer.records[-1].number >= 38


def tensors_beside_the_buffer(found):
    """The live tensors that are no part of the buffer's texts. What it counts dies with its names."""
    gc.collect()
    of_texts = set()
    for record in found._buffer:
        parts = [record.token_ids, record.features, *(score for _, score in record.scores.values())]
        of_texts |= {id(part) for part in (*parts, *(each for path in record.rejected for each in path[1:]))}
    kinds = (torch.Tensor, torch.nn.Parameter)
    return sum(type(each) in kinds and id(each) not in of_texts for each in gc.get_objects())


def test_learning_keeps_no_tensors_but_those_of_its_buffer():
    target, drafter = pair()
    with learner(drafter, target, memory=0.02) as found:
        counts = []
        for start in range(0, 24, 6):
            for seed in range(start, start + 6):
                call(target, drafter, seed)
            assert found.learn(4) == 4
            counts.append(tensors_beside_the_buffer(found))
    # Weights that draft can be halfway to those that were accepted.
    assert max(counts[1:]) <= counts[0] + len(list(drafter.parameters()))


def test_texts_of_all_lengths_are_learnt_from_in_few_sizes(monkeypatch):
    target, drafter = pair()
    layers, sizes = type(drafter).run_layers, set()

    def run_layers(self, hidden_states, *args, **kwargs):
        sizes.add(hidden_states.shape[1])
        return layers(self, hidden_states, *args, **kwargs)

    with learner(drafter, target, held_out=0.3) as found:
        for length in range(5, 45, 2):
            target.generate(prompt(length, seed=length), assistant_model=drafter, **CALL)
        lengths = {len(record.token_ids) for record in found._buffer.records}
        monkeypatch.setattr(type(drafter), "run_layers", run_layers)
        assert found.learn(8) == 8
    # oneDNN keeps the code that it makes for a size, also after the call.
    assert len(lengths) > 10 and sizes <= {32, 64, 96}


def test_a_long_call_is_recorded_in_part():
    target, drafter = pair()
    with learner(drafter, target, longest=10, held_out=0.01) as found:
        call(target, drafter, 0, max_new_tokens=60)
        [record] = found._buffer.records
        # Where it is reached, a round may add some more.
        assert 10 <= record.new_tokens <= 10 + 8


def held_out_tau(found):
    from hf_falcon.learning.gate import estimated_tau

    scores = [found._student.score(each, found._drafting, found._target()) for each in found._buffer.held_out]
    return estimated_tau(scores)


@pytest.mark.parametrize("poison", ["random", "repeated"])
def test_the_gate_refuses_a_poisoned_buffer(poison):
    target, drafter = pair()
    with learner(drafter, target, learning_rate=3e-2, uses=10_000) as found:
        replay_calls(found, 40)
        found.learn(24)
        assert found._replacements > 0 and len(found._buffer.held_out) >= 4
        if poison == "random":
            # Features and tokens that no target has computed.
            known, weights = held_out_tau(found), weights_of(drafter)
            chance = torch.Generator().manual_seed(0)
            for record in found._buffer.records:
                record.features = torch.randn(record.features.shape, generator=chance).bfloat16()
                record.token_ids = torch.randint(1, VOCAB, record.token_ids.shape, generator=chance)
                record.rejected = []
        else:
            seed = next(seed for seed in range(500, 600) if seed_is_learnt(found, target, drafter, seed))
            known, weights = held_out_tau(found), weights_of(drafter)
            held_out = [record.prompt for record in found._buffer.held_out]
            found._buffer.records.clear()
            for _ in range(60):
                call(target, drafter, seed)
            # So many times, and it fills neither the buffer nor what is held out.
            last = found._buffer.records[-1]
            for _ in range(10_000):
                found._buffer.add(last.__class__(last.token_ids, last.features, last.prompt_length, last.prompt))
            assert len(found._buffer.records) <= 4
            assert [record.prompt for record in found._buffer.held_out] == held_out
        refused = found._refusals
        found.learn(24)
        assert found._refusals > refused
        # What drafts is as good as before, whatever the student has become.
        assert held_out_tau(found) >= known
        if found._refusals == refused + 6:
            assert same(weights_of(drafter), weights)


def seed_is_learnt(found, target, drafter, seed):
    """Whether the prompt of a seed is one to learn from, and not held out."""
    count = len(found._buffer.records)
    call(target, drafter, seed)
    return len(found._buffer.records) == count + 1


def test_a_prompt_that_is_always_the_same_replaces_nothing():
    target, drafter = pair()
    before = weights_of(drafter)
    with learner(drafter, target, uses=1000) as found:
        for _ in range(20):
            call(target, drafter, 0)
        found.learn(12)
        assert found._replacements == 0
    assert same(weights_of(drafter), before)


def test_weights_that_are_not_finite_are_dropped(caplog):
    target, drafter = pair()
    with learner(drafter, target) as found, caplog.at_level(logging.WARNING):
        replay_calls(found, 20)
        for parameter in found._student._model.parameters():
            parameter.data.fill_(torch.nan)
        found.learn(1)
        assert all(each.isfinite().all() for each in found._student.parameters.values())
        assert "not finite" in caplog.text
    serve(target, drafter, range(30, 33))


# How far the drafter goes.


def scored(found, monkeypatch, hits):
    """Makes the score of weights depend on how far they are from the start, and returns these places as they come."""
    places = []

    def score(record, weights, target):
        ends = {"start": found._student.start, "now": found._drafting, "end": found._student.weights()}
        places.append(next((place for place, known in ends.items() if same(weights, known)), "halfway"))
        return torch.tensor([[hits[places[-1]]] * 3 + [100.0]])

    monkeypatch.setattr(found._student, "score", score)
    return places


@pytest.mark.parametrize("halfway", [45, 85])
def test_the_drafter_goes_half_of_the_way_where_this_keeps_most_of_the_gain(monkeypatch, halfway):
    target, drafter = pair()
    clock = Clock()
    with learner(drafter, target, clock) as found:
        replay_calls(found, 40)
        units, texts = counted(found, clock, 1.0), len(found._buffer.held_out)
        places = scored(found, monkeypatch, {"start": 0.0, "halfway": halfway, "end": 100.0})
        assert found.learn(3) == 3
        learnt = len(units)
        assert found.learn(1) == 1
        assert [places.count(place) for place in ("start", "halfway", "end")] == [texts] * 3
        # The time of all these is counted, and a call may begin between two.
        assert len(units) >= learnt + 3 * texts and found.statistics.learning_seconds == len(units)
        end, start = found._student.weights(), found._student.start
        expected = {name: (start[name] + end[name]) / 2 for name in end} if halfway == 85 else end
        for name, tensor in drafter.named_parameters():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-7, msg=name)
        assert found.statistics.acceptance_now == pytest.approx(halfway / 100 if halfway == 85 else 1.0)
        assert not same(end, start) and same(found._accepted, end)


def test_half_of_the_way_has_to_be_better_than_what_drafts(monkeypatch):
    target, drafter = pair()
    with learner(drafter, target, uses=1000) as found:
        replay_calls(found, 40)
        hits = {"start": 0.0, "halfway": 80.0, "end": 90.0, "now": 80.0}
        scored(found, monkeypatch, hits)
        found.learn(4)
        known, accepted = weights_of(drafter), found._accepted
        # The student gains, and what is halfway to it does not.
        found.learn(7 * 4)
        assert found._refusals == 7 and not same(dict(found._student.parameters), accepted)
        found.learn(4)
        assert (found._replacements, found._refusals) == (1, 8) and same(weights_of(drafter), known)
        # It begins again from where it was, and not from halfway.
        assert same(dict(found._student.parameters), accepted)


def test_a_better_copy_replaces_what_drafts_also_where_halfway_to_it_is_worse(monkeypatch):
    target, drafter = pair()
    with learner(drafter, target, uses=1000) as found:
        replay_calls(found, 40)
        # The drafter has gone the whole of the way before.
        found._drafting = found._accepted = {name: each + 1e-3 for name, each in found._student.weights().items()}
        found._version = 1
        scored(found, monkeypatch, {"start": 0.0, "halfway": 55.0, "end": 80.0, "now": 60.0})
        found.learn(4)
        assert (found._replacements, found._refusals) == (1, 0) and found._drafting is found._accepted


# What is kept.


@pytest.mark.parametrize("is_halfway", [False, True])
def test_learning_goes_on_from_the_folder(tmp_path, monkeypatch, is_halfway):
    monkeypatch.setattr("hf_falcon.learning.learner.is_enough", lambda *scores: is_halfway)
    target, drafter = pair()
    first = weights_of(drafter)
    with learner(drafter, target, folder=tmp_path) as found:
        replay_calls(found, 39)
        serve(target, drafter, range(39, 40))
        found.learn(20)
        statistics, trained = found.statistics, {k: v.detach().clone() for k, v in found._student.parameters.items()}
        state, accepted = found._student.optimizer.state_dict()["state"], found._accepted
    assert (found._drafting is not accepted) == is_halfway
    assert statistics.replacements > 0
    # It has drafted, and is the drafter of the folder.
    assert same(weights_of(hf_falcon.FalconDraftModel.from_pretrained(tmp_path / "drafter")), weights_of(drafter))
    assert not list(tmp_path.rglob("*.tmp")) and not (tmp_path / "samples.safetensors").exists()
    learnt, again = weights_of(drafter), new_drafter(target, **SIZES)
    # The drafter of the folder has learnt: what it began with is known all the same.
    again.load_state_dict(learnt)
    with learner(again, target, folder=tmp_path) as found:
        assert same(found._student.start, first) and same(weights_of(again), learnt)
    again.load_state_dict(first)
    with learner(again, target, folder=str(tmp_path)) as found:
        assert same(weights_of(again), learnt) and same(dict(found._student.parameters), trained)
        assert same(found._student.start, first) and same(found._accepted, accepted)
        resumed = found.statistics
        assert (resumed.steps, resumed.calls, resumed.tokens_seen) == (20, 40, statistics.tokens_seen)
        for number, values in found._student.optimizer.state_dict()["state"].items():
            for key, value in values.items():
                assert torch.equal(value, state[number][key])
        assert found.statistics.texts == 0
    other = new_drafter(target, seed=7, **SIZES)
    with pytest.raises(ValueError, match="begun with another drafter"):
        learner(other, target, folder=tmp_path)
    with pytest.raises(ValueError, match="was begun with another drafter"):
        learner(new_drafter(target, **{**SIZES, "intermediate_size": 24}), target, folder=tmp_path)


def test_texts_are_kept_where_this_is_asked_for(tmp_path):
    target, drafter = pair()
    with learner(drafter, target, folder=tmp_path, keep_samples=True) as found:
        serve(target, drafter, range(12))
        known = {record.prompt: record for record in found._buffer}
        held_out = len(found._buffer.held_out)
    with learner(drafter, target, folder=tmp_path, keep_samples=True) as found:
        assert {record.prompt for record in found._buffer} == set(known)
        assert len(found._buffer.held_out) == held_out
        for record in found._buffer:
            expected = known[record.prompt]
            assert torch.equal(record.token_ids, expected.token_ids) and torch.equal(
                record.features, expected.features
            )
            assert len(record.rejected) == len(expected.rejected)
        assert found.learn(1) == 1


def test_texts_are_removed_where_keeping_them_is_not_asked_for_any_more(tmp_path):
    target, drafter = pair()
    with learner(drafter, target, folder=tmp_path, keep_samples=True) as found:
        replay_calls(found, 2)
    assert (tmp_path / "samples.safetensors").is_file()
    with learner(drafter, target, folder=tmp_path):
        pass
    assert not (tmp_path / "samples.safetensors").exists()


def test_a_prompt_that_was_learnt_from_is_not_held_out_later(tmp_path, caplog):
    target, drafter = pair()
    options = {"folder": tmp_path, "keep_samples": True}
    with learner(drafter, target, held_out=0.1, **options) as found:
        replay_calls(found, 30)
        assert found._buffer.held_out
        learnt_from = {record.prompt for record in found._buffer.records}
    # Also not by a third process.
    for _ in range(2):
        with learner(drafter, target, held_out=0.6, **options) as found:
            assert "`held_out` is 0.6, and learning in" in caplog.text
            assert {record.prompt for record in found._buffer.records} == learnt_from
        caplog.clear()


def test_a_damaged_folder_is_named(tmp_path):
    target, drafter = pair()
    (tmp_path / STATE_NAME).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=STATE_NAME):
        learner(drafter, target, folder=tmp_path)


KILLED = """
import sys
sys.path[:0] = {paths!r}
from learners import learner, pair
target, drafter = pair()
found = learner(drafter, target, folder={folder!r}, keep_samples=True, save_minutes=1e-6, gate_steps=2)
print("ready", flush=True)
while True:
    found.learn(1)
    for record in found._buffer.records:
        record.uses = 0
"""


def test_a_killed_process_leaves_a_complete_state(tmp_path):
    support = str(Path(__file__).parents[1] / "support")
    folder = tmp_path / "learnt"
    script = KILLED.format(paths=[support, *sys.path], folder=str(folder))
    target, drafter = pair()
    with learner(drafter, target, folder=folder, keep_samples=True) as found:
        replay_calls(found, 30)
    steps = [0]
    for turn in range(2):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout.readline() == "ready\n"
            # Forcing files to disk may take long on a busy machine.
            end = time.monotonic() + 300
            # At some moment of a save, another one each time.
            while (state := LearnerState.load(folder)) is None or state.progress["steps"] <= steps[-1] + turn:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.003 * (turn + 1))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        target, drafter = pair()
        found = learner(drafter, target, folder=folder, keep_samples=True)
        steps.append(found.statistics.steps)
        assert steps[-1] > steps[-2] and len(found._buffer.records) > 0
        serve(target, drafter, range(600, 602))
        found.close()


# Who can learn, and who keeps what alive.


def test_comparisons_follow_a_target_that_changes():
    target, drafter = pair()
    with learner(drafter, target) as found:
        replay_calls(found, 30)
        found.learn(4)
        before = [record.scores["start"][1] for record in found._buffer.held_out]
        assert len(before) >= 4
        with torch.no_grad():
            head = target.get_output_embeddings().weight
            head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
        found.learn(4)
        after = [record.scores["start"][1] for record in found._buffer.held_out]
        expected = [found._student.score(each, found._student.start, target) for each in found._buffer.held_out]
        assert all(torch.equal(one, other) for one, other in zip(after, expected))
        assert not all(torch.equal(one, other) for one, other in zip(before, after))
        # What it learns from is the new target's.
        serve(target, drafter, range(30, 34))


def test_a_drafter_without_room_to_learn_says_so():
    target = new_target("llama")
    with pytest.raises(ValueError, match="cannot learn: a BigramDrafter has no weights"):
        Learner(toy_drafter(target), target)
    with pytest.raises(ValueError, match="cannot learn"):
        hf_falcon.attach(target, toy_drafter(target), learn=True)
    with pytest.raises(ValueError, match="cannot learn: a LookupDrafter"):
        hf_falcon.attach(target, learn=True)
    # Nothing was attached.
    plain = target.generate(prompt(8), **CALL, return_dict_in_generate=True)
    assert not hasattr(plain, "draft_statistics")


def test_attach_and_detach(tmp_path):
    target, drafter = pair()
    hf_falcon.attach(target, drafter, learn=LearningOptions(**FAST))
    found = learner_of(drafter)
    output = target.generate(prompt(8), **CALL, return_dict_in_generate=True)
    assert found.statistics.calls == 1
    assert output.draft_statistics.learning["steps"] == 0
    with pytest.raises(ValueError, match="has a learner already"):
        Learner(drafter, target)
    hf_falcon.attach(target, drafter, learn=tmp_path)
    assert learner_of(drafter) is not found and learner_of(drafter).options.folder == tmp_path
    hf_falcon.detach(target)
    assert learner_of(drafter) is None
    hf_falcon.attach(target, drafter)
    output = target.generate(prompt(8), **CALL, return_dict_in_generate=True)
    assert output.draft_statistics.learning is None
    hf_falcon.detach(target)


def test_calls_of_another_target_are_not_watched():
    target, drafter = pair()
    other = new_target("llama")
    with learner(drafter, target) as found:
        call(other, drafter, 0)
        assert found.statistics.calls == 0


def test_both_models_are_freed():
    target, drafter = pair()
    hf_falcon.attach(target, drafter, learn=LearningOptions(**{**FAST, "idle_share": 1.0, "idle_after": 0.0}))
    for seed in range(12):
        target.generate(prompt(8, seed=seed), **CALL)
    learner_of(drafter).learn(4)
    alive = [weakref.ref(each) for each in (target, drafter, learner_of(drafter))]
    del target, drafter
    end = time.monotonic() + 30
    while any(each() is not None for each in alive) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert [each() for each in alive] == [None, None, None]


@pytest.mark.parametrize("where", ["start", "add_round", "_record", "learn"])
def test_an_error_of_the_learning_breaks_no_call(monkeypatch, caplog, where):
    from hf_falcon.learning.recorder import CallRecorder
    from hf_falcon.learning.student import Student

    def fail(*args, **kwargs):
        raise MemoryError("nothing left")

    target, drafter = pair()
    owner, name = {
        "start": (CallRecorder, "_start"),
        "add_round": (CallRecorder, "_add_round"),
        "_record": (CallRecorder, "_record"),
        "learn": (Student, "learn"),
    }[where]
    monkeypatch.setattr(owner, name, fail)
    with learner(drafter, target, share=1.0), caplog.at_level(logging.WARNING):
        serve(target, drafter, range(3))
    assert caplog.text.count("does not learn any more: MemoryError: nothing left") == 1


@pytest.mark.parametrize(
    "field, value",
    [
        ("share", 1.5),
        ("held_out", 0.0),
        ("memory", 0),
        ("threads", 0),
        ("steps_a_minute", 0),
        ("steps_a_minute", math.inf),
    ],
)
def test_options_out_of_range(field, value):
    with pytest.raises(ValueError, match=rf"`{field}` is {value}"):
        LearningOptions(**{field: value})
    with pytest.raises(ValueError, match="no `folder`"):
        LearningOptions(keep_samples=True)


def learn_until_replaced(found, times=1):
    while found._replacements < times:
        assert found.learn(4) == 4


def test_a_save_that_dies_before_its_drafter_goes_on_with_the_one_before(tmp_path, monkeypatch):
    """The state is written first. The drafter of the folder is then that of the save before."""
    target, drafter = pair()
    with learner(drafter, target, folder=tmp_path) as found:
        replay_calls(found, 40)
        learn_until_replaced(found)
        found.save()
        # The folder has neither the drafter that learning began with, nor the latest one.
        learn_until_replaced(found, 2)
        with monkeypatch.context() as patch:
            patch.setattr(learner_module.files, "save_drafter", killed)
            with pytest.raises(KeyboardInterrupt):
                found.save()
            steps = found.statistics.steps
            with pytest.raises(KeyboardInterrupt):
                found.close()
    kept = hf_falcon.FalconDraftModel.from_pretrained(tmp_path / "drafter")
    with learner(kept, target, folder=tmp_path) as found:
        assert found.statistics.steps == steps
        # Again, from that one.
        serve(target, kept, range(600, 602))
    later = hf_falcon.FalconDraftModel.from_pretrained(tmp_path / "drafter")
    with learner(later, target, folder=tmp_path) as found:
        assert found.statistics.steps == steps


def killed(*args):
    raise KeyboardInterrupt


def test_the_log_may_save_and_close(tmp_path):
    target, drafter = pair()
    found = learner(drafter, target, folder=tmp_path, gate_steps=2)
    told = []
    found.log = lambda line: (told.append(line), found.save(), found.close())
    replay_calls(found, 30)
    found.learn(4)
    assert len(told) == 1 and (tmp_path / STATE_NAME).is_file()


@pytest.mark.parametrize("watched", [True, False])
def test_weights_stay_in_a_call_that_runs(tmp_path, watched):
    """Also where the learner is closed meanwhile, as by `detach`, and in a call that it does not watch."""
    target, drafter = pair()
    found = learner(drafter, target, folder=tmp_path)
    replay_calls(found, 40)
    before, during = weights_of(drafter), []

    class Closes:
        tokens = 0

        def put(self, value):
            self.tokens += 1
            if value.numel() == 1:
                learn_until_replaced(found)
            if self.tokens == 4:
                found.close()
            during.append(same(weights_of(drafter), before))

        def end(self):
            pass

    with nullcontext() if watched else found.paused():
        target.generate(prompt(8, seed=500), assistant_model=drafter, streamer=Closes(), **CALL)
    assert all(during) and not same(weights_of(drafter), before)
    kept = hf_falcon.FalconDraftModel.from_pretrained(tmp_path / "drafter")
    assert same(weights_of(kept), weights_of(drafter))


def test_an_accepted_token_that_ends_a_text_is_counted():
    target, drafter = pair()
    with learner(drafter, target) as found:
        accepted = 0
        for seed in range(12):
            ids = prompt(8, seed=seed)
            end = int(target.generate(ids, max_new_tokens=7, do_sample=False, assistant_model=None)[0, -1])
            settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
            output = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **settings)
            accepted += output.draft_statistics.accepted_tokens
            assert found._history.total().accepted == accepted


def test_less_than_a_step_a_minute():
    for steps, seconds in ((0.5, 120.0), (1.5, 40.0), (3, 60.0)):
        budget = Budget(0.1, steps)
        for now in range(max(1, int(steps))):
            assert budget.seconds_to_step(float(now)) == 0.0
            budget.add_step(float(now))
        assert budget.seconds_to_step(float(now)) == seconds - now
        assert budget.seconds_to_step(seconds) == 0.0


@pytest.mark.parametrize("steps_a_minute", [None, 3])
def test_the_budget_is_bounded(steps_a_minute):
    """Where nobody asks when the next step may begin, as with `share` and `idle_share` of 0."""
    budget = Budget(0.0, steps_a_minute)
    for now in range(1000):
        budget.add_step(float(now))
    assert len(budget._steps) <= 3
    assert budget.seconds_to_step(999.0) == (0.0 if steps_a_minute is None else 997.0 + 60 - 999)


def test_a_save_that_fails_after_the_last_call_is_a_warning(tmp_path, monkeypatch, caplog):
    target, drafter = pair()
    found = learner(drafter, target, folder=tmp_path)
    replay_calls(found, 40)

    class Closes:
        def put(self, value):
            if value.numel() == 1 and learner_of(drafter) is not None:
                # What it learns in a call waits for its end.
                learn_until_replaced(found)
                found.close()
                monkeypatch.setattr(learner_module.files, "save_drafter", fails)

        def end(self):
            pass

    output = target.generate(prompt(8, seed=500), assistant_model=drafter, streamer=Closes(), **CALL)
    assert output.shape[1] > 8 and "was not saved: OSError: full" in caplog.text
    assert not (tmp_path / "drafter").exists()
    # It is tried again, not after every call but at the end.
    call(target, drafter, 501)
    assert caplog.text.count("was not saved") == 1
    monkeypatch.undo()
    learner_module._close_all()
    assert (tmp_path / "drafter").is_dir() and drafter not in learner_module._learners


def fails(*args):
    raise OSError("full")


def test_a_save_that_fails_at_the_end_of_the_process_keeps_no_other_from_its_own(tmp_path, monkeypatch, caplog):
    pairs = [pair() for _ in range(2)]
    first, _ = [learner(drafter, target, folder=tmp_path / str(n)) for n, (target, drafter) in enumerate(pairs)]
    monkeypatch.setattr(first, "save", fails)
    learner_module._close_all()
    assert caplog.text.count("was not saved: OSError: full") == 1
    assert (tmp_path / "1" / STATE_NAME).is_file() and not (tmp_path / "0" / STATE_NAME).exists()


def test_a_save_that_fails_is_repeated(tmp_path, monkeypatch):
    target, drafter = pair()
    found = learner(drafter, target, folder=tmp_path)
    replay_calls(found, 40)
    with monkeypatch.context() as patch:
        patch.setattr(learner_module.files.LearnerState, "save", fails)
        with pytest.raises(OSError, match="full"):
            found.close()
    assert not (tmp_path / STATE_NAME).exists()
    learner_module._close_all()
    assert (tmp_path / STATE_NAME).is_file() and drafter not in learner_module._learners


def test_a_folder_that_cannot_be_written_any_more_can_be_left(tmp_path, monkeypatch, caplog):
    target, drafter = pair()
    found = learner(drafter, target, folder=tmp_path / "gone")
    monkeypatch.setattr(found, "save", fails)
    with pytest.raises(OSError, match="full"):
        found.close()
    hf_falcon.attach(target, drafter, learn=LearningOptions(folder=tmp_path / "other", **FAST))
    assert learner_of(drafter).options.folder == tmp_path / "other" and "was not saved: OSError: full" in caplog.text
    hf_falcon.detach(target)


def test_a_prompt_is_the_same_one_behind_padding():
    target, drafter = pair()
    with learner(drafter, target) as found:
        for longer in (0, 3):
            ids = torch.cat((torch.zeros(1, longer, dtype=torch.long), prompt(8)), dim=1)
            ids = torch.cat((ids, prompt(8 + longer, seed=1)))
            target.generate(ids, attention_mask=(ids != 0).long(), assistant_model=drafter, **CALL)
        prompts = [record.prompt for record in found._buffer]
    assert len(prompts) == 4 and len(set(prompts)) == 3


def test_a_new_learner_in_the_middle_of_a_call_begins_with_what_was_learnt():
    target, drafter = pair()
    found = learner(drafter, target)
    replay_calls(found, 40)

    class Attaches:
        tokens = 0

        def put(self, value):
            self.tokens += 1
            if value.numel() == 1:
                learn_until_replaced(found)
            if self.tokens == 4:
                hf_falcon.attach(target, drafter, learn=LearningOptions(**FAST))

        def end(self):
            pass

    target.generate(prompt(8, seed=500), assistant_model=drafter, streamer=Attaches(), **CALL)
    later = learner_of(drafter)
    assert later is not None and later is not found
    assert all(torch.equal(later._student.start[name], each) for name, each in found._drafting.items())
    assert all(torch.equal(dict(drafter.named_parameters())[name], each) for name, each in found._drafting.items())
    hf_falcon.detach(target)


def test_what_was_learnt_is_saved_after_the_models_are_gone(tmp_path):
    """As when a script's function has returned: the end of the process saves."""
    target, drafter = pair()
    hf_falcon.attach(target, drafter, learn=LearningOptions(folder=tmp_path, **FAST))
    for seed in range(12):
        target.generate(prompt(8, seed=seed), **CALL)
    learner_of(drafter).learn(4)
    alive = weakref.ref(drafter)
    del target, drafter
    gc.collect()
    assert not (tmp_path / "learner.safetensors").is_file()
    learner_module._close_all()
    assert (tmp_path / "learner.safetensors").is_file()
    gc.collect()
    assert alive() is None


def test_a_drafter_that_is_replaced_saves_what_it_has_learnt(tmp_path):
    target, drafter = pair()
    hf_falcon.attach(target, drafter, learn=LearningOptions(folder=tmp_path, **FAST))
    target.generate(prompt(8), **CALL)
    hf_falcon.attach(target, new_drafter(target))
    assert learner_of(drafter) is None and (tmp_path / "learner.safetensors").is_file()
    hf_falcon.detach(target)


def test_a_folder_has_one_learner(tmp_path):
    """The next one goes on with what the earlier one has learnt, and is not overwritten by it."""
    target, drafter = pair()
    first = Learner(drafter, target, LearningOptions(folder=tmp_path, **FAST))
    for seed in range(12):
        target.generate(prompt(8, seed=seed), assistant_model=drafter, **CALL)
    first.learn(4)
    with Learner(new_drafter(target), target, LearningOptions(**FAST)):
        assert learner_of(drafter) is first
    other, again = pair()
    again.load_state_dict(drafter.state_dict())
    with Learner(again, other, LearningOptions(folder=tmp_path, **FAST)) as second:
        assert learner_of(drafter) is None and second.statistics.steps == first.statistics.steps == 4


def test_a_refused_attachment_changes_nothing(tmp_path):
    target, drafter = pair()
    hf_falcon.attach(target, drafter, learn=LearningOptions(folder=tmp_path, **FAST))
    target.generate(prompt(8), **CALL)
    with pytest.raises(ValueError, match="cannot learn"):
        hf_falcon.attach(target, "lookup", learn=True)
    learner_of(drafter).save()
    with pytest.raises(ValueError, match="was begun with another drafter"):
        hf_falcon.attach(target, new_drafter(target, seed=7, **SIZES), learn=tmp_path)
    assert learner_of(drafter).options.folder == tmp_path
    target.generate(prompt(8), **CALL)
    assert learner_of(drafter).statistics.calls == 2
    hf_falcon.detach(target)
