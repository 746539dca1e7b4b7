"""On-policy distillation: what a teacher would prefer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.base.errors import RecipeError

if TYPE_CHECKING:
    from leaderless.algorithms.algorithm import CheckedRecipe


class DistillationAdvantage(Advantage):
    """How much more likely each token is under the teacher, `models.reference`.

    With the plain policy gradient this is the gradient of the reverse divergence from student to teacher, token by
    token; rewards are not used.

    Formula: A_t = log p_teacher - log p.

    Source: on-policy distillation: MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649, with the student's samples only.
    One deviation from both: the effect of a token on later tokens is left out (a discount of 0).
    """

    type: Literal["distillation"] = "distillation"

    is_per_token: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("old_log_probs", "ref_log_probs")
    judges: ClassVar[str] = "looks at no reward"
    metrics: ClassVar[Mapping[str, str]] = {
        "distillation/divergence": "divergence of the student from the teacher, in nats per token"
    }

    def check(self, recipe: CheckedRecipe) -> None:
        """Refuse a recipe without a teacher."""
        if "reference" not in recipe.models:
            raise RecipeError.at(
                "models", "must name models.reference, the teacher whose log-probabilities are imitated"
            )

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        student, teacher = (inputs.column(name).detach().double() for name in ("old_log_probs", "ref_log_probs"))
        gains = (teacher - student).float()
        return AdvantageOutput(gains, metrics={"distillation/divergence": -gains})
