# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
`hf-falcon adapt`: continues the training of a drafter on the responses of a fine-tune, or on other prompts, for some
minutes, and measures before and after.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoint_files import name_target, weights_fingerprint
from ..core.drafter import DraftModel, FalconDraftModel
from ..core.target_parts import longest_text
from ..json_files import read_own_object
from ..learning.student import unsupported_reason
from ..training.dialogues import find_data
from ..training.final_tau import decoded_tau
from ..training.prepare import prepare
from ..training.prepare_arguments import PrepareArguments
from ..training.provenance import provenance, refuse_other_run
from ..training.token_file import TokenFile, write_atomically
from ..training.trainer import DraftSamples, FalconTrainer, FalconTrainingArguments
from .adapt_arguments import AdaptArguments, parser
from .card import write_card
from .models import fastest_dtype, load_network, load_target, resolve_device
from .run_arguments import check_output

TOKENS_NAME = "tokens.safetensors"
REPORT_NAME = "adapt.json"
# Tokens of a prompt; dialogues with a longer one are dropped.
_LONGEST_PROMPT = 512


def adapt(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: DraftModel, arguments: AdaptArguments
) -> dict[str, Any]:
    """
    Adapts a drafter to a target and to prompts, and writes it to `arguments.output_dir`. An interrupted call resumes.

    Args:
        target ([`PreTrainedModel`]): the target.
        tokenizer ([`PreTrainedTokenizerBase`]): its tokenizer.
        drafter ([`DraftModel`]): the drafter to start from, in float32; it is trained in place.
        arguments ([`AdaptArguments`]): the arguments; names of models are not read.

    Returns:
        `dict`: "before" and "after", each with "final_tau" and "final_alpha" ([`decoded_tau`]) on the held-out
        prompts; "after" only if the training is complete. "prompts" is their number, "drafter" a hash of the weights
        that adapting began with, "tokens_sha256" one of the data.

    Raises:
        `ValueError`: if the drafter cannot draft for the target; see [`Drafter.check_target`]. If it has no weights
            to train, or another drafter is adapted in that folder.
    """
    drafter.check_target(target)
    if unsupported_reason(drafter) is not None:
        raise ValueError(
            f"`drafter` is a {type(drafter).__name__}, which has no weights that this package trains: give one of "
            "Falcon or EAGLE-3."
        )
    context = longest_text(target.config.get_text_config(decoder=True)) or _LONGEST_PROMPT + arguments.max_new_tokens
    if context <= arguments.max_new_tokens:
        raise ValueError(
            f"`max_new_tokens` is {arguments.max_new_tokens}, and the target's context has {context} tokens, of which "
            "a prompt takes some: lower it."
        )
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    data = prepare(
        PrepareArguments(
            data=arguments.data,
            split=arguments.split,
            chat_template_kwargs=arguments.chat_template_kwargs,
            max_bad_share=arguments.max_bad_share,
            strict=arguments.strict,
            output=str(folder / TOKENS_NAME),
            limit=arguments.limit,
            max_prompt_tokens=min(_LONGEST_PROMPT, context - arguments.max_new_tokens),
            max_new_tokens=arguments.max_new_tokens,
            batch_size=min(64, arguments.limit),
            seed=arguments.seed,
        ),
        target,
        tokenizer,
    )
    held_out = min(arguments.eval_prompts, len(data) - 1)
    prompts = [_prompt(data, index) for index in range(len(data) - held_out, len(data))]
    run = provenance(target, data)
    begun = {
        "drafter": weights_fingerprint(drafter),
        "prompts": held_out,
        "tokens_sha256": run["data"]["tokens_sha256"],
    }
    # Earlier versions noted less.
    report = {**begun, **_read_report(folder)}
    if any(report[name] != value for name, value in begun.items()):
        raise ValueError(
            f"`output_dir` is {arguments.output_dir!r}, where another drafter is adapted, or with other data or "
            "another number of held-out prompts: repeat the first command to continue it, or give another folder."
        )
    if "before" not in report:
        report["before"] = decoded_tau(target, drafter, prompts)
    name_target(drafter, target)
    drafter.config.chat_template_kwargs = data.metadata.get("chat_template_kwargs", {})
    trainer = _trainer(target, drafter, data, held_out, arguments)
    checkpoint = get_last_checkpoint(arguments.output_dir)
    if checkpoint is not None:
        refuse_other_run(checkpoint, {**run, "samples_per_step": trainer.args.samples_per_step})
    # More epochs than before are not complete yet.
    report.pop("after", None)
    _write_report(folder, report)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    if trainer.state.global_step >= trainer.state.max_steps:
        report["after"] = decoded_tau(target, drafter, prompts)
        _write_report(folder, report)
    if isinstance(drafter, FalconDraftModel):
        # The card has what was measured.
        write_card(drafter.config, folder)
    return report


