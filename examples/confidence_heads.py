# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Compares three predictors of whether a drafter's first choice is the target's: the drafter's own probability, a
decision model that reads more of its distribution, and a confidence head on its features. Fits each on one half of the
held-out samples, evaluates it on the other half, and prints a table.

    python examples/confidence_heads.py --data tokens.safetensors

The drafter must propose one token a pass, without an LSTM.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_falcon import FalconDraftModel
from hf_falcon.commands.models import load_drafter, load_target
from hf_falcon.core.draft_session import TargetHead
from hf_falcon.training.csgd import check_unrolling, draft_pass, judged_positions, shift_left
from hf_falcon.training.features import target_features
from hf_falcon.training.token_file import TokenFile
from hf_falcon.training.training_cache import TrainingCache

# Draft passes whose choices are judged, and tokens of a sample.
PASSES, MAX_LENGTH = 3, 512
# What each judge reads of what `first_choices` tells.
JUDGES = {
    "own probability, pass": slice(3, 5),
    "decision model: two best probabilities, entropy, pass": slice(0, 5),
    "confidence head: predicted feature, pass": slice(4, None),
    "all of these": slice(0, None),
}


@torch.no_grad()
def first_choices(
    drafter: FalconDraftModel, target: PreTrainedModel, token_ids: Tensor, prompt_length: int
) -> tuple[Tensor, Tensor]:
    """
    The first choices of each pass at each response token of a sample. Later passes read predicted features, as in
    decoding after the tokens of this text.

    Args:
        drafter, target: the models.
        token_ids (`torch.LongTensor` of shape `(1, length)`): the sample.
        prompt_length (`int`): tokens before the response.

    Returns:
        `torch.Tensor` of shape `(choices, 5 + hidden_size)`, what is known of a choice: the log-probabilities of the
        two best tokens, the entropy, the logit of the best one's probability, the pass, the predicted feature; and
        `torch.Tensor` of shape `(choices,)`, 1 where it is the target's, else 0.
    """
    head, valid = TargetHead(drafter, target), torch.ones_like(token_ids, dtype=torch.bool)
    places = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    features = target_features(target, token_ids, valid)
    judged = judged_positions(places >= prompt_length, valid, block_size=1)
    wanted = target.get_output_embeddings()(shift_left(features, 1)[judged]).argmax(dim=-1)
    features, embeds = features.float(), head.embed(shift_left(token_ids, 1))
    given, cache, known, right = features, None, [], []
    for number in range(1, PASSES + 1):
        cache = TrainingCache(cache)
        predicted = draft_pass(drafter, given, embeds, places, valid, number, cache)
        given = torch.cat((features[:, :1], predicted[:, :-1]), dim=1)
        scores = head.logits(predicted[judged]).log_softmax(dim=-1)
        best, choices = scores.topk(2, dim=-1)
        entropy = -(scores.exp() * scores).sum(dim=-1, keepdim=True)
        own = best[:, :1].exp().logit(eps=1e-6)
        known.append(torch.cat((best, entropy, own, torch.full_like(own, number), predicted[judged]), dim=-1))
        right.append((head.to_target_ids(choices[:, 0]) == wanted).float())
    return torch.cat(known), torch.cat(right)


def fit(known: Tensor, right: Tensor) -> Callable[[Tensor], Tensor]:
    """Fits a logistic regression, with the weight decay that is best on the last quarter; returns its function."""
    cut = len(right) * 3 // 4

    def loss_beyond_the_cut(decay: float) -> float:
        return log_loss(fit_with_decay(known[:cut], right[:cut], decay)(known[cut:]), right[cut:])

    return fit_with_decay(known, right, min((1e-4, 1e-3, 1e-2, 1e-1), key=loss_beyond_the_cut))


def fit_with_decay(known: Tensor, right: Tensor, decay: float) -> Callable[[Tensor], Tensor]:
    mean, std = known.mean(dim=0), known.std(dim=0) + 1e-6
    layer = torch.nn.Linear(known.shape[1], 1, device=known.device)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = layer((known - mean) / std)[:, 0]
        value = F.binary_cross_entropy_with_logits(logits, right) + decay * layer.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return lambda others: layer((others - mean) / std)[:, 0].detach()


def log_loss(logits: Tensor, right: Tensor) -> float:
    return F.binary_cross_entropy_with_logits(logits, right).item()


def auc(logits: Tensor, right: Tensor) -> float:
    """Probability that a right choice gets a higher logit than a wrong one."""
    ranks = logits.argsort().argsort().double() + 1
    rights = right.sum().double()
    return float((ranks[right > 0].sum() - rights * (rights + 1) / 2) / (rights * (len(right) - rights)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="the token files that the drafter was trained on")
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="drafter, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--held_out", type=int, default=64, help="`eval_samples` of its training")
    arguments = parser.parse_args()
    files = [TokenFile.load(path) for path in arguments.data]
    data = TokenFile.concatenate(files)
    if not 2 <= arguments.held_out <= len(data):
        parser.error(f"`--held_out` is {arguments.held_out}: give 2 to {len(data)}, the dialogues of `--data`.")
    target, _ = load_target(arguments.target)
    for path, file in zip(arguments.data, files):
        file.check_vocabulary(target.config.get_text_config().vocab_size, path)
    drafter = load_drafter(arguments.drafter, "float32")
    if drafter.config.block_size != 1:
        parser.error(f"The drafter's `block_size` is {drafter.config.block_size}: give one that has 1.")
    check_unrolling(drafter, PASSES)

    def choices_of(samples: range) -> tuple[Tensor, Tensor]:
        found = []
        for token_ids, prompt_length in map(data.sample, samples):
            found.append(first_choices(drafter, target, token_ids[None, :MAX_LENGTH].to(target.device), prompt_length))
        known, right = zip(*found)
        return torch.cat(known), torch.cat(right)

    middle = len(data) - arguments.held_out // 2
    one, other = choices_of(range(len(data) - arguments.held_out, middle)), choices_of(range(middle, len(data)))
    right = torch.cat((one[1], other[1]))
    own = torch.cat((one[0], other[0]))[:, 3]
    print(f"{len(right):,} first choices of {PASSES} passes, top-1 accuracy {100 * right.mean():.1f} %\n")
    print("| judge | log loss | AUC |\n| --- | --- | --- |")
    print(f"| own probability, as it is | {log_loss(own, right):.3f} | {auc(own, right):.3f} |")
    for name, columns in JUDGES.items():
        pairs = ((other, one), (one, other))
        logits = torch.cat([fit(known[:, columns], r)(asked[:, columns]) for (known, r), (asked, _) in pairs])
        print(f"| {name} | {log_loss(logits, right):.3f} | {auc(logits, right):.3f} |", flush=True)


if __name__ == "__main__":
    main()
