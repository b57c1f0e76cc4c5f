# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Compilers that compile nothing: one that counts, a slow one, a wrong one; and calls of `generate` with them."""

import copy
import time

import torch
from tiny_models import tiny_drafter
from transformers import CompileConfig

NEW_TOKENS = 24


class Backend:
    """A compiler that runs what it is given as it is, and counts what it compiled and ran."""

    def __init__(self):
        self.compiled, self.ran, self.rows = 0, 0, []

    def __deepcopy__(self, memo):
        # Configurations copy what is in them.
        return self

    def __call__(self, graph, inputs):
        self.compiled += 1

        def run(*arguments):
            self.ran += 1
            tensors = [each for each in arguments if torch.is_tensor(each)]
            # Tokens or positions, or hidden states.
            of_rows = [each for each in tensors if each.dim() == (2 if each.dtype == torch.long else 3)]
            self.rows += [each.shape[1] for each in of_rows[:1]]
            return graph.forward(*arguments)

        return run


def slow(graph, inputs):
    """A compiler whose code takes long."""

    def run(*arguments):
        time.sleep(0.01)
        return graph.forward(*arguments)

    return run


def wrong(graph, inputs):
    """A compiler whose code gives other values."""

    def run(*arguments):
        return tuple(each * 1.5 if torch.is_tensor(each) else each for each in graph.forward(*arguments))

    return run


def compiled_by(backend) -> CompileConfig:
    return CompileConfig(backend=backend, mode=None)


def generate(target, tokens, drafter=None, **options):
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return target.generate(tokens, attention_mask=torch.ones_like(tokens), assistant_model=drafter, **options).tolist()


def drafter_of(target, nodes=7):
    drafter = copy.deepcopy(tiny_drafter(target))
    drafter.generation_config.num_assistant_tokens = nodes
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    return drafter
