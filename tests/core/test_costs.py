# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What a round costs: a prior, and what the rounds show."""

import sys
import threading
import time

import pytest
import torch
from oracle import FreeDrafting
from tiny_models import TARGETS, prompt, tiny_drafter, tiny_target

from hf_falcon import cost_files
from hf_falcon.core import costs
from hf_falcon.core.costs import CostKey, Costs
from hf_falcon.core.draft_session import TargetHead
from hf_falcon.core.target_run import TargetRun


def timed(prior, *rounds, sizes=(), plain=1.0) -> Costs:
    """Costs after a plain step, and rounds of `(tokens, seconds)`."""
    found = Costs(prior, sizes)
    for tokens, seconds in ((1, plain), *rounds):
        found.observe_target(tokens, seconds)
    return found


def test_begins_from_the_prior():
    found = Costs({0: 2.0, 4: 3.0, 8: 6.0})
    assert found.target(10) == pytest.approx([1, 1.125, 1.25, 1.375, 1.5, 1.875, 2.25, 2.625, 3.0, 3.375, 3.75])
    assert Costs({0: 2.0}).target(2) == [1.0, 1.0, 1.0]
    # A size never costs more than a larger one.
    assert Costs({0: 1.0, 2: 4.0, 4: 3.0, 6: 2.0, 8: 2.5}).target(8) == [1.0, 1.5, *[2.0] * 5, 2.25, 2.5]


def test_the_curve_is_learnt():
    """Within a few rounds, and to about the step between costs; sizes between are interpolated."""
    true = {2: 1.5, 4: 2.0, 8: 3.0, 16: 5.0}
    found = timed(
        {0: 1.0, 15: 1.4}, *[(tokens, 0.03 * cost) for _ in range(6) for tokens, cost in true.items()], plain=0.03
    )
    learnt = found.target(15)
    assert [learnt[tokens - 1] for tokens in true] == pytest.approx(list(true.values()), rel=0.3)
    assert learnt == sorted(learnt) and learnt[0] == 1.0


def test_a_load_that_changes_the_shape():
    rounds = [(8, 1.1)] * 10
    found = timed({0: 1.0, 15: 1.4}, *rounds)
    quiet = found.target(7)[7]
    for _ in range(5):
        found.observe_target(1, 1.0)
        found.observe_target(8, 2.5)
    assert quiet < 1.4 and found.target(7)[7] == pytest.approx(2.5, rel=0.35)
    for _ in range(5):
        found.observe_target(8, 1.1)
    assert found.target(7)[7] < 1.5


def test_trees_that_are_padded_cost_what_the_full_one_does():
    found = timed({0: 1.0, 15: 2.5}, *[(3, 1.9)] * 8, sizes=(1, 8, 16))
    costs_of_nodes = found.target(15)
    assert costs_of_nodes[0] == 1.0 and len(set(costs_of_nodes[1:8])) == 1 == len(set(costs_of_nodes[8:]))
    assert costs_of_nodes[1] == pytest.approx(1.9, rel=0.2) and costs_of_nodes[8] > costs_of_nodes[1]


def test_plain_steps_give_the_unit():
    """They are due before anything else, rarely while everything is drafted, and where costs change."""
    found = Costs({0: 1.0, 7: 1.2})
    assert found.steps_due
    found.observe_target(1, 1.0)
    due = []
    for number in range(200):
        found.observe_target(8, 1.2)
        if found.steps_due:
            due.append(number)
            found.observe_target(1, 1.0)
    assert 3 <= len(due) <= 8 and due[-1] - due[-2] > due[0] + 1
    # Twice as slow: is the tree slower, or the machine? It is the machine.
    for _ in range(40):
        found.observe_target(1, 2.0) if found.steps_due else found.observe_target(8, 2.4)
    assert found.target(7)[7] == pytest.approx(1.2, rel=0.2)


def test_what_is_old_is_forgotten():
    found = timed({0: 1.0, 63: 3.0}, *[(64, 9.0)] * 5)
    assert found.target(63)[63] > 5.0
    for _ in range(300):
        found.observe_target(4, found.target(3)[3])
    assert found.target(63)[63] == pytest.approx(3.0, rel=0.2)


