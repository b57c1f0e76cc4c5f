# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
`hf-falcon doctor`: why few draft tokens are accepted, with the evidence and the remedy of each cause; or, with
`--exactness`, which modules of the target give a token other bits when several tokens run
together. For a target without a drafter, it says what can draft for it on this machine.
"""

from __future__ import annotations

import itertools
import json
import shlex
import textwrap
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ..bench.diagnosis import Case, Diagnosis, Inputs, Reference, Template, diagnose
from ..bench.exactness import SIZES, Exactness, exactness
from ..bench.metrics import ALL_DATA
from ..bench.prompts import read_turns
from ..bench.tables import aligned
from ..core.drafter import DraftModel
from ..core.probe import TREES
from ..cpu.compiling import uncompile_rounds
from ..cpu.row_invariant import row_invariant, unsupported_reason
from ..json_files import read_json
from ..training.chat_templates import chat_inputs, other_variables, read_template, template_variables
from ..training.json_text import short
from ..training.provenance import PROVENANCE_NAME
from ..training.token_file import chat_template_sha256
from ..verdicts import verdict_of_prompt
from .adapt import REPORT_NAME
from .at_hand import at_hand
from .card import final_tau, read_card, tau_of
from .doctor_arguments import DoctorArguments, parser
from .learning import describe, learnt_drafter, learnt_report
from .models import (
    TARGET_NAME,
    encode,
    fixed_context,
    load_network,
    load_target,
    resolve_device,
    shipped_drafter,
    source_named,
    within_context,
)

# Everyday prompts by kind. None is of MT-bench, HumanEval or GSM8K.
PROMPTS = {
    "chat": [
        "My neighbour practises the drums every evening. How can I ask him kindly to stop after nine?",
        "Explain to a pupil why the moon changes its shape during a month.",
    ],
    "code": [
        "Write a Python function that returns the longest word of a text. Explain how it works.",
        "Write an SQL query that counts the orders of each customer in the last month, the largest number first.",
    ],
    "maths": [
        "A train leaves at 14:35 and arrives at 17:10, with one stop of 12 minutes. How long does it move? Show each "
        "step."
    ],
    "summary": [
        "Summarise in two sentences: The library of our town was closed for a year, because water had damaged its "
        "cellar. The books were kept in a school. Last week it opened again, with two new reading rooms, a cafe and "
        "longer hours on Saturdays. The mayor thanked the pupils who had carried the books."
    ],
}

# Chat templates whose first token says which one it is: a tokenizer that has the token, and no template with it, may
# have lost its template.
KNOWN_TEMPLATES = {
    "ChatML": (
        "<|im_start|>",
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n",
    ),
    "Llama 3": (
        "<|start_header_id|>",
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Gemma": (
        "<start_of_turn>",
        "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content }}"
        "<end_of_turn>\n{% endfor %}<start_of_turn>model\n",
    ),
}
# Columns of the report.
_WIDTH = 110


def provenance_of(drafter: str) -> dict[str, Any]:
    """What `hf-falcon train` recorded of a drafter's training; empty if the folder or the repository has nothing."""
    try:
        file = cached_file(drafter, PROVENANCE_NAME, _raise_exceptions_for_missing_entries=False)
        found = {} if file is None else read_json(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("data"), dict) else {}


def reference_of(folder: Path) -> Reference | None:
    """
    The acceptance that the files in a drafter's folder record: of its training, or of its card; `None` where they hold
    none, or cannot be read.
    """
    report, card = folder / REPORT_NAME, folder / "README.md"
    # They may be a stranger's, and hold anything.
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        adapted = read_json(report).get("after") if report.is_file() else None
        if adapted:
            return Reference(
                float(adapted["final_tau"]), f"on held-out prompts after `hf-falcon adapt` ({REPORT_NAME})"
            )
        tau = final_tau(folder)[0]
        if tau is not None:
            return Reference(float(tau), "on held-out prompts after its training (trainer_state.json)")
        values = tau_of(read_card(card)).values() if card.is_file() else None
        if values:
            return Reference(min(values), "is the lowest number of its card", is_lower_bound=True)
    return None


def encode_with(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    template: str | None,
    device: torch.device,
    variables: dict[str, Any] | None = None,
) -> Inputs:
    """As [`encode`], with another chat template; `None` is plain text."""
    if template is None:
        return dict(tokenizer(prompt, return_tensors="pt").to(device))
    return chat_inputs(tokenizer, [{"role": "user", "content": prompt}], device, variables, template)


