# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Reinforcement learning with trl's `GRPOTrainer`, whose rollouts are drafted: plain, with an attached drafter, and with
one that learns from the rollouts, since the target changes with each step.

    pip install trl
    python examples/grpo.py --steps 20

Hardware: 2 CPU cores
Minutes: 15
Expected: the same rollouts three times; the seconds of a step and of its rollouts, each way

The reward is for answers of about twenty words, which any model can learn in a few steps.
"""

import argparse
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import hf_falcon
from hf_falcon.commands.models import load_drafter, load_target

WAYS = ("plain", "attached", "learning")
WORDS = 20
QUESTIONS = ["What is {}?", "Tell me about {}.", "Why do people like {}?", "Give me advice about {}."]
TOPICS = ["bread", "trains", "the sea", "gardens", "music", "winter", "old books", "bridges"]


class Watch(TrainerCallback):
    """Takes the time of steps and of their rollouts, and keeps the rollouts."""

    def __init__(self, target: PreTrainedModel):
        self.steps: list[float] = []
        self.rollouts: list[float] = []
        self.texts: list[list[list[int]]] = []
        self.tokens_a_round: list[float] = []
        generate = target.generate

        def timed(*args: Any, **kwargs: Any) -> torch.Tensor:
            start = time.perf_counter()
            kwargs["generation_config"].return_dict_in_generate = True
            output = generate(*args, **kwargs)
            self.rollouts.append(time.perf_counter() - start)
            self.texts.append(output.sequences.tolist())
            statistics = getattr(output, "draft_statistics", None)
            if statistics is not None:
                self.tokens_a_round.append(statistics.new_tokens / max(1, statistics.rounds))
            return output.sequences

        target.generate = timed  # type: ignore[method-assign]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self.steps.append(time.perf_counter() - self._start)


def main() -> dict[str, Watch]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a name or a folder; the demo's target by default")
    parser.add_argument("--drafter", help="a name or a folder; the demo's by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num_generations", type=int, default=2, help="rollouts of a prompt, which run as one batch")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--output", default="runs/grpo")
    arguments = parser.parse_args()
    found: dict[str, Watch] = {}
    print("way        rollouts   step  tokens a round  equal rollouts  reward")
    for way in WAYS:
        target, tokenizer = load_target(arguments.target, torch.float32)
        if way != "plain":
            drafter = load_drafter(arguments.drafter, target.dtype, target.device)
            hf_falcon.attach(target, drafter, learn=way == "learning")
        watch, reward = train(target, tokenizer, arguments)
        hf_falcon.detach(target)
        found[way] = watch
        equal = sum(ours == plain for ours, plain in zip(watch.texts, found["plain"].texts))
        tokens = sum(watch.tokens_a_round) / len(watch.tokens_a_round) if watch.tokens_a_round else 1.0
        print(
            f"{way:9s}  {mean(watch.rollouts):6.2f} s  {mean(watch.steps):5.2f} s  {tokens:14.2f}  "
            f"{equal:9d} of {len(watch.texts)}  {reward:6.2f}",
            flush=True,
        )
    return found


def train(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace
) -> tuple[Watch, float]:
    """Trains a target. Returns the times of its steps, and the mean reward of the last ones."""
    rewards: list[float] = []

    def reward(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        values = [-abs(len(completion[0]["content"].split()) - WORDS) / WORDS for completion in completions]
        rewards.extend(values)
        return values

    prompts = [[{"role": "user", "content": form.format(topic)}] for topic in TOPICS for form in QUESTIONS]
    config = GRPOConfig(
        output_dir=arguments.output,
        max_steps=arguments.steps,
        num_generations=arguments.num_generations,
        per_device_train_batch_size=arguments.num_generations,
        max_completion_length=arguments.max_new_tokens,
        learning_rate=arguments.learning_rate,
        # In training mode the target then computes what it computes in evaluation mode.
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    watch = Watch(target)
    trainer = GRPOTrainer(
        model=target,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    del target.generate  # type: ignore[attr-defined]
    last = rewards[-8 * arguments.num_generations :]
    return watch, mean(last)


def mean(values: list[float]) -> float:
    """The mean; 0 without values."""
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    main()
