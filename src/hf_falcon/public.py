# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The public names of hf_falcon. Importing this module installs the drafters in transformers."""

from transformers import AutoConfig, AutoModel

from . import (
    allowed_tokens,
    attaching,
    batches,
    chains,
    cost_files,
    layer_outputs,
    lookup,
    near_ties,
    quantised_targets,
    sampling,
    static_trees,
    verdict_files,
)
from .attaching import attach, detach
from .core.candidate_generator import FalconCandidateGenerator
from .core.configuration_falcon_draft import FalconDraftConfig
from .core.draft_options import DraftOptions
from .core.draft_statistics import DraftStatistics, FalconGenerateOutput
from .core.drafter import DraftModel, FalconDraftModel
from .core.hook import disable, enable, install
from .core.interfaces import DraftedBlocks, Drafter, DraftHead, DraftSession
from .core.tree import DraftTree, DynamicTree
from .cpu import backend, background_builds
from .cpu.compiling import compile_rounds, compiled_rounds, uncompile_rounds
from .cpu.packing import pack_weights, packed_weights, unpack_weights
from .cpu.row_invariant import row_invariant
from .drafters import falcon_files
from .drafters.auto import AutoDrafter
from .drafters.language_model import CausalLMDrafter
from .drafters.lookup_drafter import LookupDrafter
from .learning.learner import Learner
from .learning.learning_statistics import LearningStatistics
from .learning.options import LearningOptions
from .pipelines import install_in_pipelines
from .static_trees import StaticTree, static_paths
from .training.instant import instant_drafter

__all__ = [
    "AutoDrafter",
    "CausalLMDrafter",
    "DraftHead",
    "DraftModel",
    "DraftOptions",
    "DraftSession",
    "DraftStatistics",
    "DraftTree",
    "DraftedBlocks",
    "Drafter",
    "DynamicTree",
    "FalconCandidateGenerator",
    "FalconDraftConfig",
    "FalconDraftModel",
    "FalconGenerateOutput",
    "LookupDrafter",
    "Learner",
    "LearningOptions",
    "LearningStatistics",
    "StaticTree",
    "attach",
    "compile_rounds",
    "compiled_rounds",
    "detach",
    "disable",
    "enable",
    "instant_drafter",
    "pack_weights",
    "packed_weights",
    "row_invariant",
    "static_paths",
    "uncompile_rounds",
    "unpack_weights",
]

AutoConfig.register(FalconDraftConfig.model_type, FalconDraftConfig, exist_ok=True)
AutoModel.register(FalconDraftConfig, FalconDraftModel, exist_ok=True)
install()
backend.install()
background_builds.install()
falcon_files.install()
for part in (
    allowed_tokens,
    attaching,
    batches,
    chains,
    cost_files,
    layer_outputs,
    lookup,
    near_ties,
    quantised_targets,
    sampling,
    static_trees,
    verdict_files,
):
    part.install()
install_in_pipelines()