def other_templates(
    tokenizer: PreTrainedTokenizerBase, trained_target: str | None, given: str | None
) -> dict[str, str | None]:
    """
    Templates that a drafter may have been trained with, other than the tokenizer's own, by a name for the report.

    Args:
        tokenizer ([`PreTrainedTokenizerBase`]): the target's tokenizer.
        trained_target (`str`, *optional*): the target that the drafter names.
        given (`str`, *optional*): a file with a template.
    """
    own = tokenizer.chat_template
    found: dict[str, str | None] = {}
    if given is not None:
        found |= _given_template(given)
    if trained_target is not None:
        try:
            template = AutoTokenizer.from_pretrained(
                trained_target, local_files_only=True, trust_remote_code=False
            ).chat_template
        # It is not on this machine, or damaged, which raises an error of any kind.
        except Exception:
            template = None
        if isinstance(template, str):
            found[f"the template of {trained_target}"] = template
    vocabulary = tokenizer.get_vocab()
    for name, (marker, template) in KNOWN_TEMPLATES.items():
        if marker in vocabulary and marker not in str(own):
            found[f"the {name} template, whose token {marker} the tokenizer has"] = template
    if own is not None:
        found["no template, the text alone"] = None
    return {name: template for name, template in found.items() if template is None or template != own}


def _given_template(path: str) -> dict[str, str | None]:
    return {f"the template in {Path(path).name}": read_template(path)}


def _is_inside(target: str, drafter: str) -> bool:
    """Whether the target that a drafter names is the drafter's own folder or repository, or inside its folder."""
    if target == drafter:
        return True
    folder, place = Path(drafter).resolve(), Path(target).resolve()
    return Path(drafter).is_dir() and (place == folder or folder in place.parents)


def templates_to_try(
    tokenizer: PreTrainedTokenizerBase,
    drafter: DraftModel,
    provenance: dict[str, Any],
    given: str | None,
    texts: list[str],
    device: torch.device,
    variables: dict[str, Any] | None = None,
) -> tuple[list[Template], bool]:
    """
    The templates that [`diagnose`] compares with, and the template of the prompts with those variables that the
    drafter was trained with, if these are others.

    Returns:
        `list[Template]`, and whether the drafter is known to have been trained with another template.
    """
    recorded = provenance.get("data", {})
    variables = variables or {}
    found = []
    given_in_training = getattr(drafter.config, "chat_template_kwargs", None)
    if tokenizer.chat_template is not None and other_variables(given_in_training, variables):
        # The drafter's files are a stranger's.
        with suppress(ValueError, TypeError):
            trained_with = template_variables(given_in_training)
            prompts = [encode(tokenizer, text, device, trained_with) for text in texts]
            found.append(Template(f"`chat_template_kwargs` {short(trained_with)}", prompts, True))
    trained_target = drafter.config.target_name_or_path
    # A template is a program, and the drafter's own files are a stranger's.
    if trained_target is not None and _is_inside(trained_target, drafter.name_or_path):
        trained_target = None
    others = other_templates(tokenizer, trained_target, given)
    is_known = "chat_template_sha256" in recorded
    digest = recorded.get("chat_template_sha256")
    is_other = is_known and digest != chat_template_sha256(tokenizer.chat_template)
    if is_known and not is_other:
        # Nothing but the user suggests another one.
        others = {} if given is None else _given_template(given)
    elif is_known:
        # The one that it was trained with, if it is among them.
        others = {name: each for name, each in others.items() if chat_template_sha256(each) == digest} or others
    # Base models and some drafters are trained on plain text, but nothing suggests it.
    for name, template in others.items():
        prompts = [encode_with(tokenizer, text, template, device, variables) for text in texts]
        found.append(Template(name, prompts, is_other or template is not None))
    return found, is_other


def sampling_temperature(target: PreTrainedModel, given: float | None) -> float | None:
    """The temperature that was given, or the temperature of the target's generation configuration, if it samples."""
    config = target.generation_config
    if given is not None or config is None or not config.do_sample:
        return given
    return 1.0 if config.temperature is None else config.temperature


def adapt_command(target: str | None, drafter: str) -> str:
    """The command that adapts the drafter to the target."""
    words = ["hf-falcon", "adapt", "--drafter", drafter, *([] if target is None else ["--target", target])]
    return shlex.join([*words, "--data", "dialogues.json", "--output_dir", "adapted"])


