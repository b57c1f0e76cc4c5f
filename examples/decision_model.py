# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Fits a decision model (improved MCSD), which predicts after each draft pass whether another pass pays, and compares it
with the rule of the drafting policy: the drafter's own probability of the paths that the pass would continue.
Each is fitted on one half of the prompts and evaluated on the other.

    python examples/decision_model.py --data tokens.safetensors --output decision.json
    hf-falcon bench --methods plain,falcon,falcon_classifier --decision decision.json --data ...
"""

import argparse
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_falcon import DraftOptions, DraftTree, FalconCandidateGenerator, FalconDraftModel
from hf_falcon.bench.decision import DecisionModel, known
from hf_falcon.commands.models import load_drafter, load_target
from hf_falcon.core.policy import AcceptanceStats, DraftDecision, DraftPolicy, total_probability
from hf_falcon.core.target_parts import FeatureTap
from hf_falcon.core.tree import Branches
from hf_falcon.training.token_file import TokenFile


class Recorder(DraftPolicy):
    """Drafts all passes, and records the model's inputs before each pass but the first."""

    def __init__(self, options: DraftOptions):
        super().__init__(options, AcceptanceStats())
        self.known: list[Tensor] = []
        self.rule: list[Tensor] = []
        self.depths: list[int] = []

    def decide(self, matched: int = 0, found: int = 0) -> DraftDecision:
        # Any probability is enough for a further pass.
        return DraftDecision(pass_threshold=1e-30, continuation=self._record)

    def _record(self, branches: Branches) -> Tensor:
        self.known.append(known(branches))
        self.rule.append(total_probability(branches))
        self.depths.append(branches.depth)
        return torch.ones(())


def right_depth(tree: DraftTree, text: list[int]) -> int:
    """The number of tokens, from the start of a text, that are a path of the tree."""
    nodes = {
        (parent, token): n for n, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist()))
    }
    node, depth = 0, 0
    while depth < len(text) and nodes.get((node, text[depth]), 0) > 0:
        node, depth = nodes[node, text[depth]], depth + 1
    return depth


@torch.no_grad()
def passes(
    drafter: FalconDraftModel, target: PreTrainedModel, options: DraftOptions, prompt: Tensor, new_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """
    All draft passes but the first at each place of the target's answer.

    Args:
        drafter, target, options: the models, and how trees are drafted.
        prompt (`torch.LongTensor` of shape `(1, length)`): the prompt.
        new_tokens (`int`): length of the answer.

    Returns:
        What was known before each pass (`(passes, 4)`), the rule's probability (`(passes,)`), and 1 where it had a
        right token, else 0 (`(passes,)`).
    """
    text = target.generate(prompt, assistant_model=drafter, max_new_tokens=new_tokens, do_sample=False)
    with FeatureTap(target, drafter.config.feature_layers) as tap:
        target(text)
    features, start = tap.take(), prompt.shape[1]
    generator = FalconCandidateGenerator(drafter, target, options)
    generator.commit(features[:, : start - 1], text[:, 1:start])
    found: list[tuple[Tensor, Tensor, bool]] = []
    # Behind the last of these places the text is too short to judge all passes.
    for place in range(start - 1, text.shape[1] - 1 - generator.max_depth):
        generator.commit(features[:, place : place + 1], text[:, place + 1 : place + 2])
        generator.policy = recorder = Recorder(options)
        tree = generator.propose(text[:, : place + 2], generator.max_depth)
        depth = right_depth(tree, text[0, place + 2 :].tolist())
        found += zip(recorder.known, recorder.rule, (depth > drafted for drafted in recorder.depths))
    if not found:
        return torch.empty(0, 4), torch.empty(0), torch.empty(0)
    seen, rule, right = zip(*found)
    return torch.stack(seen).float().cpu(), torch.stack(rule).float().cpu(), torch.tensor(right).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the token file that the drafter was trained on")
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="drafter, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--prompts", type=int, default=24, help="held-out samples to use, from the end of the data")
    parser.add_argument("--new_tokens", type=int, default=64, help="length of an answer")
    parser.add_argument("--output", default="decision.json", help="file for the model")
    arguments = parser.parse_args()
    data = TokenFile.load(arguments.data)
    if not 2 <= arguments.prompts <= len(data):
        parser.error(f"`--prompts` is {arguments.prompts}: give 2 to {len(data)}, the dialogues of `--data`.")
    target, _ = load_target(arguments.target, torch.bfloat16)
    data.check_vocabulary(target.config.get_text_config().vocab_size, arguments.data)
    drafter = load_drafter(arguments.drafter, torch.bfloat16)
    options = DraftOptions.from_generation_config(drafter.generation_config)
    options = replace(options, draft_tree="dynamic", num_assistant_tokens_schedule="constant")
    halves: list[list[tuple[Tensor, Tensor, Tensor]]] = [[], []]
    for number in range(arguments.prompts):
        token_ids, prompt_length = data.sample(len(data) - 1 - number)
        prompt = token_ids[None, :prompt_length].to(target.device)
        halves[number % 2].append(passes(drafter, target, options, prompt, arguments.new_tokens))
    (one, rule_one, right_one), (other, rule_other, right_other) = (map(torch.cat, zip(*half)) for half in halves)
    right = torch.cat((right_one, right_other))
    model = torch.cat((_judge(other, right_other, one), _judge(one, right_one, other)))
    rule = torch.cat((rule_one, rule_other)).clamp(1e-6, 1 - 1e-6)
    print(f"{len(right):,} passes, {100 * right.mean():.1f} % of them with a token of the target's output\n")
    print("| judge | log loss |\n| --- | --- |")
    print(f"| probability of the paths | {F.binary_cross_entropy(rule, right):.3f} |")
    print(f"| decision model | {F.binary_cross_entropy(model, right):.3f} |")
    DecisionModel.fit(torch.cat((one, other)), right).save(arguments.output)


def _judge(known: Tensor, right: Tensor, asked: Tensor) -> Tensor:
    model = DecisionModel.fit(known, right)
    return (asked @ torch.tensor(model.weights) + model.bias).sigmoid().clamp(1e-6, 1 - 1e-6)


if __name__ == "__main__":
    main()
