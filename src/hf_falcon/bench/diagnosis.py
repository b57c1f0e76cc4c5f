# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Why few draft tokens are accepted: each check looks for one cause, and reports it with its evidence and its remedy.

Where a cause can be removed for a moment, the check measures the acceptance with and without it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint_files import embedding_fingerprint, weights_fingerprint
from ..core.candidate_generator import FalconCandidateGenerator
from ..core.costs import CostKey
from ..core.draft_options import DraftOptions
from ..core.drafter import DraftModel
from ..core.interfaces import target_acceleration
from ..core.modeling_falcon_draft import FalconDraftNetwork
from ..core.policy import acceptance_stats_of
from ..core.probe import CHAINS, PLAIN
from ..core.target_parts import FeatureTap
from ..verdicts import verdict_of_prompt
from .acceptance import Acceptance, FirstChoices, Inputs, Text, decode, first_choices

# A difference counts from two standard errors on: by chance, one comparison of twenty is further from 0.
_STANDARD_ERRORS = 2.0
# A difference of tau counts from this share of the larger tau on: a smaller one changes the speed by a few per cent.
_RELATIVE = 0.1
# The same between texts of two kinds: every drafter has easier and harder texts. The shipped one's tau differs by 8 %
# between MT-bench, HumanEval and GSM8K.
_RELATIVE_OF_TEXTS = 0.2
# A difference between two readings of the target counts from this difference of the accuracy on.
_LEAST_ACCURACY = 0.03
# A draft vocabulary counts as too small from this share of missing tokens on. Where two of three first choices are
# right, tau could be about a tenth higher with all of them.
_LEAST_MISSING = 0.03
# An answer that repeats itself is easy to draft. Answers of another template do not count as better if this much more
# of them is repeated.
_MORE_REPETITION = 0.1
# Tokens of a run that counts as a repetition.
_RUN = 4
# Depths at which the accuracy of first choices is measured.
_DEPTHS = 4
# Rounds below which the measured acceptance is mostly chance.
_FEW_ROUNDS = 20
# Prompts with which it is measured whether drafting pays: enough rounds for the policy to pause.
_PROMPTS_OF_COST = 2
# Missing tokens that are listed, at most.
_LISTED_TOKENS = 6


@dataclass
class Finding:
    """
    A cause of low acceptance.

    Args:
        cause (`str`):
            "target", "plain_decoding", "weights", "chat_template", "layers", "final_norm", "draft_vocabulary",
            "sampling", "text" or "cost".
        summary, evidence, remedy (`str`): what is wrong, the numbers that show it, and what to do.
        loss (`float`, *optional*):
            Accepted draft tokens a round that the cause costs, estimated; `None` where that cannot be measured.
    """

    cause: str
    summary: str
    evidence: str
    remedy: str
    loss: float | None = None


@dataclass
class Template:
    """
    Another way to write the prompts.

    Args:
        name (`str`): for the report.
        prompts (`list[dict[str, torch.Tensor]]`): the inputs of the same prompts, in the same order.
        is_suspected (`bool`, *optional*, defaults to `True`):
            Whether something suggests that the drafter was trained with it. Otherwise it is decoded only if the
            drafter's first choices are better with it.
    """

    name: str
    prompts: list[Inputs]
    is_suspected: bool = True


@dataclass
class Reference:
    """
    The acceptance that the drafter had after its training.

    Args:
        tau (`float`): accepted draft tokens a round.
        source (`str`): where the number is from.
        is_lower_bound (`bool`, *optional*, defaults to `False`):
            Whether it may be from smaller trees than the drafter's own, of which fewer tokens are accepted.
    """

    tau: float
    source: str
    is_lower_bound: bool = False