def report(found: Diagnosis) -> str:
    """A diagnosis as text."""
    parts = [_acceptance(found)] if found.acceptance else []
    causes = [each for each in found.findings if each.cause != "cost"]
    if causes:
        parts.append("Causes found:" if len(causes) > 1 else "Cause found:")
    elif found.acceptance:
        total = found.total
        first = found.accuracy_by_depth[0] if found.accuracy_by_depth else 0.0
        parts.append(
            _filled(
                f"No cause was found: {total.acceptance_by_depth[0] if total.by_depth else 0.0:.0%} of the rounds "
                f"accept a draft token of depth 1, and {first:.0%} of the first choices are right. Train the drafter "
                "longer, on more data, to raise that: see the page Training of the documentation."
            )
        )
    for number, each in enumerate(found.findings, start=1):
        loss = f" That costs about {each.loss:.2f} accepted draft tokens a round." if each.loss else ""
        parts.append(
            "\n".join(
                [
                    _filled(f"{number}. {each.summary}{loss}", "   "),
                    _filled(f"   Evidence: {each.evidence}", "   "),
                    _filled(f"   Remedy: {each.remedy}", "   "),
                ]
            )
        )
    parts += [_filled(f"Note: {note}") for note in found.notes]
    return "\n\n".join(parts)


def _acceptance(found: Diagnosis) -> str:
    """Tables of the acceptance by set of prompts, and by depth."""
    sets = dict(found.acceptance)
    if len(sets) > 1:
        sets[ALL_DATA] = found.total
    by_data = [["data", "prompts", "rounds", "tokens/round", "tau", "alpha"]]
    for name, each in sets.items():
        numbers = [f"{1 + each.tau:.2f}", f"{each.tau:.2f}", f"{each.alpha:.1%}"]
        by_data.append([name, str(len(each.of_prompts)), str(each.rounds), *numbers])
    accepted, choices = found.total.acceptance_by_depth, found.accuracy_by_depth
    depths = range(max(len(accepted), len(choices)))
    rows = [["depth", *(str(depth + 1) for depth in depths)]]
    for name, rates in (("draft token accepted", accepted), ("first choice right", choices)):
        rows.append([name, *(f"{rates[depth]:.0%}" if depth < len(rates) else "-" for depth in depths)])
    return (
        f"{aligned(by_data)}\n\n{aligned(rows)}\n"
        "By depth: where the depth before was accepted, or all first choices before were right."
    )


def _filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _without_drafter(arguments: DoctorArguments) -> int:
    """Says what can draft for the target. Its weights are not loaded."""
    name = str(arguments.target)
    with source_named("target", name):
        ways = at_hand(AutoConfig.from_pretrained(name), name)
    if arguments.json:
        print(json.dumps({"target": name, "drafter": None, "at_hand": ways}))
    else:
        print(f"No `drafter` is given. What can draft for {name} on this machine:\n")
        print("\n".join(_filled(f"{way}: {text}", "   ") for way, text in ways.items()))
    return 0


def exactness_tables(found: list[Exactness]) -> str:
    """Two tables: what differs in a forward, and which modules differ by themselves."""
    forward = [["tokens", "form", "first module that differs", "share", "share of logits"]]
    for each in found:
        share = "0" if each.first is None else f"{each.modules.get(each.first, 0):.5f}"
        form = "tree" if each.is_tree else "path"
        forward.append([str(each.rows), form, each.first or "none", share, f"{each.logits:.5f}"])
    sizes = sorted({each.rows for each in found})
    kinds = {kind: None for each in found for kind in each.alone}
    alone = [["by itself, with equal inputs; tokens:", *map(str, sizes)]]
    for kind in kinds:
        shares = [max(each.alone.get(kind, 0.0) for each in found if each.rows == size) for size in sizes]
        alone.append([kind, *("0" if share == 0 else f"{share:.5f}" for share in shares)])
    return f"{aligned(forward)}\n\n{aligned(alone)}"


