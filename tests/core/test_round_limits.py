# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What a round may cost: options that are each in range are bounded by their products, and by the time of the call."""

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import new_drafter, prompt, tiny_drafter, tiny_target
from utilities import edit

from hf_falcon import DraftOptions, FalconDraftModel
from hf_falcon.core.draft_session import BlockSession
from hf_falcon.core.tree import ancestor_mask

ABSURD = {"num_assistant_tokens": 4096, "num_draft_passes": 64, "draft_width": 128, "draft_top_k": 256}


@pytest.mark.parametrize(
    "options, block_size, vocab_size, names",
    [
        (ABSURD, 64, 64, ["num_draft_passes", "block_size"]),
        (ABSURD, 16, 64, ["draft_width", "block_size"]),
        ({"draft_width": 128, "num_draft_passes": 2}, 5, 64, ["draft_width", "block_size"]),
        ({"draft_width": 64, "num_draft_passes": 64}, 8, 64, ["num_draft_passes", "draft_width", "block_size"]),
        ({**ABSURD, "num_draft_passes": 32}, 1, 64, ["num_draft_passes", "draft_width", "block_size", "draft_top_k"]),
        ({"num_assistant_tokens": 4096}, 2, 2**17, ["num_assistant_tokens", "vocab_size"]),
        ({"num_assistant_tokens": 4096, "draft_tree": "static"}, 2, 64, ["num_assistant_tokens", "block_size"]),
        ({"num_assistant_tokens": 4096, "verification": "speculative"}, 2, 64, ["num_assistant_tokens", "block_size"]),
        ({"draft_tree": [[rank] for rank in range(4096)]}, 2, 64, ["draft_tree", "block_size"]),
    ],
)
def test_products_are_refused(options, block_size, vocab_size, names):
    """The message names each of the fields, its value and the limit."""
    found = DraftOptions(**options)
    values = {**vars(found), "block_size": block_size, "vocab_size": vocab_size, "draft_tree": 4096}
    with pytest.raises(ValueError, match="set lower values, that make at most") as error:
        found.check_round(block_size, vocab_size)
    assert all(f"`{name}` ({values[name]})" in str(error.value) for name in names)


def test_sensible_options_are_not():
    """The defaults with blocks of any size, and all that pays with some model."""
    for block_size in range(1, 65):
        for tree, verification in itertools.product(("dynamic", "static"), ("exact", "speculative", "multi_root")):
            DraftOptions(draft_tree=tree, verification=verification).check_round(block_size, 262_144)
    for block_size, nodes, passes, width, top_k in itertools.product((1, 2, 4), (60, 256), (3, 8), (8, 32), (10, 32)):
        options = DraftOptions(nodes, num_draft_passes=passes, draft_width=width, draft_top_k=top_k)
        options.check_round(block_size, 151_936)
    # Of a drafter with one pass the width costs little.
    DraftOptions(num_draft_passes=1, draft_width=32).check_round(32, 151_936)


def test_with_the_drafter_and_with_the_call(tmp_path):
    """A file is refused when it is read, and the options of a call before the target runs."""
    target, drafter = tiny_target("llama"), tiny_drafter(tiny_target("llama"))
    with pytest.raises(ValueError, match=r"`draft_width` \(128\) times `draft_top_k`|`draft_top_k` \(256\)"):
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=4, **{**ABSURD, "num_draft_passes": 16})
    drafter.save_pretrained(tmp_path)
    edit(tmp_path / "generation_config.json", **ABSURD)
    with pytest.raises(ValueError, match=r"`num_draft_passes` \(64\) times `draft_width` \(128\)"):
        FalconDraftModel.from_pretrained(tmp_path)


def test_trees_of_ones_own(tmp_path):
    """A tree whose levels are too wide for one pass."""
    target, drafter = tiny_target("llama"), tiny_drafter(tiny_target("llama"), block_size=2)
    wide = [[rank] for rank in range(40)] + [[rank, each] for rank in range(40) for each in range(9)]
    wide += [[rank, each, 0] for rank in range(40) for each in range(9)]
    with pytest.raises(ValueError, match=r"in a level of `draft_tree` \(360\) times `block_size` \(2\) makes 720 "):
        target.generate(prompt(5), assistant_model=drafter, max_new_tokens=9, draft_tree=wide)


