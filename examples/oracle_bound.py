# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Compares the speed-up of a drafter that is always right with the bound of its costs, and prints the time by part.

    OMP_NUM_THREADS=2 python examples/oracle_bound.py --dtype bfloat16

The drafter runs all its passes, but the true next tokens are put among its candidates, so every round emits the depth
of its tree and one token more. T(n), the target's forward over the tree, and the drafting of a round are timed on
their own; a round cannot take less than their sum, which is the bound. All are timed in turns; the shortest time of
each counts, as other work of the machine only adds to it. About two minutes on two cores.
"""

import argparse
import time
from collections import defaultdict
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from hf_falcon.commands.models import load_drafter, load_target
from hf_falcon.core import decoding
from hf_falcon.core.candidate_generator import FalconCandidateGenerator
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.core.target_run import TargetRun
from hf_falcon.core.tree import chain

PROMPTS = (
    "Why is the sky blue, and why is it red in the evening?",
    "Write a Python function that counts the words of a file.",
    "Tom has three boxes with twelve eggs each and sells half of them. How many eggs are left? Explain each step.",
)


class Oracle(FalconCandidateGenerator):
    """Runs all passes of the drafter, and puts the true next tokens first among the candidates."""

    truth: torch.Tensor

    def draft(self, input_ids, *args, **kwargs):
        self._place = input_ids.shape[1]
        return super().draft(input_ids, *args, **kwargs)

    def _candidates(self, states):
        log_probs, token_ids = super()._candidates(states)
        levels = states.shape[1] if states.dim() == 3 else 1
        # Behind the truth's end anything will do.
        true = torch.nn.functional.pad(self.truth[self._place : self._place + levels], (0, levels))[:levels]
        self._place += levels
        true = true[:, None] if states.dim() == 3 else true
        first, others = token_ids[..., :1], token_ids[..., 1:]
        others.copy_(torch.where(others == true, first, others))
        first.copy_(true)
        log_probs[..., 0] = 0.0
        return log_probs, token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="drafter, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--dtype", default="float32", help="dtype of both")
    parser.add_argument("--nodes", type=int, default=8, help="draft nodes of a tree")
    parser.add_argument("--passes", type=int, default=3, help="draft passes of a round")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of a call")
    parser.add_argument("--turns", type=int, default=5, help="number of measurements")
    parser.add_argument("--profile", action="store_true", help="also print a profile of one call's operators")
    arguments = parser.parse_args()
    target, tokenizer = load_target(arguments.target, arguments.dtype)
    drafter = load_drafter(arguments.drafter, arguments.dtype)
    target.generation_config.eos_token_id = None
    options = drafter.generation_config
    options.num_assistant_tokens, options.num_draft_passes = arguments.nodes, arguments.passes
    options.num_assistant_tokens_schedule, options.prompt_lookup_num_tokens = "constant", 0
    depth = arguments.passes * drafter.config.block_size
    new_tokens = 1 + arguments.rounds * (depth + 1)
    with torch.no_grad(), mock.patch.object(decoding, "FalconCandidateGenerator", Oracle):
        calls = [Call(target, drafter, tokenizer, text, new_tokens) for text in PROMPTS]
        for _ in range(arguments.turns):
            for call in calls:
                call.turn()
        print(
            f"{'plain':>7} {'T(n)':>7} {'drafting':>8} {'round':>7} {'other':>6}   bound speed-up ratio   (ms a round)"
        )
        for call in calls:
            call.report(depth, arguments.rounds)
        if arguments.profile:
            calls[0].profile()


class Call:
    """One prompt, and the seconds of each part."""

    def __init__(self, target, drafter, tokenizer, text, new_tokens):
        self._target, self._drafter, self._new_tokens = target, drafter, new_tokens
        self._seconds = defaultdict(list)
        chat = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        self._ids = inputs["input_ids"].to(target.device)
        self._truth = self._settle(self._generate(new_tokens).sequences)
        # Halfway, as the mean of all rounds.
        length = (self._ids.shape[1] + self._truth.shape[1]) // 2
        self._run, self._generator = self._part_by_part(self._truth[:, :length])

    def turn(self):
        """Times all parts once."""
        self._time("plain", lambda: self._generate(self._new_tokens))
        self._time("plain_prompt", lambda: self._generate(1))
        Oracle.truth = self._truth[0].to(self._drafter.device)
        output = self._time("assisted", lambda: self._generate(self._new_tokens, assistant_model=self._drafter))
        self.statistics = output.draft_statistics
        self._seconds["other"].append(self.statistics.time["other"])
        output = self._time("assisted_prompt", lambda: self._generate(1, assistant_model=self._drafter))
        self._seconds["other_prompt"].append(output.draft_statistics.time["other"])
        for _ in range(4):
            self._time("target", self._score)
            self._time("drafting", self._draft)

    def _score(self):
        """A forward of the target over a tree, of which the root is kept."""
        tokens = torch.zeros(1 + self._drafter.generation_config.num_assistant_tokens, dtype=torch.long)
        self._run.score([chain(tokens)], [torch.zeros(1, self._run.length + 1, dtype=torch.long)])
        self._run.accept([torch.arange(1)])

    def report(self, depth, rounds):
        """Prints a line, in milliseconds of a round."""
        best = {name: 1000 * min(seconds) for name, seconds in self._seconds.items()}
        plain = (best["plain"] - best["plain_prompt"]) / (self._new_tokens - 1)
        took = (best["assisted"] - best["assisted_prompt"]) / rounds
        other = (best["other"] - best["other_prompt"]) / rounds
        tokens = (self._new_tokens - 1) / self.statistics.rounds
        bound = (depth + 1) * plain / (best["target"] + best["drafting"])
        speedup = (self._new_tokens - 1) / rounds * plain / took
        print(
            f"{plain:7.1f} {best['target']:7.1f} {best['drafting']:8.1f} {took:7.1f} {other:6.2f}   "
            f"{bound:5.2f} {speedup:8.2f} {speedup / bound:5.2f}   {tokens:.2f} of {depth + 1} tokens a round, "
            f"{100 * other / took:.1f} % outside target and drafter"
        )

    def profile(self):
        """Prints the time of each operator in one call, by part."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self._generate(self._new_tokens, assistant_model=self._drafter)
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=45))

    def _generate(self, new_tokens, **kwargs):
        return self._target.generate(
            self._ids, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, **kwargs
        )

    def _settle(self, truth):
        """The output of decoding with trees: in bfloat16 it may diverge from plain decoding's at near-ties."""
        while True:
            Oracle.truth = truth[0].to(self._drafter.device)
            found = self._generate(self._new_tokens, assistant_model=self._drafter).sequences
            if found.equal(truth):
                return truth
            truth = found

    def _part_by_part(self, ids):
        """The target and the drafter after `ids`."""
        kwargs = {CACHE_NAME: DynamicCache(config=self._target.config), "use_cache": True}
        run = TargetRun(self._target, ids, self._target.generation_config, kwargs)
        _, [prompt] = run.prefill(ids[:, :-1])
        self._features = prompt.features
        generator = FalconCandidateGenerator(self._drafter, self._target)
        generator.commit(self._features, ids[:, 1:])
        self._root = ids[:, -1:]
        self._accepted = generator.max_depth + 1
        return run, generator

    def _draft(self):
        """The drafting of one round, after a path of full depth was accepted."""
        tokens = self._root.expand(1, self._accepted)
        self._generator.commit(self._features[:, -self._accepted :], tokens)
        self._generator.propose(self._root, self._generator.max_depth)

    def _time(self, name, function):
        start = time.perf_counter()
        result = function()
        self._seconds[name].append(time.perf_counter() - start)
        return result


if __name__ == "__main__":
    main()
