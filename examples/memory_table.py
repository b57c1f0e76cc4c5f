# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Prints the memory of targets and their drafters: weights, the drafter's copy of LM head rows, the caches of 1,000
tokens of context, and what a tree adds in a round. Sizes are counted on paper: no weights of a target are loaded.

    python examples/memory_table.py --measure

Hardware: 2 CPU cores
Minutes: 1
Expected: the share of the drafter falls with the size of the target; caches of both grow with the context

The last rows are of shapes of 7B and 70B targets, with the drafter that `hf-falcon train` makes for them by default.
`--measure` loads the other targets, each twice in a process of its own, and adds the peak memory of plain and of
drafted decoding after a prompt of as many tokens: libraries, weights, caches and all that is computed on the way.
Caches have up to a sixteenth or 128 tokens of spare places, which are not counted.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig

from hf_falcon import FalconDraftConfig, FalconDraftModel
from hf_falcon.bench.memory import weight_bytes
from hf_falcon.bench.runner import peak_memory_mb
from hf_falcon.bench.shapes import SHAPES, Shape
from hf_falcon.commands.models import (
    converted_target,
    load_drafter,
    load_network,
    load_target,
    resolve_dtype,
    shipped_drafter,
    source_named,
)
from hf_falcon.commands.train_arguments import DrafterArguments
from hf_falcon.core.draft_options import DraftOptions
from hf_falcon.core.target_parts import CACHE_NAME

