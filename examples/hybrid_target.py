# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Measures a hybrid target, whose layers keep a recurrent state, with and without a drafter.

    OMP_NUM_THREADS=2 python examples/hybrid_target.py --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl

The target is a Falcon-H1 with the function of the demo's target: its attention and feed-forward weights, and in each
layer a Mamba 2 part beside the attention that computes all it has to, and adds zero. So the drafter's acceptance is
real, and the cost is that of a hybrid. Some ten minutes on two cores.
"""

import argparse
import copy
import time

import torch
from transformers import DynamicCache, FalconH1Config, FalconH1ForCausalLM, PreTrainedModel

from hf_falcon.bench.prompts import read_turns
from hf_falcon.chains import ChainRun
from hf_falcon.commands.models import encode, load_drafter, load_target
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.core.tree import chain

# The Mamba part of a small Falcon-H1.
MAMBA = {"mamba_d_ssm": 768, "mamba_n_heads": 24, "mamba_d_state": 64, "mamba_n_groups": 1}
# Where a Llama's weights are in a Falcon-H1.
NAMES = {
    "mlp.": "feed_forward.",
    "post_attention_layernorm": "pre_ff_layernorm",
    "model.norm": "model.final_layernorm",
}
SIZES = (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, help="JSON-lines files with `turns`")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--target", help="Llama model, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="its drafter; the demo's if left out")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of both")
    parser.add_argument(
        "--chunk_size", type=int, default=128, help="tokens that a Mamba layer without its kernels computes at least"
    )
    arguments = parser.parse_args()
    llama, tokenizer = load_target(arguments.target, arguments.dtype)
    drafter = load_drafter(arguments.drafter, arguments.dtype)
    target = hybrid(llama, arguments.chunk_size)
    # It drafts for the same function in another architecture.
    drafter.config.target_model_type = target.config.model_type
    prompts = [
        encode(tokenizer, prompt, target.device)
        for file in arguments.prompts
        for prompt, *_ in read_turns(file, arguments.limit)
    ]
    print_costs(target, prompts[0]["input_ids"])
    decode(target, prompts[0], arguments.max_new_tokens, drafter)
    seconds, tokens, accepted, rounds, equal = {"plain": 0.0, "drafted": 0.0}, 0, 0, 0, 0
    for prompt in prompts:
        texts = {}
        for name, assistant in (("plain", None), ("drafted", drafter)):
            begin = time.perf_counter()
            output = decode(target, prompt, arguments.max_new_tokens, assistant)
            seconds[name] += time.perf_counter() - begin
            texts[name] = output.sequences.tolist()
        equal += texts["plain"] == texts["drafted"]
        statistics = output.draft_statistics
        tokens, rounds = tokens + statistics.new_tokens, rounds + statistics.rounds
        accepted += statistics.accepted_tokens
    print(f"{len(prompts)} prompts, {tokens} tokens: {equal} texts equal, tau {accepted / rounds:.2f}")
    print(f"speed-up over plain decoding: {seconds['plain'] / seconds['drafted']:.2f}")


@torch.no_grad()
def hybrid(llama: PreTrainedModel, chunk_size: int) -> PreTrainedModel:
    """A Falcon-H1 with the function of a Llama model."""
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields += ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_parameters")
    fields += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    fields_of_llama = {name: getattr(llama.config, name) for name in fields}
    config = FalconH1Config(**fields_of_llama, **MAMBA, mamba_chunk_size=chunk_size)
    model = FalconH1ForCausalLM(config).to(llama.dtype).eval()
    weights = {}
    for name, weight in llama.state_dict().items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        weights[name] = weight
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or not all(".mamba." in name for name in missing):
        raise ValueError(f"{type(llama).__name__} does not fit: {unexpected or missing}.")
    for layer in model.model.layers:
        layer.mamba.out_proj.weight.zero_()
    model.generation_config = copy.deepcopy(llama.generation_config)
    return model


def decode(target, prompt, max_new_tokens, assistant):
    return target.generate(
        **prompt,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        assistant_model=assistant,
    )


@torch.no_grad()
def print_costs(target: PreTrainedModel, input_ids: torch.Tensor, turns: int = 20) -> None:
    """The time of a forward over some tokens, and of a copy of the state, in forwards over a single token."""
    kwargs = {CACHE_NAME: DynamicCache(config=target.config), "use_cache": True}
    run = ChainRun(target, input_ids, target.generation_config, kwargs)
    run.prefill(input_ids)
    best = dict.fromkeys((*SIZES, "copy"), float("inf"))
    for _ in range(turns):
        for size in best:
            begin = time.perf_counter()
            if size == "copy":
                copy.deepcopy([vars(layer)["recurrent_states"] for layer in run.cache.layers])
            else:
                text = torch.zeros(1, run.length + 1, dtype=torch.long)
                run.score([chain(torch.zeros(size, dtype=torch.long))], [text])
            best[size] = min(best[size], time.perf_counter() - begin)
            if size != "copy":
                # All tokens are accepted: none is run again with the next forward.
                run.accept([torch.arange(size)])
    print("| tokens of a forward | plain steps |\n| --- | --- |")
    for size, seconds in best.items():
        print(f"| {'copy of the state' if size == 'copy' else size} | {seconds / best[1]:.2f} |")


if __name__ == "__main__":
    main()