def test_follows_the_machine():
    """Twice as slow a machine, and drafting with it: the pass costs what it did, in plain steps."""
    found = timed({0: 1.0}, plain=2.0)
    for _ in range(20):
        found.observe_drafting(commit_seconds=0.2, pass_seconds=0.6, passes=3)
    assert found.commit == found.draft_pass == 0.1
    found.observe_drafting(commit_seconds=None, pass_seconds=0.6, passes=3)
    assert found.commit == 0.1


def test_an_interruption_says_little():
    found = timed({0: 1.0, 7: 1.2}, *[(8, 1.2)] * 3, (8, 1000.0))
    for seconds in (0.1, 0.1, 1000.0):
        found.observe_drafting(seconds, seconds, passes=1)
    assert found.target(7)[7] == pytest.approx(1.2) and found.draft_pass == found.commit == 0.1


@pytest.mark.parametrize("seconds", [[6.0, 1.2], [1.2, 6.0], [6.0, 1.2, 7.0], [1.2, 6.0, 1.2, 7.0, 5.0]])
def test_interruptions_do_not_stand(seconds):
    """What looks dear is not run again: a mean with an interrupted timing would stay what it is."""
    found = timed({0: 1.0, 7: 1.2}, *[(8, each) for each in seconds])
    # The step between costs is left.
    assert found.target(7)[7] == pytest.approx(1.2, rel=0.16)


def test_a_clock_that_says_0():
    found = timed({0: 1.0}, (8, 0.0), plain=1.0)
    for _ in range(9):
        found.observe_drafting(0.0, 0.0, passes=1)
    assert 0.0 < found.draft_pass < 0.01 and found.target(7)[7] == 1.0


def test_the_unmeasured():
    """Few tokens wait for the weights; rows of a batch are tokens, too."""
    key = CostKey(1, 32, 2048, "sdpa", "torch.bfloat16", "cpu", 2, False, ())
    cpu, gpu = costs.default_prior(key), costs.default_prior(key._replace(device="NVIDIA H100"))
    assert list(cpu) == list(range(33)) and cpu[3] == 1.0 < cpu[32] and gpu[32] == 1.0
    single = costs.default_prior(key._replace(dtype="torch.float32"))
    assert single[1] > 1.2
    batch = Costs(costs.default_prior(key._replace(rows=8))).target(7)
    assert batch[7] > 2.0


def cost_key(target, context=100, max_nodes=8):
    return CostKey.of(target, context, max_nodes)


def test_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "own"))
    target, other = tiny_target("llama"), tiny_target("qwen2")
    seconds = {0: 0.5, 8: 1.25}
    assert cost_files.load(target, cost_key(target)) is None
    cost_files.save(target, cost_key(target), seconds)
    assert cost_files.load(target, cost_key(target)) == seconds
    assert cost_files.load(target, cost_key(target, context=2048)) == seconds
    for key in (cost_key(target, context=2049), cost_key(target, max_nodes=9)):
        assert cost_files.load(target, key) is None
    assert cost_files.load(other, cost_key(other)) is None
    [file] = (tmp_path / "own" / "costs").iterdir()
    for broken in ("", "{}", "[1]", '{"seconds": {"0": "x"}}', '{"seconds": {"1": 1.0}}', '{"seconds": {"0": -1}}'):
        file.write_text(broken)
        assert cost_files.load(target, cost_key(target)) is None


def test_no_place_to_keep_them(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "file"))
    target = tiny_target("llama")
    cost_files.save(target, cost_key(target), {0: 1.0})
    assert cost_files.load(target, cost_key(target)) is None


def test_what_tune_measured_is_the_prior(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    target = TARGETS["llama"]()
    key, known = CostKey.of(target, 5, 6), {}
    cost_files.save(target, key, {0: 1.0, 6: 7.0})
    found = costs.costs_of(target, key, known)
    assert found.target(6) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0] and known == {key: found}
    assert costs.costs_of(target, key, known) is found


