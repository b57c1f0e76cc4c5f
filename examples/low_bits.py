# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Prints what weights of 8 and 4 bits cost on a CPU, and whether a drafter pays with them: the time of a forward pass by
its tokens, whether rows depend on each other, what the probe says, and the speed of plain and of drafted decoding.

    python examples/low_bits.py --data mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --limit 2

Hardware: 2 CPU cores
Minutes: 2
Expected: fewer bits take less time for a few tokens, and a drafter then pays less

The linear layers of the decoder's layers are replaced, but for those whose number of inputs is no multiple of 32. The
products are torch's own; with `--torchao`, those of torchao's weights are measured as well. All are timed in turns.
"""

import argparse
import copy
import time
from collections import defaultdict
from statistics import median

import torch
from torch import nn
from transformers import DynamicCache

from hf_falcon import compile_rounds, pack_weights
from hf_falcon.bench.prompts import read_turns
from hf_falcon.bench.tables import aligned
from hf_falcon.commands.models import encode, load_drafter, load_target
from hf_falcon.core.probe import probe
from hf_falcon.core.target_parts import CACHE_NAME, decoder_layers
from hf_falcon.core.target_run import TargetRun
from hf_falcon.core.tree import chain

# Inputs that share a scale and an offset, in 4 bits.
GROUP = 32


class Int8Linear(nn.Module):
    """A linear layer with weights of 8 bits, and a scale for each output. Its inputs stay as they are."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("weight", (weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales[:, 0].to(linear.weight.dtype))

    def forward(self, states):
        rows = states.reshape(-1, self.in_features)
        return added(torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scales), self.bias, states)


class Int4Linear(nn.Module):
    """A linear layer with weights of 4 bits, and a scale and an offset for each group of inputs of an output."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        groups = linear.weight.detach().float().unflatten(1, (-1, GROUP))
        low, high = groups.aminmax(dim=2)
        scales = (high - low).clamp(min=1e-9) / 15
        values = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, 15).flatten(1).to(torch.int32)
        # The second argument is for GPUs.
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 2))
        # The product takes what the value 8 stands for as the offset. Shape `(groups, out_features, 2)`.
        both = torch.stack((scales, low + 8 * scales), dim=2).transpose(0, 1).contiguous()
        self.register_buffer("scales", both.to(linear.weight.dtype))

    def forward(self, states):
        rows = states.reshape(-1, self.in_features)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, GROUP, self.scales)
        return added(product, self.bias, states)


LAYERS = {8: Int8Linear, 4: Int4Linear}


def added(product, bias, states):
    """Rows of outputs with the bias, in the shape of the inputs."""
    product = product if bias is None else product + bias
    return product.reshape(*states.shape[:-1], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument(
        "--drafter", help="its drafter; if left out the demo's, or lookup, prompt lookup alone, with --target"
    )
    parser.add_argument("--dtype", default="bfloat16", help="dtype of all that is not quantised")
    parser.add_argument("--bits", nargs="+", type=int, choices=sorted(LAYERS), default=[8, 4])
    parser.add_argument("--torchao", action="store_true", help="measure torchao's weights of as many bits as well")
    parser.add_argument("--compact", action="store_true", help="measure float32, packed and compiled, as well")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16], help="tokens of a forward pass")
    parser.add_argument("--length", type=int, default=128, help="tokens of context")
    parser.add_argument("--turns", type=int, default=9, help="number of measurements")
    parser.add_argument("--data", nargs="+", default=[], help="JSON-lines files; their first turns are the prompts")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    arguments = parser.parse_args()
    target, tokenizer = load_target(arguments.target, arguments.dtype, "cpu")
    source = arguments.drafter or ("lookup" if arguments.target else None)
    drafter = load_drafter(source, arguments.dtype, "cpu", target)
    targets = variants(arguments, target)
    with torch.no_grad():
        for name, each in targets.items():
            print(f"{name}: the probe says {said(each)}; a row beside 7 others has {share(each):.1%} other values")
        print(table(round_times(arguments, targets), arguments.tokens))
    decoded = [name for name, each in targets.items() if each.dtype == target.dtype]
    prompts = [turns[0] for file in arguments.data for turns in read_turns(file, arguments.limit)]
    if prompts:
        inputs = [encode(tokenizer, prompt, target.device) for prompt in prompts]
        print()
        print(speeds(arguments, {name: targets[name] for name in decoded}, drafter, inputs))


def variants(arguments, target):
    """The target as it is, and copies of it with other weights, by name."""
    found = {arguments.dtype: target}
    for bits in arguments.bits:
        found[f"{bits} bits"] = replaced(target, LAYERS[bits])
        if arguments.torchao:
            found[f"{bits} bits, torchao"] = by_torchao(target, bits)
    if arguments.compact:
        compact = copy.deepcopy(target).float()
        pack_weights(compact)
        compile_rounds(compact, tuple(arguments.tokens))
        found["float32, compact"] = compact
    return found


def replaced(target, kind):
    """A copy of a target whose decoder layers have layers of that kind where they had linear ones."""
    copied = copy.deepcopy(target)
    for layer in decoder_layers(copied):
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear) and module.in_features % GROUP == 0:
                layer.set_submodule(name, kind(module))
    return copied


def by_torchao(target, bits):
    """A copy of a target whose decoder layers torchao quantised."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    copied = copy.deepcopy(target)
    if bits == 8:
        config = Int8WeightOnlyConfig()
    else:
        # torchao's `Int4WeightOnlyConfig` has no products for CPUs; this one has.
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        config = PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    for layer in decoder_layers(copied):
        quantize_(layer, config)
    return copied