def _prompt(data: TokenFile, index: int) -> torch.Tensor:
    token_ids, length = data.sample(index)
    return token_ids[:length]


def _trainer(
    target: PreTrainedModel, drafter: DraftModel, data: TokenFile, held_out: int, arguments: AdaptArguments
) -> FalconTrainer:
    # A drafter with an LSTM reads its rows one after another, and cannot be unrolled.
    unrolls = getattr(drafter.config, "num_lstm_layers", 0) == 0
    args = FalconTrainingArguments(
        output_dir=arguments.output_dir,
        num_train_epochs=arguments.num_train_epochs,
        max_minutes=arguments.max_minutes,
        learning_rate=arguments.learning_rate,
        per_device_train_batch_size=arguments.batch_size,
        warmup_steps=5,
        # Token distributions count more than features: the drafter predicts features already.
        distillation_weight=1.0,
        unroll_passes=3 if unrolls else 1,
        bf16=fastest_dtype(target.device) == torch.bfloat16,
        use_cpu=target.device.type == "cpu",
        save_steps=20,
        save_total_limit=1,
        logging_steps=10,
        report_to=[],
        seed=arguments.seed,
    )
    samples = DraftSamples(data, list(range(len(data) - held_out)), max_length=1024)
    run = {"drafter": arguments.drafter, "target": arguments.target, "data": arguments.data}
    # Trainer runs on the first GPU, whichever was given.
    return FalconTrainer(drafter, target.to(args.device), args, samples, run_arguments=run)


def _read_report(folder: Path) -> dict[str, Any]:
    file = folder / REPORT_NAME
    return read_own_object(file) if file.is_file() else {}


def _write_report(folder: Path, report: dict[str, Any]) -> None:
    write_atomically(folder / REPORT_NAME, (json.dumps(report, indent=2) + "\n").encode())


def main(argv: list[str]) -> int:
    """Runs `hf-falcon adapt`."""
    arguments = AdaptArguments(**vars(parser().parse_args(argv)))
    # A missing file is reported before models are downloaded and loaded.
    find_data(arguments.data)
    check_output("output_dir", arguments.output_dir, drafter=arguments.drafter, target=arguments.target)
    set_seed(arguments.seed)
    device = resolve_device(arguments.device)
    target, tokenizer = load_target(arguments.target, device=device)
    drafter = load_network(arguments.drafter, torch.float32, device)
    report = adapt(target, tokenizer, drafter, arguments)
    before, after = report["before"], report.get("after")
    if after is None:
        print("The training is not complete: the same command resumes it.")
        return 0
    # Empty where the target is decoded plainly; decoding warned why.
    if before and report["prompts"]:
        print(
            f"{report['prompts']} held-out prompts: {1 + before['final_tau']:.2f} tokens a round before, "
            f"{1 + after['final_tau']:.2f} after (tau {before['final_tau']:.2f} and {after['final_tau']:.2f})"
        )
        if after["final_tau"] <= before["final_tau"]:
            print("Nothing was gained: give more dialogues (`limit`) that are like your use, or keep the old drafter.")
    print(f"The adapted drafter is in {arguments.output_dir}")
    return 0
