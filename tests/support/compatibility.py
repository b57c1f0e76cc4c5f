# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
What becomes of each decoder of the installed transformers with a drafter: of a text, a batch, and a quantised target.
`python tests/support/compatibility.py llama ...` prints it.
"""

import argparse
import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from oracle import use_batch_oracle, use_oracle
from shrunken import VOCAB, tiny_model
from tiny_models import SAME_EVERY_ROUND
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from hf_falcon import FalconDraftConfig, FalconDraftModel
from hf_falcon.core import decoding, probe

DECODERS = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MULTIMODAL = {
    model_type: name if isinstance(name, str) else name[0]
    for model_type, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    if model_type not in DECODERS
}
TREES, CHAINS, PLAIN, REFUSED, UNTRIED = "trees", "chains", "plain", "refused", "not tried"
_PROMPT_LENGTH, _NEW_TOKENS, _PADDING = 11, 24, 3
# Arguments that have a value for each token, in their second dimension.
_OF_TOKENS = {"input_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
_OF_TOKENS |= {"cross_attention_mask", "image_attention_mask"}
# Arguments of `generate` by name, `input_ids` among them.
Prompt = dict[str, torch.Tensor]


class Row(NamedTuple):
    """
    What was seen of one model type.

    Args:
        model_type, class_name (`str`): the model.
        result (`str`): what becomes of a single prompt.
        remark (`str`): why, where it is not verified in trees.
        batch, quantised (`str`): what becomes of two prompts, and of a prompt with quantised linear layers.
    """

    model_type: str
    class_name: str
    result: str
    remark: str = ""
    batch: str = ""
    quantised: str = ""


class WrongTextError(AssertionError):
    """The one thing that must not be: other tokens or logits than plain decoding's."""


def classify(model_type: str) -> Row:
    """
    Generates with a tiny random model of a type, plainly and with a drafter of which most tokens are right, and
    compares them.

    Raises:
        `WrongTextError`: where they differ, or where no tree was used and nothing says why.
    """
    auto_class = AutoModelForCausalLM if model_type in DECODERS else AutoModelForImageTextToText
    name = {**MULTIMODAL, **DECODERS}[model_type]
    try:
        model, ids = _model_and_prompt(model_type, auto_class)
    # Whatever keeps transformers from it is the finding.
    except Exception as error:
        return Row(model_type, name, UNTRIED, first_line(error))
    return Row(model_type, name, *compare(model, {"input_ids": ids}))


