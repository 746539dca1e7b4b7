"""The judges of a run: what they are asked, as far as a plan knows it, and what those that are models of it need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from leaderless.config import Recipe, RecipeError, nearest
from leaderless.config.judges import JudgeOptions
from leaderless.config.rollout import SamplingConfig
from leaderless.planner.layout import Layout
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import Loop, RoleInstance, answering
from leaderless.planner.workflow import Node, Workflow, spec_of

TEMPLATE_TOKENS = 1024
"""Tokens of a question besides the prompt and the responses that it shows, where a recipe does not limit questions."""


def judge_lines(recipe: Recipe, plan: Plan) -> list[tuple[str, str]]:
    """Each judge that the plan asks: its name, its model and where it answers, and the most that it is asked."""
    node = next((node for node in plan.nodes if node.node.run == "reward"), None)
    if node is None:
        return []
    recipe, lines = node.settings_of(recipe), list[tuple[str, str]]()
    for name, options in recipe.reward.judges().items():
        groups, siblings = recipe.batch.prompts_per_step, recipe.batch.responses_per_prompt
        # Without those that are repeated; rows of other sources and equal ones are fewer.
        asked = f"{groups * siblings * questions_per_response(options, siblings):,} questions a step"
        asked += f", at most {options.max_requests * node.layout.dp:,} requests at a time"
        own = f"role {options.role}: {asked}, of {longest_question(recipe, options):,} tokens"
        lines.append((name, f"{options.model} at {options.url}: {asked}" if options.role is None else own))
    return lines


def questions_per_response(options: JudgeOptions, siblings: int) -> int:
    """Number of questions of a judge for each response, if as many are compared; each pair is asked about twice."""
    return 1 if options.pairwise is None else min(2 * options.pairwise.opponents, siblings - 1)


def longest_question(recipe: Recipe, options: JudgeOptions) -> int:
    """Most tokens that a role is asked by a judge of a recipe."""
    if options.max_question_tokens is not None:
        return options.max_question_tokens
    judges = {*recipe.reward.roles().values()}
    response = recipe.longest_response(["", *(role for role in recipe.roles if role not in judges)])
    return recipe.data.max_prompt_tokens + response * (2 if options.pairwise else 1) + TEMPLATE_TOKENS


def as_judged(recipe: Recipe, role: str) -> Recipe:
    """The recipe as the engine of a judge has to follow it: prompts are questions, and responses are answers."""
    seen = recipe.as_seen_by(role)
    judges = [options for options in recipe.reward.judges().values() if options.role == role]
    update = {
        "max_response_tokens": max(options.max_answer_tokens for options in judges),
        "max_sequences": min(seen.rollout.max_sequences, max(options.max_requests for options in judges)),
    }
    questions = max(longest_question(recipe, options) for options in judges)
    return seen.model_copy(
        update={
            "data": seen.data.model_copy(update={"max_prompt_tokens": questions}),
            "rollout": seen.rollout.model_copy(update=update),
            "batch": seen.batch.model_copy(update={"responses_per_prompt": 1}),
            "algorithm": seen.algorithm.model_copy(update={"replay_experts": False}),
            "environment": None,
            "online": None,
        }
    )


def with_judges(recipe: Recipe, workflow: Workflow) -> Workflow:
    """The workflow with the judges of a recipe that are models, at each node that grades."""
    judges = tuple(recipe.reward.roles().items())
    nodes = (replace(node, judges=judges) if spec_of(node).grades else node for node in workflow.nodes)
    return replace(workflow, nodes=tuple(nodes)) if judges else workflow


def check_judges(recipe: Recipe, workflow: Workflow) -> None:
    """Refuse judges whose role is unknown or used otherwise, and settings that a judge would not follow."""
    for name, role in recipe.reward.roles().items():
        key = f"reward.{name}.role"
        if recipe.body is not None:
            raise RecipeError.at(key, "is given, but the policy of a `body` writes nothing to judge: leave it out")
        if not any(spec_of(node).grades for node in workflow.nodes):
            raise RecipeError.at(
                key,
                f"is '{role}', but no node of the workflow '{workflow.name}' computes rewards, so that no rank would "
                "load it: use a workflow that has one, as grpo, or ask a server",
            )
        if role not in recipe.models:
            others = [one for one in recipe.models if not any(one in _roles_of(node) for node in workflow.nodes)]
            hint = nearest(role, others) if others else ""
            raise RecipeError.at(key, f"is '{role}', but the recipe has no model of this role{hint}: add models.{role}")
        user = next((node for node in workflow.nodes if role in _roles_of(node)), None)
        if user is not None:
            raise RecipeError.at(
                key,
                f"is '{role}', which node '{user.name}' ({user.run}) uses as well: if it is trained, its verdicts "
                "would change with it, and answers that are kept would be those of earlier weights; give the judge a "
                "role of its own, which may have the same model",
            )
        if recipe.models[role].lora is not None:
            raise RecipeError.at(f"models.{role}.lora", "does nothing for a judge, which is not trained: leave it out")
        _check_sampling(recipe, name, role)


def _roles_of(node: Node) -> set[str]:
    return {role for _, role in node.roles} | ({node.role} if node.role else set())


def _check_sampling(recipe: Recipe, name: str, role: str) -> None:
    """Refuse settings of generation that the reward has instead of the role."""
    if role not in recipe.roles or recipe.roles[role].rollout is None:
        return
    own, general = recipe.roles[role].rollout, recipe.rollout
    words = {"temperature": "temperature", "max_response_tokens": "max_answer_tokens"}
    for field in (*SamplingConfig.model_fields, "max_response_tokens", "stop"):
        if getattr(own, field) != getattr(general, field):
            instead = f": set reward.{name}.{words[field]}" if field in words else ": leave it out"
            raise RecipeError.at(f"roles.{role}.rollout.{field}", f"does nothing for a judge{instead}")


def check_context(recipe: Recipe, role: str, max_positions: int) -> None:
    """Refuse questions and answers that do not fit into the context of the judge's model."""
    for name, options in recipe.reward.judges().items():
        question, left = longest_question(recipe, options), max_positions - options.max_answer_tokens
        if options.role == role and question > left:
            remedy = f"set it to at most {left:,}, and longer questions will fail; or shorten prompts or responses"
            raise RecipeError.at(
                f"reward.{name}.max_question_tokens",
                f"a question may have {question:,} tokens and its answer max_answer_tokens="
                f"{options.max_answer_tokens:,}, but the context of role '{role}' ({recipe.models[role].name}) ends at "
                f"{max_positions:,}: {remedy if left > 0 else 'lower max_answer_tokens'}",
            )