LARGEST = """
import resource, time
from tiny_models import new_drafter, prompt, tiny_target
from hf_falcon import DraftOptions
target = tiny_target("llama")
settings = {"max_new_tokens": 1200, "pad_token_id": 0, "do_sample": False, "max_time": 1.0}
settings |= {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
for block_size, options in (
    (1, {"num_assistant_tokens": 4096, "num_draft_passes": 32, "draft_width": 128, "draft_top_k": 64}),
    (64, {"num_assistant_tokens": 4096, "num_draft_passes": 8, "draft_width": 8, "draft_top_k": 64}),
    (1, {"num_assistant_tokens": 4096, "draft_tree": "static", "draft_top_k": 8, "num_draft_passes": 64}),
):
    DraftOptions(**options).check_round(block_size, 64)
    drafter = new_drafter(target, block_size=block_size)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    target.generate(prompt(5), assistant_model=drafter, **options, **settings)
    print(time.monotonic() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


def test_the_largest_rounds():
    """All that the limits allow: bounded memory, and soon over once the time of the call is."""
    environment = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LARGEST]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    found = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert len(found) == 3 and all(seconds < 60 and gigabytes < 1.0 for seconds, gigabytes in found), found


class Clock:
    """The time that the criterion of `max_time` reads."""

    now = 0.0

    def time(self):
        return self.now


@pytest.mark.parametrize("verification", ["exact", "speculative", "multi_root"])
@pytest.mark.parametrize("rows", [1, 2])
def test_time_is_asked_between_passes(monkeypatch, verification, rows):
    """A pass that takes longer than the call may is the last of its round, and the next token the last of the text."""
    clock, passes, extend = Clock(), [], BlockSession.extend

    def slow(self, drafted):
        passes.append(clock.now)
        clock.now += 100.0
        return extend(self, drafted)

    monkeypatch.setattr("transformers.generation.stopping_criteria.time", clock)
    monkeypatch.setattr(BlockSession, "extend", slow)
    target, ids = tiny_target("llama"), prompt(12).repeat(rows, 1)
    drafter = tiny_drafter(target, verification=verification)
    sampled = {"do_sample": verification != "exact"}
    options = {"max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": 63, **sampled}
    torch.manual_seed(0)
    expected = target.generate(ids, **options)
    torch.manual_seed(0)
    found = target.generate(ids, assistant_model=drafter, max_time=250.0, **options)
    assert passes == [0.0, 100.0, 200.0][: len(passes)] and len(passes) == 3
    # The round that was late gives one token; the rounds before it are as long as any.
    length = found.shape[1]
    assert 12 < length < ids.shape[1] + options["max_new_tokens"]
    if verification == "exact" or rows > 1:
        assert found.tolist() == expected[:, :length].tolist()


def test_no_time_limit_asks_nothing(monkeypatch):
    """Another criterion is not asked between passes: it may count its calls."""
    target, drafter = tiny_target("llama"), tiny_drafter(tiny_target("llama"))
    asked = []

    def criterion(ids, scores, **kwargs):
        asked.append(ids.shape[1])
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    target.generate(prompt(5), assistant_model=drafter, max_new_tokens=9, stopping_criteria=[criterion])
    assert asked == list(range(6, 15))


@st.composite
def trees(draw):
    nodes = draw(st.integers(1, 40))
    parents = [0] + [draw(st.integers(max(0, node - 4), node - 1)) for node in range(1, nodes)]
    depths = [0]
    for node in range(1, nodes):
        depths.append(depths[parents[node]] + 1)
    return parents, depths, draw(st.integers(0, 5))


@given(trees())
@settings(max_examples=80, deadline=None)
def test_ancestors_are_those_of_a_walk(tree):
    parents, depths, more = tree
    expected = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        above = node
        while not expected[node, above]:
            expected[node, above] = True
            above = parents[above]
    assert torch.equal(ancestor_mask(torch.tensor(parents), max(depths) + more), expected)


OPTIONS = st.fixed_dictionaries(
    {
        "num_assistant_tokens": st.sampled_from([1, 7, 300, 4096]),
        "num_draft_passes": st.integers(1, 64),
        "draft_width": st.integers(1, 128),
        "draft_top_k": st.integers(1, 256),
        "draft_tree": st.sampled_from(["dynamic", "static"]),
        "prompt_lookup_num_tokens": st.sampled_from([0, 32, 4096]),
        "num_assistant_tokens_schedule": st.just("constant"),
    }
)


@given(OPTIONS, st.sampled_from([1, 2, 16, 64]))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_options_work_or_are_refused(options, block_size):
    target = tiny_target("llama")
    settings = {"max_new_tokens": 5, "pad_token_id": 0, "do_sample": False}
    drafter = new_drafter(target, block_size=block_size, num_lstm_layers=0)
    try:
        found = target.generate(prompt(12), assistant_model=drafter, **options, **settings)
    except ValueError as error:
        assert "set lower values" in str(error)
    else:
        assert found.tolist() == target.generate(prompt(12), **settings).tolist()