def _model_and_prompt(model_type: str, auto_class: type) -> tuple[PreTrainedModel, torch.Tensor]:
    model = tiny_model(model_type, auto_class)
    ids = torch.randint(3, VOCAB, (1, _PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
    make_lively(model, {"input_ids": ids})
    return model, ids


def make_lively(model: PreTrainedModel, prompt: Prompt) -> None:
    """
    Gives a model weights with which plain decoding does not write the same token over and over.

    Raises:
        `ArithmeticError`: if none were found.
    """
    for seed in range(6):
        output = _generate(model, prompt)
        if not all(logits.isfinite().all() for logits in output.logits):
            raise ArithmeticError("plain `generate` gives logits that are not finite")
        if len(set(output.sequences[0, prompt["input_ids"].shape[1] :].tolist())) > 4:
            return
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    raise ArithmeticError("plain `generate` repeats a few tokens, with any weights tried")


def compare(model: PreTrainedModel, prompt: Prompt) -> tuple[str, str, str, str]:
    """
    Result and remark, of a greedy text and of a sample after a padded prompt; and the results of a batch, and of the
    model with quantised linear layers.
    """
    config = FalconDraftConfig.from_target(model, block_size=2, num_hidden_layers=1, num_lstm_layers=0)
    drafter = FalconDraftModel(config).eval()
    for option, value in {**SAME_EVERY_ROUND, "assistant_confidence_threshold": 0.0}.items():
        setattr(drafter.generation_config, option, value)
    try:
        found = [_compare_row(model, prompt, drafter), _compare_row(model, padded(prompt), drafter, do_sample=True)]
    except ValueError as error:
        return REFUSED, first_line(error), "", ""
    # The lesser of both, with its reason.
    result = max(found, key=lambda row: (TREES, CHAINS, PLAIN).index(row[0]))
    return *result, _compare_batch(model, prompt, drafter), _compare_quantised(model, prompt, drafter)


def _compare_row(
    model: PreTrainedModel, prompt: Prompt, drafter: FalconDraftModel, do_sample: bool = False
) -> tuple[str, str]:
    expected = _generate(model, prompt, do_sample=do_sample)
    verdicts = []
    with pytest.MonkeyPatch.context() as patch, _warnings() as warnings:
        use_oracle(patch, expected.sequences, accuracy=0.8, scattered=True)
        _record_verdicts(patch, verdicts)
        output = _generate(model, prompt, do_sample=do_sample, assistant_model=drafter)
    if output.sequences.tolist() != expected.sequences.tolist():
        raise WrongTextError(f"{expected.sequences.tolist()} became {output.sequences.tolist()}")
    for ours, theirs in zip(output.logits, expected.logits):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    statistics = getattr(output, "draft_statistics", None)
    if statistics is None:
        if not warnings:
            raise WrongTextError("plain decoding ran, and no warning says why")
        return PLAIN, warnings[0].split("plain decoding runs: ")[1].rstrip(".")
    if not statistics.accepted_tokens:
        raise WrongTextError("no draft token was accepted, of which most are right")
    return verdicts[0].way, verdicts[0].reason or ""


def _record_verdicts(patch: pytest.MonkeyPatch, verdicts: list[probe.Verdict]) -> None:
    """Adds what is verified in each later call to `verdicts`."""

    def verdict_of_call(*call):
        verdicts.append(probe.verdict_of_call(*call))
        return verdicts[-1]

    patch.setattr(decoding, "verdict_of_call", verdict_of_call)


def padded(prompt: Prompt) -> Prompt:
    """A prompt behind padding."""
    return {
        name: torch.cat((torch.zeros_like(value[:, :_PADDING]), value), dim=1) if name in _OF_TOKENS else value
        for name, value in prompt.items()
    }


def _compare_batch(model: PreTrainedModel, prompt: Prompt, drafter: FalconDraftModel) -> str:
    """
    Two rows, one of them padded, the other longer.

    Raises:
        `WrongTextError`: where a row's text is another than without a drafter.
    """
    longer = padded(prompt)
    longer["input_ids"] = torch.cat((prompt["input_ids"][:, :_PADDING].flip(1), prompt["input_ids"]), dim=1)
    rows = {name: torch.cat((value, longer[name])) for name, value in padded(prompt).items()}
    try:
        expected = _generate(model, rows, output_logits=False).sequences
    except RuntimeError:
        if len(prompt) == 1:
            raise
        # Images of several rows may be given in another shape.
        return UNTRIED
    with pytest.MonkeyPatch.context() as patch:
        use_batch_oracle(patch, expected, (0.8, 0.5))
        output = _generate(model, rows, assistant_model=drafter, output_logits=False)
    output, statistics = output.sequences, getattr(output, "draft_statistics", None)
    if output.tolist() != expected.tolist():
        raise WrongTextError(f"of a batch, {expected.tolist()} became {output.tolist()}")
    return PLAIN if statistics is None else TREES


class Int8Linear(nn.Module):
    """A linear layer of which the weight alone is quantised."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight.to(rows.dtype) * self.scale, self.bias)


def _compare_quantised(model: PreTrainedModel, prompt: Prompt, drafter: FalconDraftModel) -> str:
    quantised = copy.deepcopy(model)
    linear = [name for name, module in quantised.named_modules() if type(module) is nn.Linear]
    for name in linear:
        quantised.set_submodule(name, Int8Linear(quantised.get_submodule(name)))
    try:
        _generate(quantised, prompt)
    # Code of the model that reads a weight itself.
    except (RuntimeError, TypeError, AttributeError):
        return UNTRIED
    return _compare_row(quantised, prompt, drafter)[0] if linear else UNTRIED


def _generate(model: PreTrainedModel, prompt: Prompt, do_sample: bool = False, **kwargs: object):
    torch.manual_seed(0)
    return model.generate(
        **prompt,
        attention_mask=(prompt["input_ids"] != 0).long(),
        max_new_tokens=_NEW_TOKENS,
        do_sample=do_sample,
        temperature=0.8 if do_sample else None,
        pad_token_id=0,
        return_dict_in_generate=True,
        **{"output_logits": True, **kwargs},
    )


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the decoding loop warns of inside, even if it did so before."""
    given: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: given.append(record.getMessage())  # type: ignore[method-assign]
    transformers_logging.warning_once.cache_clear()
    logger = logging.getLogger("hf_falcon.core.decoding")
    logger.addHandler(handler)
    try:
        yield given
    finally:
        logger.removeHandler(handler)


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A validator's name says nothing; a field's does.
    text = lines[1] if lines[0].startswith("Class validation error") else " ".join(lines[: 1 + lines[0].endswith(":")])
    return text if len(text) < 160 else f"{text[:157]}..."


def main() -> None:
    """Classifies the model types that are given, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="+")
    transformers_logging.set_verbosity_error()
    for name in parser.parse_args().model_types:
        print(*classify(name), sep="\t", flush=True)


if __name__ == "__main__":
    main()