@dataclass
class Case:
    """
    A target, a drafter and prompts, with what several checks measure.

    Args:
        target ([`PreTrainedModel`]): the target.
        drafter ([`DraftModel`]): its drafter, of any method.
        prompts (mapping of `str` to `list[dict[str, torch.Tensor]]`): the inputs of `generate`, by set of prompts.
        decode_token (`Callable`): the text of a token id.
        max_new_tokens (`int`, *optional*, defaults to 64): tokens of an answer, at most.
        adapt (`str`, *optional*): the command that adapts the drafter to the target.
    """

    target: PreTrainedModel
    drafter: DraftModel
    prompts: Mapping[str, list[Inputs]]
    decode_token: Callable[[int], str] = str
    max_new_tokens: int = 64
    adapt: str = "hf-falcon adapt"

    @property
    def all_prompts(self) -> list[Inputs]:
        """The prompts of all sets."""
        return [inputs for each in self.prompts.values() for inputs in each]

    def decode(self, prompts: Sequence[Inputs], description: str, **options: Any) -> Acceptance:
        """See [`decode`]."""
        return decode(self.target, self.drafter, prompts, self.max_new_tokens, description, **options)

    @cached_property
    def acceptance(self) -> dict[str, Acceptance]:
        """The greedy acceptance on each set of prompts."""
        return {name: self.decode(prompts, f"decoding, {name}") for name, prompts in self.prompts.items()}

    @cached_property
    def total(self) -> Acceptance:
        """The greedy acceptance on all prompts."""
        return Acceptance.total(list(self.acceptance.values()))

    @cached_property
    def choices(self) -> FirstChoices:
        """The drafter's first choices along the greedy answers."""
        return self.first_choices(self.total.texts, "first choices", depth=_DEPTHS)

    def first_choices(self, texts: Sequence[Text], description: str, **reading: Any) -> FirstChoices:
        """See [`first_choices`]."""
        return first_choices(self.target, self.drafter, texts, description, **reading)

    def loss_of_accuracy(self, accuracy: float) -> float:
        """
        Accepted draft tokens a round that are lost against a higher accuracy of first choices, if with it the same
        share of the rejections at each depth is avoided.
        """
        before = self.choices.accuracy
        if before >= 1.0:
            return 0.0
        generator = FalconCandidateGenerator(self.drafter, self.target)
        deepest = min(generator.max_depth, generator.options.num_assistant_tokens)
        rates = (self.total.acceptance_by_depth + [0.0] * deepest)[:deepest]
        left = max(0.0, 1.0 - accuracy) / (1.0 - before)
        raised = [1.0 - (1.0 - rate) * left for rate in rates]
        tau = sum(math.prod(raised[:end]) for end in range(1, deepest + 1))
        return max(0.0, tau - self.total.tau)


