"""Settings of optimizers that have no effect, or that what trains a role does not follow."""

from __future__ import annotations

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import OptimizerConfig
from leaderless.planner.checks.capabilities import Draft
from leaderless.planner.engines import backend_of
from leaderless.planner.workflow.products import PRODUCTS


def check_optimizers(draft: Draft) -> None:
    """What trains a role follows the settings of its optimizer, and all of these have an effect."""
    for instance, recipe in draft.seen():
        if not instance.is_trained:
            continue
        config, backend = recipe.optimizer, recipe.training.backend
        found = _lacking_in(config) or _lacking_in_engine(recipe, backend)
        if found:
            name, problem = found
            raise RecipeError.at(draft.recipe.key_of(f"optimizer.{name}", instance.role), problem)


def _lacking_in(config: OptimizerConfig) -> tuple[str, str] | None:
    """A setting that the optimizer lacks or does not read, and what to do; None if there is none."""
    if config.type == "sgd" and config.learning_rate is None:
        return "learning_rate", "'sgd' needs one: its updates are as long as gradients, which no default fits"
    if config.type == "adamw_8bit" and config.state_dtype != "float32":
        return "state_dtype", (
            f"is {config.state_dtype}, but 'adamw_8bit' keeps moments of matrices with 8 bits, and the few others in "
            "float32: leave it out"
        )
    if config.offload != "none" and config.type == "sgd" and not config.momentum_decay:
        return "offload", f"is {config.offload}, but 'sgd' keeps nothing without momentum: leave it out"
    unread = {"sgd": ("beta1", "beta2", "epsilon"), "muon": ()}
    for name in unread.get(config.type, ("momentum",)):
        if getattr(config, name) != OptimizerConfig.model_fields[name].default:
            return name, f"is {getattr(config, name)}, but '{config.type}' has none: leave it out"
    return None


def _lacking_in_engine(recipe: Recipe, backend: str) -> tuple[str, str] | None:
    """A setting that the engine does not follow, and what to do; None if there is none."""
    config, able, product = recipe.optimizer, backend_of(backend).optimizers, PRODUCTS[recipe.product]
    if config.type not in able:
        return "type", (
            f"is '{config.type}', but the back end '{backend}' has {' and '.join(able)} alone: leave it out, use "
            "another back end, or declare it with @leaderless.train_backend(optimizers=...) if it has it"
        )
    if len(able) == 1 and config.state_dtype != "float32":
        return "state_dtype", f"is {config.state_dtype}, but the back end '{backend}' keeps float32: leave it out"
    if len(able) == 1 and config.offload != "none":
        return "offload", (
            f"is {config.offload}, but the back end '{backend}' keeps what its optimizer needs on the device: leave it "
            "out, or use fsdp"
        )
    if config.type == "muon" and not product.reads_text:
        return "type", (
            "is 'muon', which is for the matrices of layers that read text: which ones of a model of a body are hidden "
            "is not known; use adamw, adamw_8bit or sgd"
        )
    return None
