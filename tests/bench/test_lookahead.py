# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Lookahead decoding: its pool, its window, and the texts of plain decoding."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from quick import one_in
from tiny_models import VOCAB, hooks_of, prompt, random_tokens, tiny_target

from hf_falcon.bench import methods
from hf_falcon.bench.lookahead import JacobiWindow, LookaheadBranches, LookaheadDrafter, NgramPool
from hf_falcon.commands.models import load_target

NEW_TOKENS = 40


def test_the_pool_keeps_the_newest():
    pool = NgramPool(3, 2)
    for ngram in ([1, 2, 3], [1, 4, 5], [6, 1, 2], [1, 2, 3], [1, 7, 8]):
        pool.add(ngram)
    # The first one came again after the second, which left.
    assert pool.behind(1) == [(7, 8), (2, 3)]
    assert pool.behind(6) == [(1, 2)] and pool.behind(2) == []


def test_the_window_moves_by_jacobi_steps():
    window = JacobiWindow([10, 11, 12, 13], num_levels=3)
    # The columns end at the newest token, 0, and at each guess: 20 follows 0, 21 follows 10, and so on.
    assert window.step(0, [20, 21, 22, 23, 24]) == []
    # The next token is at the place of 10 and 20. What is left of both levels is behind it.
    assert window.levels == [[11, 12, 13], [21, 22, 23, 24]] and window.columns == 4
    assert window.step(1, [31, 32, 33, 34]) == []
    assert window.levels == [[12, 13], [22, 23, 24], [32, 33, 34]] and window.columns == 3
    # Complete: each column is an n-gram, and its levels move by one.
    assert window.step(2, [42, 43, 44]) == [[2, 22, 32, 42], [12, 23, 33, 43], [13, 24, 34, 44]]
    assert window.levels == [[23, 24], [32, 33, 34], [42, 43, 44]]
    # The last column goes four tokens deep.
    assert window.cut(4) and window.columns == 3
    assert window.cut(3) and window.levels == [[23], [32, 33], [42, 43]]
    assert window.step(3, [53, 54]) == [[3, 32, 42, 53], [23, 33, 43, 54]]
    assert not window.cut(1)


def one_more_than_the_sum(root, found):
    """A target's forward: behind each node it chooses one more than the sum of the node's path, the root included."""
    sums = [root]
    for token, parent in zip(found.token_ids, found.parents):
        sums.append(sums[parent + 1] + token)
    logits = torch.nn.functional.one_hot((torch.tensor(sums) + 1) % VOCAB, VOCAB)[None].float()
    return {"input_ids": torch.tensor([[root, *found.token_ids]])}, SimpleNamespace(logits=logits)


def test_the_targets_choices_fill_window_and_pool():
    branches = LookaheadBranches(window=2, ngram=3, guesses=2)
    branches.extend([7])
    first = branches.find(100, 20)
    assert (first.token_ids, first.parents) == ([7, 7], [-1, 0])
    branches.read(None, (), *one_more_than_the_sum(7, first))
    branches.extend([8])
    # The guess 7, and in columns of their own the choices behind 7, 7 and 7, 7, 7: 15 and 22.
    second = branches.find(100, 20)
    assert (second.token_ids, second.parents) == ([15, 7, 22], [-1, -1, 1])
    branches.read(None, (), *one_more_than_the_sum(8, second))
    branches.extend([9, 8])
    third = branches.find(100, 20)
    # The text's 8, 9, 8, the first column's 8, 15, 24, and the window. The second column's n-gram is 7, 22, 38.
    assert (third.token_ids, third.parents) == ([9, 8, 15, 24, 24, 22, 38], [-1, 0, -1, 2, -1, -1, 5])
    assert set(third.log_probs[:4]) == {0.0} and max(third.log_probs[4:]) < -5
    # A forward of another tree is not read: the window stays.
    arguments, outputs = one_more_than_the_sum(8, third)
    arguments["input_ids"][0, 2] = 3
    branches.read(None, (), arguments, outputs)
    branches.extend([7])
    again = branches.find(100, 20)
    # Of the text, and of the window's second column.
    assert (again.token_ids[:4], again.parents[:4]) == ([8, 9, 22, 38], [-1, 0, -1, 2])
    assert (again.token_ids[2:], again.parents[2:]) == ([22, 38, 24], [-1, 2, -1])


def test_repetitions_come_from_the_pool():
    branches = LookaheadBranches(window=1, ngram=4, guesses=2)
    branches.extend([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 7])
    branches.extend([9, 9, 9, 1])
    found = branches.find(100, 3)
    # The two newest of three, which begin alike.
    assert (found.token_ids, found.parents) == ([2, 6, 7, 3, 5], [-1, 0, 1, 0, 3])
    assert branches.find(100, 2).token_ids == [2, 6, 3]
    assert branches.find(100, 0).token_ids == []