def said(target):
    """What the probe finds that the target takes in a round."""
    given = {"attention_mask": torch.ones(1, 1), CACHE_NAME: DynamicCache(config=target.config)}
    verdict = probe(target, 1, target.generation_config, given)
    return verdict.way if verdict.reason is None else f"{verdict.way}: {verdict.reason}"


def share(target):
    """The share of values that a row has otherwise beside 7 others than alone, in the linear layers of a decoder."""
    generator, others, values = torch.Generator().manual_seed(0), 0, 0
    for module in decoder_layers(target)[0].modules():
        if hasattr(module, "in_features"):
            rows = torch.randn(8, module.in_features, generator=generator).to(target.dtype)
            alone, beside = module(rows[:1]), module(rows)[:1]
            others, values = others + int((alone != beside).sum()), values + alone.numel()
    return others / values


def round_times(arguments, targets):
    """Medians of the milliseconds of a round's forward pass, by target and number of tokens."""
    runs = {name: Rounds(target, arguments.length) for name, target in targets.items()}
    seconds = defaultdict(list)
    # The first turn chooses kernels.
    for turn in range(1 + arguments.turns):
        for name, rounds in runs.items():
            for tokens in arguments.tokens:
                took = rounds.forward(tokens)
                if turn:
                    seconds[name, tokens].append(took)
    return {name: [1000 * median(seconds[name, tokens]) for tokens in arguments.tokens] for name in targets}


class Rounds:
    """A target after a context of `length` tokens, which scores chains and keeps the first token of each."""

    def __init__(self, target, length):
        self._ids = torch.zeros(1, length, dtype=torch.long)
        kwargs = {
            CACHE_NAME: DynamicCache(config=target.config),
            "attention_mask": torch.ones_like(self._ids),
            "use_cache": True,
        }
        self._run = TargetRun(target, self._ids, target.generation_config, kwargs)
        self._run.prefill(self._ids)

    def forward(self, tokens):
        """Seconds of a forward pass over that many tokens."""
        self._ids = torch.cat((self._ids, self._ids[:, -1:]), dim=1)
        start = time.perf_counter()
        self._run.score([chain(self._ids[0, -1:].repeat(tokens))], [self._ids])
        seconds = time.perf_counter() - start
        self._run.accept([torch.zeros(1, dtype=torch.long)])
        return seconds


def table(times, tokens):
    heading = ["ms", *(f"T({number})" for number in tokens)]
    return aligned([heading, *([name, *(f"{each:.1f}" for each in row)] for name, row in times.items())])


def speeds(arguments, targets, drafter, prompts):
    """A table of plain and drafted decoding. All decode a prompt before the next one's turn."""
    settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    # Drafters learn the costs of one target.
    drafters = {name: copy.deepcopy(drafter) for name in targets}
    ways = [(name, assisted) for name in targets for assisted in (False, True)]
    seconds, tokens, rounds, same = (defaultdict(float) for _ in range(4))

    def decode(name, assisted, inputs):
        assistant = {"assistant_model": drafters[name]} if assisted else {}
        start = time.perf_counter()
        output = targets[name].generate(**inputs, **settings, **assistant)
        return time.perf_counter() - start, output

    for way in ways:
        decode(*way, prompts[0])
    for number, inputs in enumerate(prompts):
        texts, shift = {}, number % len(ways)
        for way in ways[shift:] + ways[:shift]:
            took, output = decode(*way, inputs)
            texts[way] = output.sequences
            seconds[way] += took
            count = output.sequences.shape[1] - inputs["input_ids"].shape[1]
            tokens[way] += count
            # Of plain decoding, which may also be what ran, each token is a round.
            statistics = getattr(output, "draft_statistics", None)
            rounds[way] += count if statistics is None else statistics.rounds
        for name in targets:
            same[name] += torch.equal(texts[name, False], texts[name, True])
    rows = [["", "plain, tokens/s", "drafted, tokens/s", "speed-up", "tokens a round", "same outputs"]]
    for name in targets:
        plain, drafted = (tokens[name, assisted] / seconds[name, assisted] for assisted in (False, True))
        a_round = tokens[name, True] / rounds[name, True]
        outputs = f"{same[name]:.0f}/{len(prompts)}"
        rows.append([name, f"{plain:.1f}", f"{drafted:.1f}", f"{drafted / plain:.2f}", f"{a_round:.2f}", outputs])
    return aligned(rows)


if __name__ == "__main__":
    main()
