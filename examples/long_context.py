# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Prints the time of a round and of a plain step, and of the parts of a round, by the length of the context.

    OMP_NUM_THREADS=2 python examples/long_context.py --dtype float32

A plain step is transformers' own: one token over a `DynamicCache`. All are timed in turns; the shortest time of each
counts, as other work of the machine only adds to it. Less than a minute on two cores.
"""

import argparse
import time
from collections import defaultdict
from contextlib import ExitStack

import torch
from transformers import DynamicCache

from hf_falcon import packed_weights
from hf_falcon.commands.models import load_drafter, load_target
from hf_falcon.core.candidate_generator import FalconCandidateGenerator
from hf_falcon.core.draft_options import DraftOptions
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.core.target_run import TargetRun
from hf_falcon.cpu import compiled_rounds

PARTS = ("commit", "draft", "score", "keep")
# Rows that every round is taken to keep: the root and one draft token.
KEPT = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="drafter, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--dtype", default="float32", help="dtype of both")
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 1024, 4096], help="tokens of context")
    parser.add_argument("--nodes", type=int, default=8, help="draft nodes of a tree")
    parser.add_argument("--passes", type=int, default=3, help="draft passes of a round")
    parser.add_argument("--turns", type=int, default=20, help="number of measurements")
    parser.add_argument("--pack", action="store_true", help="pack the weights of both, for plain steps too")
    parser.add_argument("--compile", action="store_true", help="compile the rounds, for trees of that size")
    parser.add_argument(
        "--cpu_time", action="store_true", help="this thread's time on the processor, for busy machines"
    )
    arguments = parser.parse_args()
    target, _ = load_target(arguments.target, arguments.dtype)
    drafter = load_drafter(arguments.drafter, arguments.dtype)
    drafter.generation_config.num_assistant_tokens = arguments.nodes
    drafter.generation_config.num_draft_passes = arguments.passes
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    with torch.no_grad(), ExitStack() as stack:
        if arguments.pack:
            stack.enter_context(packed_weights(target, drafter))
        if arguments.compile:
            stack.enter_context(compiled_rounds(target, (1 + arguments.nodes,), drafter=drafter))
        contexts = [Context(target, drafter, length) for length in arguments.lengths]
        for _ in range(arguments.turns):
            for context in contexts:
                context.turn(clock)
    print(
        f"{'context':>7} {'plain':>7} {'round':>7} {'round/plain':>11}   " + " ".join(f"{part:>7}" for part in PARTS)
    )
    for context in contexts:
        best = {part: 1000 * min(seconds) for part, seconds in context.seconds.items()}
        took = sum(best[part] for part in PARTS)
        parts = " ".join(f"{best[part]:7.2f}" for part in PARTS)
        print(f"{context.length:7} {best['plain']:7.1f} {took:7.1f} {took / best['plain']:11.2f}   {parts}   (ms)")


class Context:
    """A target and a drafter after `length` tokens."""

    def __init__(self, target, drafter, length):
        self.length = length
        self.seconds = defaultdict(list)
        self._target = target
        self._ids = torch.zeros(1, length, dtype=torch.long, device=target.device)
        self._cache = filled_cache(target, length)
        # With a mask of all tokens `generate` knows that only the last one is not in the cache yet.
        kwargs = {CACHE_NAME: filled_cache(target, length - 1), "attention_mask": torch.ones_like(self._ids)}
        self._run = TargetRun(target, self._ids, target.generation_config, kwargs)
        _, [prompt] = self._run.prefill(self._ids)
        features = prompt.features.expand(1, length, -1)
        self._features = features[:, -KEPT:]
        options = DraftOptions.from_generation_config(drafter.generation_config)
        self._generator = FalconCandidateGenerator(drafter, target, options)
        self._generator.commit(features, self._ids)

    def turn(self, clock):
        """Times one plain step, which is undone, and one round, whose tokens stay in the cache."""
        root, seconds = self._ids[:, -1:], self.seconds
        start = clock()
        self._target(root, use_cache=True, **{CACHE_NAME: self._cache})
        seconds["plain"].append(clock() - start)
        self._cache.crop(-1)
        times = [clock()]
        self._generator.commit(self._features, self._ids[:, -KEPT:])
        times.append(clock())
        tree = self._generator.propose(root, self._generator.max_depth)
        times.append(clock())
        self._run.score([tree], [self._ids])
        times.append(clock())
        # Some path that is not the first rows: rows are moved.
        self._run.accept([torch.tensor([0, len(tree) - 1])])
        times.append(clock())
        for part, begin, end in zip(PARTS, times, times[1:]):
            seconds[part].append(end - begin)


def filled_cache(target, length):
    """A cache that holds one token `length` times: the time does not depend on its content."""
    cache = DynamicCache(config=target.config)
    target(torch.zeros(1, 1, dtype=torch.long, device=target.device), use_cache=True, **{CACHE_NAME: cache})
    for layer in cache.layers:
        layer.keys, layer.values = (states.repeat(1, 1, length, 1) for states in (layer.keys, layer.values))
    return cache


if __name__ == "__main__":
    main()