def check_judging(recipe: Recipe, instances: Sequence[RoleInstance], loops: Sequence[Loop]) -> None:
    """Refuse evaluations whose responses no rank would judge, or in another loop than they are made in."""
    if not recipe.evaluation.every_steps or recipe.data.preferences is not None:
        return
    answers = answering(instances, recipe.evaluation.role)
    for name, role in recipe.reward.roles().items():
        judge = judge_of(instances, role)
        if judge is None:
            raise RecipeError.at(
                f"reward.{name}.role",
                f"is '{role}', but no node that runs computes rewards, so that held-out responses would have no judge: "
                "set evaluation.every_steps=0, or ask a server",
            )
        both = [next(loop for loop in loops if one.layout.ranks[0] in loop.ranks) for one in (answers, judge)]
        if both[0] is not both[1]:
            raise RecipeError.at(
                f"reward.{name}.role",
                f"is '{role}' on ranks of loop '{both[1].name}', but held-out prompts are answered by "
                f"'{answers.role}' in loop '{both[0].name}', which does not wait for it: give both the same loop under "
                "`layout`, or set evaluation.every_steps=0",
            )


def judge_of(instances: Sequence[RoleInstance], role: str) -> RoleInstance | None:
    """The instance that judges the responses to held-out prompts; None if none runs."""
    return next((one for one in instances if one.is_judge and one.role == role), None)


def shares_ranks(instances: Sequence[RoleInstance], role: str, layout: Layout) -> bool:
    """Whether ranks of a judge have other models, too, which need its memory between its turns."""
    others = (one.layout.ranks for one in instances if (one.role, one.layout.ranks) != (role, layout.ranks))
    return any({*ranks} & {*layout.ranks} for ranks in others)
