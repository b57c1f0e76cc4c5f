# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Trains a drafter by every recipe on the same tokens, decodes with each, and prints a table.

    python examples/compare_recipes.py --data tokens.safetensors --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl

Resumes after an interruption.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

LINEAR = "--num_lstm_layers 0 --distillation_weight 1"
A = f"--block_size 1 {LINEAR}"
B = f"{A} --unroll_passes 3"
C = f"--block_size 2 {LINEAR}"
RECIPES = {
    "A: k = 1, one pass": A,
    "B: k = 1, 3 unrolled passes": B,
    "B, half the learning rate": f"{B} --learning_rate 4e-4",
    "B, twice the learning rate": f"{B} --learning_rate 1.6e-3",
    "B, Muon": f"{B} --muon True",
    "B, Muon, 3 times the learning rate": f"{B} --muon True --learning_rate 2.4e-3",
    "B, loss -log of the overlap": f"{B} --divergence log_overlap",
    "B, hybrid loss": f"{B} --divergence hybrid",
    "B, total variation": f"{B} --divergence total_variation",
    "B, 5 passes, each weighing 0.8 of the one before": f"{A} --unroll_passes 5 --pass_decay 0.8",
    "B, 3 decoder layers": f"{B} --num_draft_layers 3",
    "B, 4 decoder layers": f"{B} --num_draft_layers 4",
    "B, MLPs twice as wide": f"{B} --intermediate_size 3072",
    "B, draft vocabulary of 16k": f"{B} --draft_vocab_size 16384",
    "B, all tokens in the draft vocabulary": f"{B} --draft_vocab_size 49152",
    "B, 3 more target layers": f"{B} --feature_layers 2 14 26",
    "B, 3 more target layers, no regression": f"{B} --feature_layers 2 14 26 --regression_weight 0",
    "C: k = 2": C,
    "C, conditioned blocks": f"{C} --conditioning_size 576",
    "k = 4, conditioned blocks": f"--block_size 4 {LINEAR} --conditioning_size 576",
    "paper: k = 2, LSTM, CSGD": "--block_size 2 --num_lstm_layers 2 --distillation_weight 0.1",
}
DEPTH, NODES = 4, 24
# One seed: every recipe sees the same samples in the same order.
TRAINING = (
    "--per_device_train_batch_size 8 --learning_rate 8e-4 --warmup_steps 20 --lr_scheduler_type cosine --bf16 "
    "--seed 1 --draft_vocab_size 8192 --eval_samples 32 --final_tau_prompts 0 --save_steps 100 --save_total_limit 1 "
    "--report_to none"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="token files of `hf-falcon prepare`")
    parser.add_argument("--prompts", nargs="+", required=True, help="JSON-lines files whose first turns are decoded")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--features_dir", help="folder for features, for recipes that read no other layer")
    parser.add_argument("--max_steps", default="100", help="steps of 8 samples")
    parser.add_argument("--limit", default="3", help="prompts of each file")
    parser.add_argument("--max_new_tokens", default="64", help="new tokens a prompt")
    arguments = parser.parse_args()
    check_settings(arguments)
    print(
        "| recipe | top-1 at depth 1, 2, 3, 4 | tau, chain | tau, tree |\n| --- | --- | --- | --- |",
        flush=True,
    )
    for number, (name, options) in enumerate(RECIPES.items()):
        print(row(arguments, arguments.output_dir / f"{number:02d}", name, options.split()), flush=True)


def check_settings(arguments: argparse.Namespace) -> None:
    """Results of other settings, or of other recipes, are not taken for these."""
    kept = arguments.output_dir / "settings.json"
    given = {name: value for name, value in vars(arguments).items() if name != "output_dir"}
    settings = json.dumps({**given, "recipes": RECIPES}, default=str, indent=2)
    if kept.exists() and kept.read_text() != settings:
        raise SystemExit(f"{kept} has other settings or recipes: repeat the first command, or give another folder.")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    kept.write_text(settings)


def row(arguments: argparse.Namespace, folder: Path, name: str, options: list[str]) -> str:
    """Makes the drafter of one recipe, decodes with it, and returns its row of the table."""
    train(arguments, folder, options)
    passes = math.ceil(DEPTH / json.loads((folder / "config.json").read_text())["block_size"])
    chain = decode(arguments, folder, "chain", ["--num_assistant_tokens", f"{DEPTH}", "--draft_top_k", "1"], passes)
    tree = decode(arguments, folder, "tree", ["--num_assistant_tokens", f"{NODES}"], passes)
    return f"| {name} | {by_depth(chain)} | {tau(chain):.2f} | {tau(tree):.2f} |"


def train(arguments: argparse.Namespace, folder: Path, options: list[str]) -> None:
    """Trains one drafter; resumes its training after an interruption."""
    if (folder / "trainer_state.json").exists():
        return
    words = ["--data", *arguments.data, "--output_dir", str(folder), "--max_steps", arguments.max_steps]
    if arguments.target:
        words += ["--target", arguments.target]
    if arguments.features_dir and "--feature_layers" not in options:
        words += ["--features_dir", arguments.features_dir]
    # Options come last: they win.
    run("train", *words, *TRAINING.split(), *options)


def decode(arguments: argparse.Namespace, folder: Path, name: str, options: list[str], passes: int) -> list[dict]:
    """The results of `hf-falcon evaluate` for each file of prompts."""
    kept = folder / f"{name}.json"
    if not kept.exists():
        words = ["--data", *arguments.prompts, "--drafter", str(folder), "--limit", arguments.limit]
        words += ["--max_new_tokens", arguments.max_new_tokens, "--num_draft_passes", str(passes)]
        if arguments.target:
            words += ["--target", arguments.target]
        kept.write_text(run("evaluate", *words, *options, "--assistant_confidence_threshold", "0", "--json"))
    return list(json.loads(kept.read_text())["data"].values())


def run(*words: str) -> str:
    """Runs a command of `hf-falcon` and returns what it prints."""
    command = [sys.executable, "-m", "hf_falcon", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def tau(results: list[dict]) -> float:
    return sum(result["tau"] for result in results) / len(results)


def by_depth(results: list[dict]) -> str:
    """Accuracy of the first choice at each depth of a chain, if all choices before it were the target's."""
    right = [sum(result["rounds"] for result in results)]
    for depth in range(DEPTH):
        shares = [(result["accepted_by_depth"] + [0] * DEPTH)[depth] for result in results]
        right.append(sum(result["rounds"] * share for result, share in zip(results, shares)))
    return " ".join(f"{100 * after / before:.0f}" if before else "-" for before, after in zip(right, right[1:])) + " %"


if __name__ == "__main__":
    main()