def show_exactness(arguments: DoctorArguments) -> int:
    """`hf-falcon doctor --exactness`. Returns 1 if something differs everywhere, also inside [`row_invariant`]."""
    device = resolve_device(arguments.device)
    target, tokenizer = load_target(arguments.target, arguments.dtype, device)
    # Kept code rounds in its own way, and its modules do not run one by one.
    uncompile_rounds(target)
    dtype = target.dtype
    input_ids = encode(tokenizer, PROMPTS["code"][0], device)["input_ids"]
    if (context := fixed_context(target)) is not None:
        # Room for the largest number of tokens.
        input_ids = input_ids[:, : max(1, context - max(SIZES) - 1)]
    if (verdict := verdict_of_prompt(target, input_ids)).way != TREES:
        raise ValueError(
            f"`target` is a {type(target).__name__}, of which no trees are compared: {verdict.reason}. Give another."
        )
    compared = {"as it is": compare_forwards(target, input_ids)}
    if dtype != torch.float32 and unsupported_reason(target) is None:
        with row_invariant(target):
            compared["inside row_invariant"] = compare_forwards(target, input_ids)
    names = {"target": target.name_or_path, "dtype": str(dtype).removeprefix("torch.")}
    if arguments.json:
        print(json.dumps({**names, **{name: [asdict(each) for each in found] for name, found in compared.items()}}))
    else:
        print(f"{names['target']}, {names['dtype']}: one forward over several tokens against forwards over one")
        for name, found in compared.items():
            print(f"\n{name}\n\n{exactness_tables(found)}")
    return 0 if any(all(each.is_exact for each in found) for found in compared.values()) else 1


def compare_forwards(target: PreTrainedModel, input_ids: torch.Tensor) -> list[Exactness]:
    """[`exactness`] for paths and for trees."""
    return [each for is_tree in (False, True) for each in exactness(target, input_ids, is_tree=is_tree)]


def main(argv: list[str]) -> int:
    """Runs `hf-falcon doctor`. Returns 1 if nothing can be drafted at all."""
    arguments = DoctorArguments(**vars(parser().parse_args(argv)))
    if arguments.exactness:
        return show_exactness(arguments)
    if arguments.drafter is None and arguments.target not in (None, TARGET_NAME):
        return _without_drafter(arguments)
    texts = PROMPTS
    if arguments.data:
        texts = {Path(path).stem: [turns[0] for turns in read_turns(path, arguments.limit)] for path in arguments.data}
    name = arguments.drafter or shipped_drafter()
    device = resolve_device(arguments.device)
    target, tokenizer = load_target(arguments.target, arguments.dtype, device)
    dtype = target.dtype
    learnt = learnt_report(Path(name))
    if learnt is not None:
        name = str(learnt_drafter(Path(name)))
    drafter = load_network(name, dtype, device, target)
    provenance = provenance_of(name)
    all_texts = [text for each in texts.values() for text in each]
    variables = template_variables(arguments.chat_template_kwargs)
    templates, is_other = templates_to_try(
        tokenizer, drafter, provenance, arguments.chat_template, all_texts, device, variables
    )
    everyday = [encode(tokenizer, text, device, variables) for each in PROMPTS.values() for text in each]
    if arguments.data and (context := fixed_context(target)) is not None:
        # These are compared with the user's own, which alone have to fit.
        everyday = [inputs for inputs in everyday if inputs["input_ids"].shape[1] < context // 2]
    prompts = {kind: [encode(tokenizer, text, device, variables) for text in each] for kind, each in texts.items()}
    tried = itertools.chain(everyday, *prompts.values(), *(template.prompts for template in templates))
    longest = max(inputs["input_ids"].shape[1] for inputs in tried)
    most = within_context(target, longest, arguments.max_new_tokens)
    found = diagnose(
        Case(
            target,
            drafter,
            prompts,
            lambda token: tokenizer.decode([token]),
            most,
            adapt_command(arguments.target, name),
        ),
        everyday if arguments.data and everyday else None,
        templates,
        is_other,
        sampling_temperature(target, arguments.temperature),
        reference_of(Path(name)) if Path(name).is_dir() else None,
    )
    if text := other_variables(getattr(drafter.config, "chat_template_kwargs", None), variables):
        found.notes.append(
            f"{text[0].upper()}{text[1:]}. Give the same ones, or train or adapt the drafter with yours."
        )
    if arguments.json:
        models = {"target": target.name_or_path, "drafter": name, "dtype": str(dtype).removeprefix("torch.")}
        more = {} if learnt is None else {"learning": learnt}
        print(json.dumps({**models, "max_new_tokens": most, **more, **found.to_dict()}))
    else:
        print(
            f"{target.name_or_path} with {Path(name).name if Path(name).is_dir() else name}, "
            f"{str(dtype).removeprefix('torch.')}, greedy, {most} tokens an answer\n"
        )
        if learnt is not None:
            print(f"{_filled(describe(learnt))}\n")
        print(report(found))
    return 0 if found.acceptance else 1
