"""The KL penalty of a team: each role is compared with its own reference, token by token, next to a naive twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from examples.signal_game.prepare import prepare
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.end_to_end.test_team import write_game
from transformers import AutoModelForCausalLM

from leaderless.data.batch import Batch, Jagged
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.context import StageContext
from leaderless.worker.build.process import open_worker
from leaderless.worker.chain import StageFunction
from leaderless.worker.rank_info import RankInfo

COEFFICIENT = 0.25
REFERENCES = {"planner": "solver", "solver": "planner"}
"""The folder of each role's reference: the other model, so that divergences are large."""
Seen = tuple[list[dict[str, object]], Mapping[str, float]]
"""A token each: role, play, tokens up to it, and what stages have written about it; and the metrics of the step."""


def tokens_of(batch: Batch, agents: tuple[str, ...]) -> list[dict[str, object]]:
    lists = {name: column.to_lists() for name, column in batch.columns.items() if isinstance(column, Jagged)}
    found: list[dict[str, object]] = []
    for row, prompt in enumerate(batch.jagged("prompt_tokens").to_lists()):
        is_sampled = [False] * len(prompt) + lists["response_mask"][row]
        places = [place for place, is_own in enumerate(is_sampled) if is_own]
        for number, place in enumerate(places):
            own = {name: some[row][number] for name, some in lists.items() if len(some[row]) == len(places)}
            until = (prompt + lists["tokens"][row])[: place + 1]
            reward = float(batch.dense("rewards")[row]) if number == len(places) - 1 else 0.0
            role, play = agents[int(batch.dense("agent")[row])], int(batch.dense("joint_ids")[row])
            found.append({**own, "role": role, "play": play, "until": until, "reward": reward})
    return found


def step_of(recipe_file: str) -> Seen:
    """What is known of each token after a run's first step."""
    loaded = load_recipe(recipe_file)
    place = RankInfo.from_environment()
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(place.world_size))
    known: dict[str, Batch] = {}

    def watched(name: str, stage: StageFunction) -> StageFunction:
        def run(batch: Batch, context: StageContext) -> Batch:
            known[name] = stage(batch, context)
            return known[name]

        return run

    with open_worker(loaded.recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        worker.chain.stages = {name: watched(name, stage) for name, stage in worker.chain.stages.items()}
        numbers = worker.run_step()
    samples = known["solver_rollout"]
    for name in ("reward", "solver_before", "solver_reference", "advantage"):
        if name in known:
            assert known[name].ids.tolist() == samples.ids.tolist()
            samples = samples.with_columns({c: known[name][c] for c in plan[name].writes})
    return tokens_of(samples, plan.agents), numbers


def log_prob(folder: Path, until: list[int]) -> float:
    """The log-probability of the last of some tokens under a model, as `transformers` has it."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([until[:-1]])).logits
    return float(logits[0, -1].double().log_softmax(-1)[until[-1]])


@pytest.fixture(scope="module")
def step(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Seen]]:
    """The folder and the first step of a workflow with the penalty in some place."""

    def step(workflow: str, place: str) -> tuple[Path, Seen]:
        folder = prepare(tmp_path_factory.mktemp("game"))
        models = {role: str(folder / role) for role in ("planner", "solver", "critic")}
        if workflow == "dr_mas":
            del models["critic"]
        models |= {f"{role}_reference": str(folder / other) for role, other in REFERENCES.items()}
        advantage = {"type": "chained_gae", "whiten": "none"} if workflow != "dr_mas" else {"type": "dr_mas"}
        algorithm = {"advantage": advantage, "kl": {"coefficient": COEFFICIENT, "place": place}}
        batch = {"prompts_per_step": 4, "responses_per_prompt": 2, "micro_batch_tokens": 512}
        changes = {"models": models, "algorithm": algorithm, "workflow": workflow, "batch": batch, "steps": 1}
        recipe = write_game(folder, "marft", {}, **changes)
        (seen,) = ranks.run(1, step_of, str(recipe), init_group=False)
        return folder, seen

    return step


def test_penalties_in_the_rewards_go_along_the_chain_from_agent_to_agent(
    step: Callable[[str, str], tuple[Path, Seen]],
) -> None:
    folder, (tokens, numbers) = step("marft", "reward")
    kl: dict[int, float] = {}
    for place, token in enumerate(tokens):
        until, role = token["until"], str(token["role"])
        old, reference = (log_prob(folder / name, until) for name in (role, REFERENCES[role]))  # type: ignore[arg-type]
        assert token["ref_log_probs"] == pytest.approx(reference, abs=1e-5)
        assert token["old_log_probs"] == pytest.approx(old, abs=1e-5)
        kl[place] = old - reference  # k1, the estimator in rewards
    assert numbers["reward/kl"] == pytest.approx(sum(kl.values()) / len(kl), rel=1e-4)
    assert abs(numbers["reward/kl"]) > 0.001
    for place, token in enumerate(tokens):
        later = [
            other
            for other in range(len(tokens))
            if tokens[other]["play"] == token["play"] and tokens[other]["turns"] >= token["turns"]  # type: ignore[operator]
        ]
        still = sum(float(tokens[other]["reward"]) - COEFFICIENT * kl[other] for other in later)  # type: ignore[arg-type]
        assert token["returns"] == pytest.approx(still, abs=1e-5), place
    assert {len([t for t in tokens if t["play"] == token["play"]]) for token in tokens} == {2}, "both agents speak"


@pytest.mark.parametrize("workflow", ["marft", "happo", "dr_mas"])
def test_penalties_in_the_loss_are_towards_the_reference_of_the_own_role(
    step: Callable[[str, str], tuple[Path, Seen]], workflow: str
) -> None:
    folder, (tokens, numbers) = step(workflow, "loss")
    for role, other in REFERENCES.items():
        kl = []
        for token in tokens:
            if token["role"] == role:
                new, reference = (log_prob(folder / name, token["until"]) for name in (role, other))  # type: ignore[arg-type]
                kl.append(math.exp(reference - new) - 1 - (reference - new))
        assert numbers[f"{role}/kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)
        assert numbers[f"{role}/kl"] > 0.001
