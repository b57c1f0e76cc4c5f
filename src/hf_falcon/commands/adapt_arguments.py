# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon adapt`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .run_arguments import CommandParser

DESCRIPTION = """
`hf-falcon adapt`: continues the training of a drafter on the responses of a fine-tune, or on other prompts, for some
minutes, and measures before and after.
"""


@dataclass
class AdaptArguments:
    """
    Arguments of `hf-falcon adapt`.

    > Parameters that control what is trained

    Args:
        drafter (`str`): drafter to start from: a folder or a name on the Hub, of any method that can be trained.
        target (`str`, *optional*): the fine-tune that it shall draft for. Defaults to the demo's target.
        data (`str`): dialogues whose prompts are like those of your use; as in `hf-falcon prepare`.
        output_dir (`str`): folder of the adapted drafter, of the responses and of checkpoints.

    > Parameters that control how long it takes

    Args:
        limit (`int`, *optional*, defaults to 256): dialogues that the target responds to.
        max_new_tokens (`int`, *optional*, defaults to 128): tokens of a response, at most.
        num_train_epochs (`float`, *optional*, defaults to 2.0): how often training reads the responses.
        max_minutes (`float`, *optional*): stop the training after this many minutes; the same command resumes.

    > Other parameters

    Args:
        eval_prompts (`int`, *optional*, defaults to 8):
            Prompts that are held out, from the end of the data, and decoded before and after.
        learning_rate (`float`, *optional*, defaults to 3e-4): peak learning rate.
        batch_size (`int`, *optional*, defaults to 8): dialogues of a training step.
        seed (`int`, *optional*, defaults to 0): seed of sampled responses and of the training.
        split, chat_template_kwargs, max_bad_share, strict (*optional*): as in `hf-falcon prepare`.
        device (`str`, *optional*): defaults to the first GPU, else the CPU.
    """

    drafter: str = field(metadata={"help": "Drafter to start from: folder or Hub name."})
    data: str = field(metadata={"help": "Dialogues with prompts like yours, as in `hf-falcon prepare`."})
    output_dir: str = field(metadata={"help": "Folder of the adapted drafter, its responses and checkpoints."})
    target: str | None = field(default=None, metadata={"help": "The fine-tune to draft for: folder or Hub name."})
    limit: int = field(default=256, metadata={"help": "Dialogues that the target responds to."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens of a response, at most."})
    num_train_epochs: float = field(default=2.0, metadata={"help": "How often training reads the responses."})
    max_minutes: float | None = field(
        default=None, metadata={"help": "Stop training after this many minutes; the same command resumes."}
    )
    eval_prompts: int = field(default=8, metadata={"help": "Held-out prompts, decoded before and after."})
    learning_rate: float = field(default=3e-4, metadata={"help": "Peak learning rate."})
    batch_size: int = field(default=8, metadata={"help": "Dialogues of a training step."})
    seed: int = field(default=0, metadata={"help": "Seed of responses and training."})
    split: str = field(default="train", metadata={"help": "Split of a data set."})
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Variables of the chat template, as JSON: '{\"enable_thinking\": false}'."}
    )
    max_bad_share: float = field(
        default=0.05, metadata={"help": "Share of records that may be skipped because they cannot be read."}
    )
    strict: bool = field(default=False, metadata={"help": "End at the first record that cannot be read."})
    device: str | None = field(default=None, metadata={"help": "Device; by default the first GPU, else the CPU."})

    def __post_init__(self) -> None:
        from ..training.chat_templates import template_variables
        from ..training.skipped_records import check_bad_share

        for name in ("limit", "max_new_tokens", "eval_prompts", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}: it must be at least 1.")
        for name in ("learning_rate", "num_train_epochs", "max_minutes"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ValueError(f"`{name}` is {value}: give a number above 0.")
        self.chat_template_kwargs = template_variables(self.chat_template_kwargs)
        check_bad_share(self.max_bad_share)
        if self.limit <= self.eval_prompts:
            raise ValueError(
                f"`limit` is {self.limit}, and `eval_prompts` holds out {self.eval_prompts} of them: give a higher "
                "`limit`."
            )


def parser() -> CommandParser:
    """The parser of `hf-falcon adapt`."""
    return CommandParser(AdaptArguments, prog="hf-falcon adapt", description=DESCRIPTION)