# The shapes and vocabularies of Llama-2-7B and Llama-3.1-70B.
ON_PAPER = {
    "7B, on paper": (SHAPES["7b"], 32000),
    "70B, on paper": (Shape(8192, 28672, 80, 64, 8, 128), 128256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", help="targets, from the Hub or folders; the demo's if left out")
    parser.add_argument("--drafters", nargs="+", help="a drafter for each; the demo's if left out")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of all of them")
    parser.add_argument("--context", type=int, default=1000, help="tokens of context")
    parser.add_argument("--nodes", type=int, default=32, help="nodes of a tree")
    parser.add_argument("--passes", type=int, default=6, help="draft passes of a round")
    parser.add_argument("--draft_vocab_size", type=int, help="tokens that drafters on paper score; all if left out")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="tokens that are decoded with --measure")
    parser.add_argument("--measure", action="store_true", help="also measure the peak memory of decoding")
    parser.add_argument("--child", choices=("plain", "drafted"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if len(arguments.targets or []) != len(arguments.drafters or []):
        parser.error(
            f"`--targets` has {len(arguments.targets or [])} and `--drafters` {len(arguments.drafters or [])} names: "
            "give one drafter for each target."
        )
    pairs = list(zip(arguments.targets or [None], arguments.drafters or [None]))
    if arguments.child:
        print(json.dumps(peak_of_decoding(arguments, *pairs[0])))
        return
    rows = [("target", *COLUMNS, *(MEASURED if arguments.measure else ()))]
    for target, drafter in pairs:
        source = target or str(converted_target())
        with source_named("targets", source):
            config = AutoConfig.from_pretrained(source)
        network = load_network(drafter or shipped_drafter(), arguments.dtype, "cpu")
        name = network.config.target_name_or_path or config.name_or_path or source
        cells = sizes(arguments, config, network)
        if arguments.measure:
            cells = [*cells, *(f"{measured(arguments, way, target, drafter):,.0f}" for way in ("plain", "drafted"))]
        rows.append((name.rstrip("/").rpartition("/")[2], *cells))
    for name, (shape, vocab_size) in ON_PAPER.items():
        config = LlamaConfig(vocab_size=vocab_size, **vars(shape))
        with torch.device("meta"):
            network = FalconDraftModel(drafter_config(config, arguments.draft_vocab_size))
        cells = sizes(arguments, config, network.to(resolve_dtype(arguments.dtype, "cpu")))
        rows.append((name, *cells, *([""] * len(MEASURED) if arguments.measure else [])))
    rows.insert(1, ["---"] * len(rows[0]))
    print(f"MB, {arguments.dtype}; {arguments.context:,} tokens of context, {arguments.nodes} nodes a tree\n")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


COLUMNS = (
    "weights",
    "drafter's weights",
    "its LM head rows",
    "target's cache",
    "drafter's cache",
    "a tree",
    "all of the drafter",
)
MEASURED = ("peak, plain", "peak, drafted")


def drafter_config(config, draft_vocab_size):
    """The sizes that `hf-falcon train` chooses for a target."""
    size = None if draft_vocab_size is None else min(draft_vocab_size, config.vocab_size)
    fields = {name: getattr(DrafterArguments, name) for name in ("block_size", "num_lstm_layers")}
    return FalconDraftConfig.from_target(config, draft_vocab_size=size, **fields)


def sizes(arguments, config, drafter):
    """The cells of a row: megabytes, and the share of all that the drafter adds in the target's weights."""
    dtype, own = resolve_dtype(arguments.dtype, "cpu"), drafter.config
    weights, cache = target_bytes(config, dtype, arguments.context)
    text = config.get_text_config(decoder=True)
    head = 0
    # A copy of some rows; a drafter that scores all tokens reads the target's.
    if isinstance(drafter, FalconDraftModel) and own.draft_vocab_size is not None:
        head = own.draft_vocab_size * text.hidden_size * dtype.itemsize
    row = row_bytes(own, dtype)
    # Rows of the tree in both caches, and the logits of its nodes. The first pass is the commit of accepted tokens.
    options = DraftOptions.from_generation_config(drafter.generation_config)
    drafted = (arguments.passes - 1) * options.draft_width * own.block_size * row
    verified = (
        target_bytes(config, dtype, arguments.nodes)[1] + (1 + arguments.nodes) * text.vocab_size * dtype.itemsize
    )
    found = [weights, weight_bytes(drafter), head, cache, arguments.context * row, drafted + verified]
    added = sum(found) - weights - cache
    return [*(f"{size / 1e6:,.1f}" for size in found), f"{100 * added / weights:.1f} %"]


def target_bytes(config, dtype, context):
    """Bytes of a target's weights, and of its cache after a context of that many tokens."""
    with torch.device("meta"), torch.no_grad():
        target = AutoModelForCausalLM.from_config(config, dtype=dtype)
        cache = DynamicCache(config=config)
        target(torch.zeros(1, context, dtype=torch.long), use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    return weight_bytes(target), sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def row_bytes(config, dtype):
    """Bytes of a position in a drafter's cache: keys and values of its layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def measured(arguments, way, target, drafter):
    """Peak megabytes of a process that decodes in that way."""
    words = ["--child", way, "--dtype", arguments.dtype, "--context", arguments.context, "--nodes", arguments.nodes]
    words += ["--passes", arguments.passes, "--max_new_tokens", arguments.max_new_tokens]
    words += ["--targets", target, "--drafters", drafter] if target else []
    command = [sys.executable, __file__, *map(str, words)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def peak_of_decoding(arguments, source, drafter_source):
    """Decodes once, and returns the peak memory of this process meanwhile, in megabytes."""
    target, _ = load_target(source, arguments.dtype, "cpu")
    options = {}
    if arguments.child == "drafted":
        options = {"assistant_model": load_drafter(drafter_source, arguments.dtype, "cpu", target)}
        # Trees of full size in every round, whether they pay or not.
        options |= {"num_assistant_tokens": arguments.nodes, "num_draft_passes": arguments.passes}
        options |= {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    generator = torch.Generator().manual_seed(0)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(vocab_size, (1, arguments.context), generator=generator)
    target.generation_config.eos_token_id = None
    forget_peak()
    target.generate(prompt, max_new_tokens=arguments.max_new_tokens, do_sample=False, pad_token_id=0, **options)
    return peak()


def forget_peak():
    """Loading weights may take more memory than decoding. Only Linux lets a process start its peak anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("Note: the peak includes the loading of the weights.", file=sys.stderr)


def peak():
    """The peak of this process; its parent's is not among it, as it is in what Linux's `getrusage` says."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return peak_memory_mb(torch.device("cpu"))


if __name__ == "__main__":
    main()
