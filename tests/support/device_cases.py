# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Devices of tests: a simulated accelerator, or CUDA; modes of decoding there, and what a round asks of the device."""

import contextlib
import itertools
from typing import Any

import pytest
import simulated_device
import torch
from utilities import changes_nothing

NEW_TOKENS = 10
CHAIN = [[0], [0, 0], [0, 0, 0], [1], [1, 0]]


class Simulated:
    """The simulated device, as the tests use it."""

    name = "sim"
    count = 2

    def __init__(self) -> None:
        self._context = contextlib.ExitStack()

    def __enter__(self) -> "Simulated":
        self.counts = self._context.enter_context(simulated_device.device())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._context.close()

    def put(self, model: Any, place: int = 0) -> Any:
        return simulated_device.move(model, f"sim:{place}")

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return simulated_device.on_device(tensor)

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return simulated_device.on_host(tensor)


class Cuda:
    """CUDA devices, as the tests use them."""

    name = "cuda"

    def __init__(self) -> None:
        self.count = torch.cuda.device_count()
        if self.count == 0:
            pytest.skip("needs a CUDA device")

    def __enter__(self) -> "Cuda":
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def put(self, model: Any, place: int = 0) -> Any:
        return model.to(f"cuda:{place}")

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda()

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()


def generate(device, target, ids, seed=0, **settings):
    torch.manual_seed(seed)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, **settings}
    return target.generate(device.tensor(ids), **settings)


def check(device, target, drafter, ids, assisted: bool = True, **settings) -> None:
    """The text with the drafter is the text without it, and drafts were verified."""
    plain = {name: value for name, value in settings.items() if name not in type(drafter).draft_option_names}
    expected = generate(device, target, ids, **plain)
    found = generate(device, target, ids, assistant_model=drafter, **settings)
    assert device.host(found.sequences).tolist() == device.host(expected.sequences).tolist()
    assert (found.draft_statistics is not None) is assisted
    if assisted:
        assert found.draft_statistics.drafted_tokens > 0


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "adaptive": {"num_assistant_tokens_schedule": "heuristic", "max_new_tokens": 20},
    "prompt lookup": {"prompt_lookup_num_tokens": 8},
    "bonuses": {"context_bonuses": [0.5, 1.0, 2.0]},
    "sampled": {"do_sample": True},
    "warped": {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.9},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4, "eos_token_id": [5, 9]},
    "criteria": {"eos_token_id": [17, 33], "pad_token_id": 0, "max_time": 600.0, "stop_strings": ["ab", "c"]},
    "static tree": {"draft_tree": "static"},
    "own tree": {"draft_tree": CHAIN},
    "dictionaries": {"output_scores": True, "output_logits": True, "output_hidden_states": True},
    "several sequences": {"do_sample": True, "num_return_sequences": 3},
    "static cache": {"cache_implementation": "static"},
    "threshold": {"assistant_confidence_threshold": 0.3},
}


def rounds(target, drafter, ids, **settings) -> list[tuple[int, int]]:
    """
    Synchronisations and launches beside the target's forwards, of each round after the first two. A round in which a
    row of the batch ends is left out: the rest of the batch gets a new policy, which compares the target's weights.
    """
    seen = []
    settings = {"do_sample": False, "assistant_model": drafter, "max_new_tokens": 20, **settings}
    with simulated_device.device() as counts, counts.leave_out(target) if drafter else contextlib.nullcontext():
        # The first call of a kind probes the target.
        target.generate(simulated_device.on_device(ids), **{**settings, "max_new_tokens": 1})
        hook = target.register_forward_pre_hook(
            changes_nothing(
                lambda model, args, inputs: seen.append(
                    (counts.syncs.total(), counts.launches, len(inputs["input_ids"]))
                )
            ),
            with_kwargs=True,
        )
        torch.manual_seed(0)
        target.generate(simulated_device.on_device(ids), **settings)
    hook.remove()
    pairs = list(itertools.pairwise(seen))[2:]
    found = [(after[0] - before[0], after[1] - before[1]) for before, after in pairs if after[2] == before[2]]
    assert len(found) > 3
    return found
