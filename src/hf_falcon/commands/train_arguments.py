# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon train` that say which drafter is trained, and on which data."""

from __future__ import annotations

from dataclasses import dataclass, field

from .architectures import ARCHITECTURES


@dataclass
class DrafterArguments:
    """
    Arguments of `hf-falcon train`, beside [`FalconTrainingArguments`].

    > Parameters that control what is trained

    Args:
        data (`list[str]`): token files of `hf-falcon prepare`.
        target (`str`, *optional*): name or folder of the target; the demo's target if left out.
        architecture (`str`, *optional*, defaults to `"falcon"`):
            `"eagle3"` is EAGLE-3: one decoder layer over three of the target's hidden states, and a head of its own.
            `"medusa_like"` is a method of the benchmark.
        init_from (`str`, *optional*): a drafter to start from instead of new weights. It keeps its sizes, with one
            exception: from a Falcon drafter of one token a pass, `block_size` and `conditioning_size` make a drafter
            of blocks ([`start_blocks`]).
        block_size, num_lstm_layers, num_draft_layers, conditioning_size, feature_layers, draft_vocab_size:
            See [`FalconDraftConfig`]. By default one token a pass, no LSTM layer (a linear fusion) and two decoder
            layers; the paper has two tokens a pass and two LSTM layers. EAGLE-3 always has one token a pass, and by
            default one decoder layer and three feature layers.
        intermediate_size, num_key_value_heads (`int`, *optional*):
            See [`FalconDraftConfig`]. By default the target's, or smaller for a large target
            ([`FalconDraftConfig.from_target`]).

    > Parameters that control the data

    Args:
        max_length (`int`, *optional*, defaults to 512): longer samples are cut.
        eval_samples (`int`, *optional*, defaults to 64): samples held out, from the end of the data.
        vocabulary_data (`list[str]`, *optional*): further token files whose responses are counted for the draft
            vocabulary of a new drafter. Little data has too few of the tokens that the target writes; text of the same
            kind (`hf-falcon prepare --responses data`) has them.
        features_dir (`str`, *optional*): store the target's features in this folder, about 2 * hidden size bytes a
            token, instead of computing them in every epoch. By default those are read that `hf-falcon prepare
            --keep_features` kept, if all the token files have them.
        target_dtype (`str`, *optional*): dtype of the target; by default the fastest on this machine.

    > Parameters that control the measurements

    Args:
        final_tau_prompts (`int`, *optional*, defaults to 8): held-out prompts to decode at the end, which measures
            tau; 0 decodes none.
        plan (`bool`, *optional*, defaults to `False`): print the plan of the run and its needs, and stop.
    """

    data: list[str] = field(metadata={"help": "Token files of `hf-falcon prepare`."})
    target: str | None = field(default=None, metadata={"help": "Name or folder of the target."})
    architecture: str = field(default="falcon", metadata={"help": f"One of {', '.join(ARCHITECTURES)}."})
    init_from: str | None = field(default=None, metadata={"help": "A drafter to start from."})
    block_size: int = field(default=1, metadata={"help": "Tokens proposed by one draft pass (k)."})
    num_lstm_layers: int = field(default=0, metadata={"help": "LSTM layers; 0 is one linear layer."})
    num_draft_layers: int | None = field(
        default=None, metadata={"help": "Decoder layers of the drafter (default: 2; eagle3: 1)."}
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Width of the drafter's MLPs; by default chosen for the target."}
    )
    num_key_value_heads: int | None = field(
        default=None, metadata={"help": "The drafter's key and value heads; by default chosen for the target."}
    )
    conditioning_size: int = field(
        default=0, metadata={"help": "Width of the MLP that couples the tokens of a block; 0 for none."}
    )
    feature_layers: list[int] = field(
        default_factory=list, metadata={"help": "Layers of the target that the drafter reads, beside the last."}
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Number of tokens that the drafter scores; all by default."}
    )
    max_length: int = field(default=512, metadata={"help": "Longer samples are cut."})
    eval_samples: int = field(default=64, metadata={"help": "Samples held out for evaluation, a tenth at most."})
    vocabulary_data: list[str] = field(
        default_factory=list, metadata={"help": "Further token files that are counted for the draft vocabulary."}
    )
    features_dir: str | None = field(default=None, metadata={"help": "Store the target's features in this folder."})
    target_dtype: str | None = field(
        default=None, metadata={"help": "Dtype of the target; by default the fastest here."}
    )
    final_tau_prompts: int = field(default=8, metadata={"help": "Held-out prompts to decode at the end; 0 is none."})
    plan: bool = field(default=False, metadata={"help": "Print the plan of the run and its needs, and stop."})

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"`architecture` is {self.architecture!r}: choose one of {', '.join(ARCHITECTURES)}.")
        for name in ("eval_samples", "final_tau_prompts"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}: give 0 (none) or more.")
        if self.vocabulary_data and (self.draft_vocab_size is None or self.init_from is not None):
            raise ValueError(
                f"`vocabulary_data` is {self.vocabulary_data}, which is counted for a new drafter's "
                "`draft_vocab_size` alone: give that without `init_from`, or leave it out."
            )
        fields = ("block_size", "num_lstm_layers", "conditioning_size")
        for name, value in zip(fields, (1, 0, 0)):
            if self.architecture == "eagle3" and getattr(self, name) != value:
                raise ValueError(f"`{name}` is {getattr(self, name)}: an EAGLE-3 drafter has {value}, leave it out.")
