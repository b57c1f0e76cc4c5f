# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Threads that share a drafter, and calls that fail: what is used again is as good as new."""

import copy
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from quick import one_in
from tiny_models import hooks_of, new_target, prompt, tiny_drafter, tiny_target
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer
from utilities import changes_nothing

import hf_falcon
from hf_falcon.core import caches
from hf_falcon.cpu.packing import is_packed

ADAPTIVE = {"num_assistant_tokens_schedule": "heuristic", "prompt_lookup_num_tokens": 8}


def generate(target, ids, **kwargs):
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, **kwargs})


@pytest.mark.parametrize(
    "schedule", [pytest.param({}, marks=pytest.mark.slow), ADAPTIVE], ids=["constant", "adaptive"]
)
def test_threads_share_a_drafter_of_several_targets(schedule, tmp_path, monkeypatch):
    """Nothing is known at first: all of them measure, keep what they measured, and learn from each other."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    targets = [new_target("llama", seed=seed) for seed in (0, 7)]
    drafter = tiny_drafter(targets[0], **schedule)
    prompts = [prompt(length, seed=length) for length in (3, 12, 25)]
    work = [(target, ids) for target in range(2) for ids in range(3)]
    expected = {job: generate(targets[job[0]], prompts[job[1]]).tolist() for job in work}
    failures: list[object] = []
    start = threading.Barrier(4)

    def run(number: int) -> None:
        start.wait()
        for job in [*work[number:], *work[:number]] * 2:
            try:
                found = generate(targets[job[0]], prompts[job[1]], assistant_model=drafter).tolist()
                if found != expected[job]:
                    failures.append((job, found))
            except Exception as error:
                failures.append((job, error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(map(hooks_of, targets)) == 0


class Breaks(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Something of the user's that raises at its n-th call, or a module's hook that does."""

    def __init__(self, calls: int, error: type[BaseException], answer=None):
        self.calls, self.error, self.answer = calls, error, answer

    def __call__(self, *args, **kwargs):
        self.calls -= 1
        if self.calls == 0:
            raise self.error("broken off")
        return self.answer(*args) if self.answer else None

    put = __call__

    def end(self):
        pass


def keep_scores(ids, scores):
    return scores


def never(ids, scores):
    return torch.zeros(ids.shape[0], dtype=torch.bool)


# "measuring" is the first call of all, which times the target.
PLACES = ("processor", "criterion", "streamer", "target", "drafter", "measuring")


@pytest.mark.parametrize(
    "name, place, packed", one_in(4, ["llama", "mistral-window", "gemma2", "phi3-window"], PLACES, [False, True])
)
def test_what_a_failure_leaves(name, place, packed, monkeypatch, tmp_path):
    """A chat goes on from the cache of a call that failed; target, drafter and hook are as before."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    target, ids = tiny_target(name), prompt(12)
    drafter = tiny_drafter(target, **(ADAPTIVE if place == "measuring" else {}))
    whole = generate(target, ids)
    error = KeyboardInterrupt if place in ("streamer", "criterion") else torch.OutOfMemoryError
    cache = DynamicCache(config=target.config)
    given, handles = {"past_key_values": cache}, []
    # The first call of a kind probes the target.
    with hf_falcon.packed_weights(target, drafter) if packed else nullcontext():
        generate(target, ids, assistant_model=drafter, past_key_values=copy.deepcopy(cache), max_new_tokens=1)
    if place == "processor":
        given["logits_processor"] = [Breaks(9, error, keep_scores)]
    elif place == "criterion":
        given["stopping_criteria"] = [Breaks(9, error, never)]
    elif place == "streamer":
        given["streamer"] = Breaks(9, error)
    else:
        module, calls = (drafter.norm, 4) if place == "drafter" else (target.get_decoder().layers[-1], 3)
        handles.append(module.register_forward_pre_hook(changes_nothing(Breaks(calls, error))))
    with pytest.raises(error, match="broken off"):
        if packed:
            with hf_falcon.packed_weights(target, drafter):
                generate(target, ids, assistant_model=drafter, **given)
        else:
            generate(target, ids, assistant_model=drafter, **given)
    for handle in handles:
        handle.remove()
    assert hooks_of(target) == hooks_of(drafter) == 0
    assert not is_packed(target) and not is_packed(drafter)
    # The prompt and what was accepted since, but for the newest token.
    kept = cache.get_seq_length()
    assert {layer.get_seq_length() for layer in cache.layers} == {kept} and 12 <= kept < whole.shape[1]
    assert {type(layer).__module__ for layer in cache.layers} == {"transformers.cache_utils"}
    rest = {"max_new_tokens": whole.shape[1] - kept - 1, "past_key_values": cache}
    begun = whole[:, : kept + 1]
    if not packed:
        # Packed float32 weights round otherwise, so this text could be another one.
        assert generate(target, begun, assistant_model=drafter, **rest).tolist() == whole.tolist()
    assert generate(target, ids, assistant_model=drafter).tolist() == whole.tolist()


@pytest.mark.parametrize("fails_at", [2, 3, 7, 8])
def test_memory_that_runs_out_where_a_cache_grows(fails_at, monkeypatch):
    """While the layers are taken over, and later; the caller's cache and a retry are as before."""
    target, ids, cache = tiny_target("llama"), prompt(12), DynamicCache(config=tiny_target("llama").config)
    drafter, whole = tiny_drafter(target), generate(target, ids)
    generate(target, ids, assistant_model=drafter, max_new_tokens=1)
    monkeypatch.setattr(caches, "_SPARE", 8)
    stock, calls = torch.Tensor.new_empty, []

    def short(self, *args, **kwargs):
        if sys._getframe(1).f_code is caches.SlotBuffer.reserve.__code__:
            calls.append(None)
            if len(calls) == fails_at:
                raise torch.OutOfMemoryError("too little")
        return stock(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", short)
        with pytest.raises(torch.OutOfMemoryError, match="too little"):
            generate(target, ids, assistant_model=drafter, past_key_values=cache)
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    done = cache.get_seq_length()
    assert done > 0
    known = whole[:, : done + 1]
    left = whole.shape[1] - known.shape[1]
    found = generate(target, known, assistant_model=drafter, past_key_values=cache, max_new_tokens=left)
    assert found.tolist() == whole.tolist()
