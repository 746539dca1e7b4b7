"""Reasons for which a plan is refused: one function for each contract, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leaderless.planner.checks import capabilities, engine_arguments, model_files, optimizers, settings
from leaderless.planner.checks.capabilities import Draft

Check = Callable[[Draft], None]
"""Refuses a draft with a `RecipeError`, or lets it pass."""

OF_NODES: Sequence[Check] = (
    settings.check_responses,
    settings.check_references,
    settings.check_players,
    settings.check_online,
    settings.check_idle_ranks,
    settings.check_layouts,
    capabilities.check_stages_of_teachers,
)
"""Asked once nodes have layouts."""
OF_MODELS: Sequence[Check] = (
    settings.check_evaluation,
    settings.check_role_settings,
    settings.check_role_advantages,
    capabilities.check_backends,
    capabilities.check_frozen,
    optimizers.check_optimizers,
    settings.check_critic,
    capabilities.check_engines,
    capabilities.check_support,
    capabilities.check_vllm,
    capabilities.check_addresses,
    engine_arguments.check_arguments,
    model_files.check_quantized,
    model_files.check_kinds,
    model_files.check_divisible,
)
"""Asked once it is known which models are where."""
OF_SIZES: Sequence[Check] = (
    capabilities.check_heads,
    capabilities.check_engine_parts,
    capabilities.check_adapters,
    capabilities.check_experts_settings,
    capabilities.check_words_of_teachers,
    engine_arguments.check_drafts,
    engine_arguments.check_expert_formats,
    model_files.check_vocabularies,
)
"""Asked once the sizes of models are known, as far as they can be."""
