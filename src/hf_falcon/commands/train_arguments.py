# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon train` that say which drafter is trained, and on which data."""

from __future__ import annotations

from dataclasses import dataclass, field

from .architectures import ARCHITECTURES


@dataclass
class DrafterArguments:
    """
    Arguments of `hf-falcon train` beside those of [`FalconTrainingArguments`].

    > Parameters that control what is trained

    Args:
        data (`list[str]`): token files of `hf-falcon prepare`.
        target (`str`, *optional*): name or folder of the target; the demo's target if left out.
        architecture (`str`, *optional*, defaults to `"falcon"`): `"medusa_like"` is what the benchmark compares with.
        init_from (`str`, *optional*): a drafter to start from instead of new weights.
        block_size, num_lstm_layers, num_draft_layers, conditioning_size, feature_layers, draft_vocab_size:
            See [`FalconDraftConfig`]. One token a pass from a linear fusion if the first two are left out; the paper
            has two and two.
        intermediate_size, num_key_value_heads (`int`, *optional*):
            See [`FalconDraftConfig`]. Left out, they are the target's, or less beside a large one
            ([`FalconDraftConfig.from_target`]).

    > Parameters that control the data

    Args:
        max_length (`int`, *optional*, defaults to 512): longer samples are cut.
        eval_samples (`int`, *optional*, defaults to 64): samples held out, from the end of the data.
        features_dir (`str`, *optional*): keep the target's features in this folder, about 2 * hidden size bytes a
            token, instead of computing them anew in every epoch.
        target_dtype (`str`, *optional*): dtype of the target; the one this machine is fastest in if left out.

    > Parameters that control what is measured

    Args:
        final_tau_prompts (`int`, *optional*, defaults to 8): held-out prompts that a finished drafter decodes, for its
            real tau; 0 decodes none.
        plan (`bool`, *optional*, defaults to `False`): print what would run and what it would need, and stop.
    """

    data: list[str] = field(metadata={"help": "Token files of `hf-falcon prepare`."})
    target: str | None = field(default=None, metadata={"help": "Name or folder of the target."})
    architecture: str = field(default="falcon", metadata={"help": f"One of {', '.join(ARCHITECTURES)}."})
    init_from: str | None = field(default=None, metadata={"help": "A drafter to start from."})
    block_size: int = field(default=1, metadata={"help": "Tokens proposed by one draft pass (k)."})
    num_lstm_layers: int = field(default=0, metadata={"help": "LSTM layers; 0 is one linear layer."})
    num_draft_layers: int = field(default=2, metadata={"help": "Decoder layers of the drafter."})
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Width of the drafter's MLPs; made for the target if left out."}
    )
    num_key_value_heads: int | None = field(
        default=None, metadata={"help": "The drafter's key and value heads; made for the target if left out."}
    )
    conditioning_size: int = field(
        default=0, metadata={"help": "Width of the MLP that couples the tokens of a block; 0 for none."}
    )
    feature_layers: list[int] = field(
        default_factory=list, metadata={"help": "Layers of the target that are read beside its feature."}
    )
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Tokens that the drafter scores."})
    max_length: int = field(default=512, metadata={"help": "Longer samples are cut."})
    eval_samples: int = field(default=64, metadata={"help": "Samples held out."})
    features_dir: str | None = field(default=None, metadata={"help": "Keep the target's features here."})
    target_dtype: str | None = field(default=None, metadata={"help": "Dtype of the target."})
    final_tau_prompts: int = field(default=8, metadata={"help": "Held-out prompts decoded in the end; 0 is none."})
    plan: bool = field(default=False, metadata={"help": "Print what would run, and stop."})

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"`architecture` is {self.architecture!r}: choose one of {', '.join(ARCHITECTURES)}.")
        if self.final_tau_prompts < 0:
            raise ValueError(f"`final_tau_prompts` is {self.final_tau_prompts}: give 0 (none) or more.")
