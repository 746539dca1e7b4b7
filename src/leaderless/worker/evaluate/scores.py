"""Scores of graded responses: mean@k, pass@k and maj@k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leaderless.algorithms import majority_is_correct, pass_at_k
from leaderless.config import Recipe
from leaderless.observability.metrics import Metrics
from leaderless.planner.workflow.metrics import pass_at_sizes
from leaderless.planner.workflow.reward_stage import ENVIRONMENT, SUCCESS
from leaderless.rewards.pool import Graded
from leaderless.stages.reward import reward_value


class ResponseScores:
    """Adds up the responses of one rank, prompt by prompt.

    A response is correct when the reward `evaluation.metric`, else the one of largest weight that applies to its row,
    else the environment's (of a body, whether it has done its task), is at least `evaluation.correct_at`.
    Responses that could not be graded, or that a named metric does not apply to, are left out and counted. The majority
    is a vote of the answers which the reward finds in the responses; a prompt without any counts as wrong.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.k = recipe, recipe.evaluation.responses_per_prompt
        self.powers = pass_at_sizes(self.k)
        self.metrics = Metrics()
        # All ranks report the same names, those without prompts too.
        for name in (f"mean@{self.k}", *(f"pass@{j}" for j in self.powers), f"maj@{self.k}"):
            self.metrics.mean(name, 0.0, 0)
        for name in ("failed", "not_applicable", "answered"):
            self.metrics.total(name, 0)

    def add(self, graded: Sequence[Graded]) -> None:
        """Add the responses to one prompt."""
        valid = [g for g in graded if g.is_valid]
        self.metrics.total("failed", len(graded) - len(valid))
        judged = [(g, name) for g in valid if (name := self._metric_of(g)) is not None]
        self.metrics.total("not_applicable", len(valid) - len(judged))
        if not judged:
            return
        threshold = self.recipe.evaluation.correct_at
        correct = [(reward_value(g.details, name) or 0.0) >= threshold for g, name in judged]
        self.metrics.mean(f"mean@{self.k}", sum(correct) / len(correct), 1)
        for k in self.powers:
            if k <= len(correct):
                self.metrics.mean(f"pass@{k}", pass_at_k(len(correct), sum(correct), k), 1)
        answers = [_answer_of(g, name) for g, name in judged]
        self.metrics.total("answered", sum(answer is not None for answer in answers))
        self.metrics.mean(f"maj@{self.k}", majority_is_correct(answers, correct), 1)

    def numbers(self, reduced: Mapping[str, float]) -> dict[str, float]:
        """The scores from the metrics of all ranks, by name as `evaluation/mean@4`.

        There is no majority where no response has an answer, or where there is only one response.
        """
        hidden = {"answered"}
        if not reduced["answered"] or self.k == 1:
            hidden.add(f"maj@{self.k}")
        if not reduced["not_applicable"]:
            hidden.add("not_applicable")
        return {f"evaluation/{name}": value for name, value in reduced.items() if name not in hidden}

    def _metric_of(self, graded: Graded) -> str | None:
        """The reward that decides whether a response is correct; None where a named one does not apply."""
        named, weights = self.recipe.evaluation.metric, self.recipe.reward.options()
        if named is not None:
            return named if named in graded.details else None
        applying = [name for name in weights if name in graded.details]
        environment = next((name for name in (SUCCESS, ENVIRONMENT) if name in graded.details), None)
        return max(applying, key=lambda name: weights[name].weight, default=environment)


def _answer_of(graded: Graded, metric: str) -> str | None:
    outcome = graded.details.get(metric)
    answer = outcome.get("answer") if isinstance(outcome, Mapping) else None
    return answer if isinstance(answer, str) else None