@dataclass
class Diagnosis:
    """
    The result of [`diagnose`].

    Args:
        findings (`list[Finding]`):
            The causes. Those whose effect cannot be measured come first, then those that explain most.
        notes (`list[str]`): what could not be checked.
        acceptance (`dict[str, Acceptance]`): see [`Case`]; empty if nothing is drafted.
        accuracy_by_depth (`list[float]`): see [`FirstChoices`].
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    accuracy_by_depth: list[float] = field(default_factory=list)

    @property
    def total(self) -> Acceptance:
        """The acceptance on all prompts."""
        return Acceptance.total(list(self.acceptance.values()))

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {
            "acceptance": self.total.to_dict() if self.acceptance else None,
            "data": {name: each.to_dict() for name, each in self.acceptance.items()},
            "first_choice_accuracy_by_depth": self.accuracy_by_depth,
            "findings": [vars(each) for each in self.findings],
            "notes": self.notes,
        }


def diagnose(
    case: Case,
    everyday_prompts: Sequence[Inputs] | None = None,
    templates: Sequence[Template] = (),
    has_other_template: bool = False,
    temperature: float | None = None,
    reference: Reference | None = None,
) -> Diagnosis:
    """
    Looks for the causes of low acceptance.

    Args:
        case ([`Case`]): the models and the prompts.
        everyday_prompts (sequence of `dict[str, torch.Tensor]`, *optional*):
            Prompts of everyday kinds, which the acceptance on the case's prompts is compared with.
        templates (sequence of [`Template`], *optional*): other ways to write the case's prompts.
        has_other_template (`bool`, *optional*, defaults to `False`):
            Whether the prompts' chat template is known to be another one than in training.
        temperature (`float`, *optional*): the temperature of `generate`, if it samples.
        reference ([`Reference`], *optional*): the acceptance after the training.
    """
    if obstacle := find_obstacle(case):
        return Diagnosis([obstacle])
    found = Diagnosis(acceptance=case.acceptance, accuracy_by_depth=case.choices.accuracy_by_depth)
    inputs = case.all_prompts[0]
    verdict = verdict_of_prompt(case.target, inputs["input_ids"], inputs.get("attention_mask"))
    if verdict.way == CHAINS:
        found.notes.append(
            f"The target verifies chains, of which fewer tokens are accepted than of trees: {verdict.reason}."
        )
    if case.total.rounds < _FEW_ROUNDS:
        found.notes.append(
            f"The answers had {case.total.rounds} rounds only, which is too few for a judgement: give more prompts, "
            "or prompts with longer answers."
        )
    if note := unknown_weights(case):
        found.notes.append(note)
    of_templates = measure_templates(case, templates)
    is_explained = has_other_template or better_template(case, of_templates) is not None
    if of_templates and not is_explained and case.total.rounds >= _FEW_ROUNDS:
        found.notes.append(f"The chat template explains no loss. {_compared_templates(case, of_templates)}")
    checks = [
        check_weights(case, reference),
        check_layers(case),
        check_final_norm(case),
        check_templates(case, of_templates, has_other_template),
        check_vocabulary(case),
    ]
    if temperature is not None:
        checks.append(check_sampling(case, temperature))
    if everyday_prompts is not None:
        everyday = case.decode(everyday_prompts, "decoding, built-in prompts")
        checks += [check_text(case, name, everyday) for name in case.prompts]
    found.findings = [finding for finding in checks if finding is not None]
    if not found.findings and (finding := check_reference(case, reference)):
        found.findings.append(finding)
    found.findings.sort(key=lambda each: math.inf if each.loss is None else each.loss, reverse=True)
    # The last one, as it is about speed.
    if finding := check_cost(case):
        found.findings.append(finding)
    return found


def find_obstacle(case: Case) -> Finding | None:
    """The reason why nothing at all is drafted, if there is one."""
    target, drafter, inputs = case.target, case.drafter, case.all_prompts[0]
    try:
        drafter.check_target(target)
        FeatureTap(target, drafter.config.feature_layers)
    except ValueError as error:
        return Finding(
            "target",
            "The drafter cannot draft for this target.",
            str(error),
            f"Give the target that the drafter was made for ({drafter.config.target_name_or_path or 'not named'}), or "
            "train a drafter for this one with `hf-falcon train`.",
        )
    verdict = verdict_of_prompt(target, inputs["input_ids"], inputs.get("attention_mask"))
    if verdict.way != PLAIN:
        return None
    return Finding(
        "plain_decoding",
        "The target is decoded plainly, without the drafter.",
        f"Nothing can be verified: {verdict.reason}.",
        "Use a target or a setting that is drafted for: the page Limits of the documentation lists the others.",
    )


def is_clearly_higher(one: Acceptance, other: Acceptance, relative: float = _RELATIVE) -> bool:
    """Whether the tau of `one` is higher by more than chance, and by the share `relative` of itself."""
    error = math.hypot(one.standard_error, other.standard_error)
    return one.tau - other.tau > max(_STANDARD_ERRORS * error, relative * one.tau)


def is_clearly_better(one: FirstChoices, other: FirstChoices) -> bool:
    """Whether `one` is right more often at the same positions, by more than chance (McNemar's test)."""
    gained = sum(here and not there for here, there in zip(one.hits, other.hits))
    lost = sum(there and not here for here, there in zip(one.hits, other.hits))
    return gained - lost > max(_STANDARD_ERRORS * math.sqrt(gained + lost), _LEAST_ACCURACY * len(one.hits))


def _rounds(acceptance: Acceptance | Reference) -> str:
    """A tau as the reports write it."""
    text = f"{1 + acceptance.tau:.2f} tokens a round (tau {acceptance.tau:.2f})"
    if isinstance(acceptance, Reference):
        return f"{text} {acceptance.source}"
    return f"{text}, over {acceptance.rounds} rounds"


def quantization(target: PreTrainedModel) -> str | None:
    """The method by which a target's weights are quantised, if its configuration names one."""
    config = getattr(target.config, "quantization_config", None)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown method")


def check_weights(case: Case, reference: Reference | None = None) -> Finding | None:
    """
    Compares the fingerprint of the target's weights with the one that the drafter was trained for.

    Args:
        case ([`Case`]): the models.
        reference ([`Reference`], *optional*): the acceptance after the training.
    """
    target, config = case.target, case.drafter.config
    expected, actual = config.target_fingerprint, weights_fingerprint(target)
    if expected is None or actual is None or actual == expected:
        return None
    trained, method = config.target_name_or_path, quantization(target)
    if method is not None:
        embeddings = {getattr(config, "target_embedding_fingerprint", None), embedding_fingerprint(target)}
        kind = f"{'another model, quantised' if len(embeddings - {None}) == 2 else 'a quantised copy'} ({method})"
    elif trained is not None and _last_part(trained) == _last_part(target.name_or_path):
        kind = "another copy of the same name, perhaps quantised, converted from a quantised one, or a later revision"
    else:
        kind = "a fine-tune, or another model of the same sizes"
    loss, compared = None, "How much that costs cannot be measured without the other weights."
    # A lower bound shows that tau is low, but not that it is not.
    if reference is not None and (reference.tau > case.total.tau or not reference.is_lower_bound):
        loss = max(0.0, reference.tau - case.total.tau)
        compared = f"Here: {_rounds(case.total)}. {_rounds(reference)}."
    return Finding(
        "weights",
        "The drafter was trained for other weights than the target's.",
        f"It was trained for {trained or 'a target that it does not name'}, whose weights have the fingerprint "
        f"{expected}. {target.name_or_path or 'The target'} has {actual}: {kind}. {compared}",
        f"Use the weights that it was trained for, or adapt the drafter to these: `{case.adapt}`.",
        loss,
    )


def unknown_weights(case: Case) -> str | None:
    """What is not known of the weights that the drafter was trained for, if [`check_weights`] cannot compare."""
    target, config = case.target, case.drafter.config
    if config.target_fingerprint is None:
        facts = "The drafter does not record the weights that it was trained for, so they were not compared"
        trained, method = config.target_name_or_path, quantization(target)
        if trained is not None and _last_part(trained) != _last_part(target.name_or_path):
            facts += f"; it names {trained}, and the target is {target.name_or_path or 'not named'}"
        return f"{facts}." if method is None else f"{facts}; the target is quantised ({method})."
    if weights_fingerprint(target) is None:
        return (
            "In float16 the target's weights cannot be compared with the weights that the drafter was trained for: "
            "give `--dtype bfloat16` or `--dtype float32`."
        )
    return None


def _last_part(name: str | None) -> str:
    return (name or "").rstrip("/").rpartition("/")[2].lower()


def other_layers(target: PreTrainedModel, drafter: DraftModel) -> list[list[int]]:
    """
    Layers of the target that the drafter may have been trained on in place of those that it reads: one further up or
    down, as files count hidden states in two ways, and the layers that EAGLE-3 reads by default.
    """
    current = list(drafter.config.feature_layers or ())
    if not current:
        return []
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    defaults = [[shift + 1, shift + count // 2 - 1, shift + count - 4] for shift in (0, 1)]
    shifted = [[layer + shift for layer in current] for shift in (-1, 1)]
    # -1 is the input of the first layer, which a Falcon drafter cannot read.
    least = 0 if isinstance(drafter, FalconDraftNetwork) else -1
    found: list[list[int]] = []
    for layers in [*shifted, *defaults]:
        is_valid = len(layers) == len(current) == len(set(layers)) and least <= min(layers) and max(layers) < count
        if is_valid and layers not in [current, *found]:
            found.append(layers)
    return found


def check_layers(case: Case) -> Finding | None:
    """Has the drafter read other layers of the target."""
    current, readings = list(case.drafter.config.feature_layers or ()), []
    for layers in other_layers(case.target, case.drafter):
        readings.append((layers, case.first_choices(case.total.texts, f"layers {layers}", layers=layers)))
    if not readings:
        return None
    best, choices = max(readings, key=lambda reading: reading[1].accuracy)
    if not is_clearly_better(choices, case.choices):
        return None
    name = case.drafter.name_or_path or "DRAFTER"
    if isinstance(case.drafter, FalconDraftNetwork):
        remedy = f'`FalconDraftModel.from_pretrained("{name}", feature_layers={best})`'
    else:
        # In files, hidden state n is the output of layer n - 1.
        remedy = f'`AutoDrafter.from_pretrained("{name}", layer_ids={[layer + 1 for layer in best]})`'
    return Finding(
        "layers",
        "The drafter reads the wrong layers of the target.",
        f"It reads the outputs of layers {current}, counted from 0, and {case.choices.accuracy:.0%} of its "
        f"{len(case.choices.hits)} first choices are right. With layers {best} {choices.accuracy:.0%} are right.",
        f"Load it with {remedy}, and save it with `save_pretrained`.",
        case.loss_of_accuracy(choices.accuracy),
    )


def check_final_norm(case: Case) -> Finding | None:
    """Has a drafter that reads the target's last hidden state read it before the final norm."""
    target, text_config = case.target, case.target.config.get_text_config(decoder=True)
    if not isinstance(case.drafter, FalconDraftNetwork):
        return None
    if target.get_output_embeddings().weight.shape[-1] != text_config.hidden_size:
        return None
    try:
        FeatureTap(target, [text_config.num_hidden_layers - 1])
    except ValueError:
        # The layers are not in one list.
        return None
    choices = case.first_choices(case.total.texts, "before the final norm", before_norm=True)
    if not is_clearly_better(choices, case.choices):
        return None
    return Finding(
        "final_norm",
        "The drafter was trained on the target's last hidden state before the final norm.",
        f"It gets the hidden state after the norm, and {case.choices.accuracy:.0%} of its {len(case.choices.hits)} "
        f"first choices are right. With the hidden state before the norm {choices.accuracy:.0%} are right.",
        "Train the drafter with `hf-falcon train`, which reads the hidden state after the norm.",
        case.loss_of_accuracy(choices.accuracy),
    )


def measure_templates(case: Case, templates: Sequence[Template]) -> dict[str, Acceptance]:
    """
    The acceptance with other chat templates, by their names. Of the templates that nothing suggests, only those with
    which first choices are better are decoded.
    """
    tried = [each for each in templates if each.is_suspected or _fits_better(case, each)]
    return {each.name: case.decode(each.prompts, f"decoding, {each.name}") for each in tried}


def better_template(case: Case, measured: Mapping[str, Acceptance]) -> str | None:
    """The template with the most accepted tokens, if these are clearly more than with the template of the prompts."""
    most = repetition(case.total.texts) + _MORE_REPETITION
    better = {
        name: each
        for name, each in measured.items()
        if is_clearly_higher(each, case.total) and repetition(each.texts) <= most
    }
    return max(better, key=lambda name: better[name].tau, default=None)


def check_templates(
    case: Case, measured: Mapping[str, Acceptance], has_other_template: bool = False
) -> Finding | None:
    """
    Compares the acceptance with that of other chat templates.

    Args:
        case ([`Case`]): the models and the prompts.
        measured (mapping of `str` to [`Acceptance`]): see [`measure_templates`].
        has_other_template (`bool`, *optional*, defaults to `False`): see [`diagnose`].
    """
    best = better_template(case, measured)
    if best is None and not has_other_template:
        return None
    recorded = "Its sha256 is not the one that the drafter's `provenance.json` records. " if has_other_template else ""
    loss, compared, remedy = None, _compared_templates(case, measured), "."
    if best is not None:
        loss, remedy = measured[best].tau - case.total.tau, f", {'' if has_other_template else 'probably '}{best}."
    elif not measured:
        compared = "How much that costs cannot be measured without the other template."
    return Finding(
        "chat_template",
        f"The drafter was {'' if has_other_template else 'probably '}trained with another chat template.",
        recorded + compared,
        f"Use the chat template that the drafter was trained with{remedy} Or adapt the drafter to yours: "
        f"`{case.adapt}`.",
        loss,
    )


def _compared_templates(case: Case, measured: Mapping[str, Acceptance]) -> str:
    others = "".join(f" With {name}: {_rounds(each)}." for name, each in measured.items())
    return f"With the template of these prompts: {_rounds(case.total)}.{others}"


def _fits_better(case: Case, template: Template) -> bool:
    """Whether the first choices along the same answers are better behind the prompts of another template."""
    texts = []
    for inputs, text in zip(template.prompts, case.total.texts):
        prompt = inputs["input_ids"]
        texts.append(Text(torch.cat((prompt, text.answer), dim=1), prompt.shape[1]))
    return is_clearly_better(case.first_choices(texts, f"first choices, {template.name}"), case.choices)


def repetition(texts: Sequence[Text]) -> float:
    """The share of the answers' runs of 4 tokens that occurred in the same answer before."""
    repeated, total = 0, 0
    for text in texts:
        tokens = text.answer[0].tolist()
        runs = [tuple(tokens[start : start + _RUN]) for start in range(len(tokens) - _RUN + 1)]
        repeated += len(runs) - len(set(runs))
        total += len(runs)
    return repeated / max(1, total)


def check_vocabulary(case: Case) -> Finding | None:
    """Counts the tokens of the target's answers that the draft vocabulary does not have."""
    known = case.drafter.make_head(case.target).vocab_ids
    if known is None or case.total.new_tokens == 0:
        return None
    tokens = torch.cat([text.answer[0].cpu() for text in case.total.texts])
    missing = Counter(tokens[~torch.isin(tokens, known.cpu())].tolist())
    share, accuracy = sum(missing.values()) / len(tokens), case.choices.accuracy
    if share < _LEAST_MISSING:
        return None
    listed = ", ".join(f"{case.decode_token(token)!r} {count}" for token, count in missing.most_common(_LISTED_TOKENS))
    accuracy_of_known = min(1.0, accuracy / max(1e-6, 1.0 - share))
    return Finding(
        "draft_vocabulary",
        f"The draft vocabulary misses {share:.1%} of the target's tokens.",
        f"It has {len(known):,} of {case.drafter.config.vocab_size:,} tokens. At most {1 - share:.1%} of the draft "
        f"tokens of a depth can be accepted. {accuracy:.0%} of all first choices are right, and "
        f"{accuracy_of_known:.0%} where the target's token is in the draft vocabulary. Missing in {len(tokens)} "
        f"tokens, the most frequent first: {listed}.",
        "Train a drafter with a larger `--draft_vocab_size`, or with data like these texts: the most frequent tokens "
        "of the data are taken.",
        case.loss_of_accuracy(accuracy_of_known),
    )


def check_sampling(case: Case, temperature: float) -> Finding | None:
    """
    Compares greedy decoding with sampling.

    Args:
        case ([`Case`]): the models and the prompts.
        temperature (`float`): the temperature; other settings are the target's own.
    """

    def sampled(verification: str) -> Acceptance:
        device = case.target.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            return case.decode(
                case.all_prompts,
                f"sampling, {verification}",
                do_sample=True,
                temperature=temperature,
                verification=verification,
            )

    exact = sampled("exact")
    if not is_clearly_higher(case.total, exact):
        return None
    speculative = sampled("speculative")
    if speculative.tau > exact.tau:
        remedy = (
            f'Give `verification="speculative"` to `generate`, which keeps the distribution: {_rounds(speculative)}'
        )
    else:
        remedy = f'Sample at a lower temperature; `verification="speculative"` gains nothing: {_rounds(speculative)}'
    return Finding(
        "sampling",
        f"Sampled tokens are harder to draft than greedy ones (temperature {temperature:g}).",
        f"Sampled: {_rounds(exact)}. Greedy: {_rounds(case.total)}.",
        f"{remedy}. Or train with more sampled responses: `hf-falcon prepare --temperatures {temperature:g}`.",
        case.total.tau - exact.tau,
    )


def check_text(case: Case, name: str, everyday: Acceptance) -> Finding | None:
    """
    Compares the acceptance on a set of prompts with the acceptance on everyday prompts.

    Args:
        case ([`Case`]): the models and the prompts.
        name (`str`): the set of prompts.
        everyday ([`Acceptance`]): the acceptance on everyday prompts.
    """
    here = case.acceptance[name]
    if not is_clearly_higher(everyday, here, _RELATIVE_OF_TEXTS):
        return None
    return Finding(
        "text",
        f"The texts of {name} are unlike the texts that the drafter was trained on.",
        f"{name}: {_rounds(here)}. Built-in everyday prompts: {_rounds(everyday)}.",
        f"Adapt the drafter with prompts like these: `{case.adapt}`.",
        everyday.tau - here.tau,
    )


def check_reference(case: Case, reference: Reference | None) -> Finding | None:
    """
    Compares the acceptance with the acceptance after the training, on prompts like the training's.

    Args:
        case ([`Case`]): the models and the prompts.
        reference ([`Reference`], *optional*): the acceptance after the training; without it nothing is compared.
    """
    if reference is None:
        return None
    loss = reference.tau - case.total.tau
    if loss <= max(_STANDARD_ERRORS * case.total.standard_error, _RELATIVE_OF_TEXTS * reference.tau):
        return None
    return Finding(
        "text",
        "These texts are unlike the texts that the drafter was trained on.",
        f"Here: {_rounds(case.total)}. {_rounds(reference)}. No other cause was found.",
        f"Adapt the drafter with prompts like these: `{case.adapt}`.",
        loss,
    )


def check_cost(case: Case) -> Finding | None:
    """Decodes with the drafter's own schedule, and looks whether drafting pays on this machine."""
    options = DraftOptions.from_generation_config(case.drafter.generation_config)
    if options.num_assistant_tokens_schedule != "heuristic" or options.draft_tree != "dynamic":
        return None
    prompts = case.all_prompts[:_PROMPTS_OF_COST]
    found = case.decode(prompts, "measuring costs", num_assistant_tokens_schedule="heuristic")
    acceleration = target_acceleration(case.target, reads_layers=bool(case.drafter.config.feature_layers))
    # The statistics of all context lengths are the same.
    key = CostKey.of(case.target, 0, options.num_assistant_tokens, 1, acceleration.is_packed, acceleration.sizes)
    stats = acceptance_stats_of(case.drafter, case.target).under(key)
    cost = stats.rate * stats.cost
    # Of answers of a token or two nothing is drafted, whatever it costs.
    is_short = stats.drafted_rounds == 0 and found.rounds <= 2 * len(prompts)
    if is_short or stats.accepted_tokens > cost:
        return None
    evidence = (
        f"A drafted round is expected to have {stats.accepted_tokens:.2f} draft tokens accepted, and takes as much "
        f"longer than a plain step as plain decoding needs for {cost:.2f} tokens. "
        f"{found.drafted_tokens / found.rounds:.1f} draft tokens a round were verified."
    )
    if stats.drafted_rounds == 0:
        evidence = f"No round drafted: in answers of {case.max_new_tokens} tokens it would cost more than it can gain."
    return Finding(
        "cost",
        "Drafting does not pay on this machine, so `generate` pauses it. This is about speed, not acceptance.",
        evidence,
        "`hf-falcon tune` measures what a round costs, and whether fewer threads are faster.",
        0.0,
    )