@pytest.mark.parametrize("sizes", [(5, 4, 5), (1, 2, 1), (3, 5, 2)])
def test_no_tree_is_larger_or_deeper_than_allowed(sizes):
    budget = LookaheadDrafter(*sizes).generation_config.num_assistant_tokens
    branches, largest, root = LookaheadBranches(*sizes), 0, 1
    branches.extend([2, 1] * 20)
    for max_depth in (*range(40, -1, -1), 3, *range(30, -1, -1)):
        found = branches.find(budget, max_depth)
        depths = [0]
        for parent in found.parents:
            depths.append(depths[parent + 1] + 1)
        assert max(depths) <= max_depth and len(found.token_ids) <= budget
        # Siblings differ.
        assert len(set(zip(found.parents, found.token_ids))) == len(found.token_ids)
        largest = max(largest, len(found.token_ids))
        branches.read(None, (), *one_more_than_the_sum(root, found))
        root = 1 + max_depth % 2
        branches.extend([root])
    window, ngram, _ = sizes
    assert window * (ngram - 1) - 1 <= largest


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed", "gpt2"])
def test_the_window_sees_what_the_papers_mask_shows(name, monkeypatch):
    """Each choice is that of a plain forward over the text, the first level up to the column, and the column."""
    target, steps, step = tiny_target(name), [], JacobiWindow.step
    branches = []
    monkeypatch.setattr(LookaheadBranches, "__init__", spied(LookaheadBranches.__init__, branches))

    def recorded(self, newest, choices):
        steps.append(([*branches[-1]._text], [[*level] for level in self.levels], choices))
        return step(self, newest, choices)

    monkeypatch.setattr(JacobiWindow, "step", recorded)
    target.generate(prompt(9), assistant_model=LookaheadDrafter(3, 4, 2), max_new_tokens=NEW_TOKENS, do_sample=False)
    assert len(steps) > 10 and {len(levels) for _, levels, _ in steps} == {1, 2, 3}
    for text, (first, *others), choices in steps:
        assert len(choices) == len(first) + 1
        for column, choice in enumerate(choices):
            path = [*text, *first[:column], *(level[column] for level in others)]
            with torch.no_grad():
                assert int(target(torch.tensor([path])).logits[0, -1].argmax()) == choice


def spied(function, calls):
    def wrapped(self, *args):
        calls.append(self)
        return function(self, *args)

    return wrapped


@pytest.mark.parametrize(
    "name, sizes, do_sample",
    one_in(
        2,
        ["llama", "qwen2-mixed", "mistral-window", "gpt2", "llama-dynamic", "bloom", "mamba"],
        [(5, 4, 5), (15, 5, 15), (1, 2, 1)],
        [False, True],
    ),
)
def test_texts_are_plain_decodings(name, sizes, do_sample):
    target = tiny_target(name)

    def generate(**kwargs):
        transformers.set_seed(0)
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": do_sample, "return_dict_in_generate": True}
        return target.generate(prompt(9), **settings, **kwargs)

    drafter = LookaheadDrafter(*sizes)
    output = generate(assistant_model=drafter)
    assert output.sequences.tolist() == generate().sequences.tolist()
    assert hooks_of(target) == 0
    # "mamba" is decoded plainly.
    if name != "mamba":
        assert output.draft_statistics.drafted_tokens > 0
        # The next call begins with an empty pool.
        again = generate(assistant_model=drafter).draft_statistics
        assert again.drafted_tokens == output.draft_statistics.drafted_tokens


def test_rows_and_short_calls_are_plain_decodings():
    target, drafter = tiny_target(), LookaheadDrafter(5, 4, 5)
    for tokens, new in ((random_tokens(2, 9), 12), (prompt(9), 1), (prompt(9), 2), (prompt(1), 12)):
        settings = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True}
        output = target.generate(tokens, assistant_model=drafter, **settings)
        assert output.sequences.tolist() == target.generate(tokens, **settings).sequences.tolist()
        assert (output.draft_statistics.drafted_tokens == 0) == (len(tokens) == 2 or new < 3)


def test_the_hook_leaves_after_an_error():
    target, drafter = tiny_target(), LookaheadDrafter(5, 4, 5)
    with pytest.raises(ValueError, match="`dola_layers`"):
        target.generate(prompt(9), assistant_model=drafter, max_new_tokens=4, dola_layers="high")
    assert hooks_of(target) == 0


def test_the_benchmark_has_it(models):
    found, absent = methods.resolve(["lookahead"], models)
    drafter = found["lookahead"]["assistant_model"]
    assert not absent and isinstance(drafter, LookaheadDrafter) and drafter._sizes == (5, 4, 5)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    output = models.target.generate(prompt(9), **settings, **found["lookahead"])
    assert output.draft_statistics.tau > 0
    on_gpu = methods.Models(SimpleNamespace(device=torch.device("cuda")), {})
    assert methods.resolve(["lookahead"], on_gpu)[0]["lookahead"]["assistant_model"]._sizes == (15, 5, 15)


@pytest.mark.parametrize("name, value", [("window", 0), ("ngram", 1), ("guesses", 0)])
def test_sizes_that_are_too_small(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value}: set it to an integer of at least {value + 1}"):
        LookaheadDrafter(**{"window": 5, "ngram": 4, "guesses": 5, name: value})


@pytest.mark.slow
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_the_demos_target(do_sample):
    try:
        target, tokenizer = load_target(None, dtype="float32", device="cpu")
    except OSError as error:
        pytest.skip(str(error))
    messages = [{"role": "user", "content": "Name three rivers of Europe and say where each of them ends."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def generate(**kwargs):
        transformers.set_seed(0)
        settings = {"max_new_tokens": 48, "do_sample": do_sample, "return_dict_in_generate": True}
        return target.generate(**inputs, **settings, **kwargs)

    output = generate(assistant_model=LookaheadDrafter(5, 4, 5))
    assert output.sequences.tolist() == generate().sequences.tolist()
    assert do_sample or output.draft_statistics.tau > 0.1