def test_nothing_runs_and_nothing_is_written(tmp_path, monkeypatch):
    """A call after the probe has the forwards of its rounds, and no others."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    target, forwards = TARGETS["llama"](), []
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=6)
    target.register_forward_pre_hook(lambda *_: forwards.append(1))
    options = {"do_sample": False, "return_dict_in_generate": True, "assistant_model": drafter}
    target.generate(prompt(5), max_new_tokens=2, **options)
    forwards.clear()
    found = target.generate(prompt(5), max_new_tokens=20, **options)
    assert len(forwards) == found.draft_statistics.rounds + 1 and not list(tmp_path.iterdir())


def test_costs_stand_still_while_timings_scatter():
    """In bfloat16 the size of a tree decides how logits round: timing alone must not change decisions."""
    found = timed({0: 1.0, 8: 1.5})
    for seconds in (0.09, 0.11) * 50:
        found.observe_drafting(seconds, seconds, passes=1)
        assert (found.commit, found.draft_pass) == (0.1, 0.1)
    for _ in range(100):
        found.observe_drafting(0.4, 0.4, passes=1)
    assert 0.25 < found.draft_pass < 0.6 and found.draft_pass == found.commit


def test_the_prompts_commit_is_no_rounds(tmp_path, monkeypatch):
    """The first commit has the whole prompt; what it takes is not held against the rounds that follow."""
    seen = []

    class Recorded(FreeDrafting):
        def observe_drafting(self, commit_seconds, pass_seconds, passes):
            seen.append(commit_seconds)

    monkeypatch.setattr("hf_falcon.core.costs.Costs", Recorded)
    target = TARGETS["llama"]()
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=6)
    target.generate(prompt(40), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert len(seen) > 2 and seen[0] is None and all(seconds > 0 for seconds in seen[1:])


def test_threads_share_costs():
    costs, errors = Costs({0: 1.0, 8: 2.0, 63: 9.0}), []

    def observe(first):
        try:
            for step in range(3000):
                costs.observe_target(1, 0.01)
                costs.observe_target(2 + (7 * step + first) % 60, 0.02)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=observe, args=(number,)) for number in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_a_size_that_looked_dear_is_timed_again():
    """Where no tree runs any more, nothing else would tell that the first one was interrupted."""
    found = timed({0: 1.0, 15: 1.4}, (8, 20.0))
    dear, version = found.target(7)[7], found.version
    for _ in range(2100):
        found.observe_target(1, 1.0)
    assert dear > 3.0 and found.target(7)[7] < 1.4 and found.version > version


def test_one_forward_of_a_batch_is_one_timing(monkeypatch):
    seen = []

    class Recorded(FreeDrafting):
        def observe_target(self, nodes, seconds):
            seen.append(nodes)

    monkeypatch.setattr("hf_falcon.core.costs.Costs", Recorded)
    target = TARGETS["llama"]()
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=6)
    ids = torch.cat([prompt(9, seed=row) for row in range(3)])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    # What the probe runs is no round.
    target.generate(ids, assistant_model=drafter, **options)
    seen.clear()
    forwards = []

    def score(self, *args, stock=TargetRun.score):
        forwards.append(1)
        return stock(self, *args)

    monkeypatch.setattr(TargetRun, "score", score)
    target.generate(ids, assistant_model=drafter, **options)
    # The last forward may be of a row that can draft nothing any more.
    assert len(forwards) - 1 <= len(seen) <= len(forwards) and len(seen) > 2


def test_the_first_block_is_timed_with_the_commit(monkeypatch):
    """A round may have no further pass, and drafts all the same."""
    seen, took = [], 0.02

    class Recorded(FreeDrafting):
        def observe_drafting(self, commit_seconds, pass_seconds, passes):
            seen.append((commit_seconds, passes))

    def logits(self, states, stock=TargetHead.logits):
        time.sleep(took)
        return stock(self, states)

    monkeypatch.setattr("hf_falcon.core.costs.Costs", Recorded)
    monkeypatch.setattr(TargetHead, "logits", logits)
    target = TARGETS["llama"]()
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_draft_passes=1)
    target.generate(prompt(9), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    commits = [seconds for seconds, passes in seen if passes == 0 and seconds is not None]
    assert len(commits) > 2 and min(commits) >= took
