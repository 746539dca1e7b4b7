"""The contract of custom stages that use models: each is one function in this file, and nothing else knows them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankError, RankPool
from tests.end_to_end.test_many_ranks import Step, merged, walk_steps
from tests.tiny import tiny_model, write_recipe
from tests.unit.recipes import only_problem, plan_of

from leaderless import Batch, StageContext, Workflow, stage
from leaderless.config import Recipe, RecipeError
from leaderless.planner.workflow import Node, read_workflow, spec_of, write_workflow
from leaderless.stages.context import UpdateGate, limited
from leaderless.training.engine import Trainable
from leaderless.training.micro_batches import MicroBatch

HERE = "tests.contracts.test_stages_with_models:"
SEQUENCE = ["prompt_tokens", "tokens", "response_mask", "temperatures"]


def refuse_sampling_without_noise(recipe: Recipe, node: Node) -> None:
    """A check of a stage."""
    if recipe.rollout.temperature < 0.5:
        raise RecipeError.at("rollout.temperature", f"must be at least 0.5 for node '{node.name}'")


def reinforce_reads(recipe: Recipe, node: Node) -> list[str]:
    return [*SEQUENCE, "response_lengths", "rewards", *(["truncated"] if recipe.algorithm.overlong.filter else [])]


@stage(
    reads=reinforce_reads,
    roles={"policy": "train"},
    metrics=lambda recipe, node: [f"{node.role}/reinforce"],  # noqa: ARG005
    check=refuse_sampling_without_noise,
)
def reinforce(batch: Batch, context: StageContext) -> Batch:
    """Raise the probability of responses by their reward: one step on the mean over all samples."""
    engine = context.role.train_engine
    count = float(context.sum(torch.tensor(float(len(batch)))))
    weights = torch.repeat_interleave(batch.dense("rewards") / count, batch.dense("response_lengths"))

    losses: list[torch.Tensor] = []
    passes = engine.passes(batch)
    for micro_batch in passes:
        if passes.number == 1:
            engine.discard_gradient()
            losses.clear()
        with passes.memory():
            outputs = engine.forward(micro_batch)
            loss = -(weights[micro_batch.response_index] * outputs.log_probs).sum()
            loss.backward()
            losses.append(loss.detach())
    for loss in losses:
        context.metrics.total(f"{context.node.node.role}/reinforce", loss)
    engine.optimizer_step()
    return batch


@stage(
    reads=SEQUENCE,
    writes=lambda recipe, node, workflow: ["preferred"],  # noqa: ARG005
    roles={"policy": "score", "judge": "score"},
)
def prefer(batch: Batch, context: StageContext) -> Batch:
    """Whether the judge likes a response better than the policy does."""
    scores = [
        torch.stack([row.sum() for row in context.language_model(name).train_engine.log_probs(batch).rows()])
        if len(batch)
        else torch.zeros(0)
        for name in ("policy", "judge")
    ]
    return batch.with_columns(preferred=scores[1] > scores[0])


@stage(reads=["preferred", "rewards"], writes=["rewards"])
def bonus(batch: Batch, context: StageContext) -> Batch:
    """Reward what the judge likes."""
    context.metrics.mean("bonus/preferred", batch.dense("preferred").sum(), len(batch))
    return batch.with_columns(rewards=batch.dense("rewards") + batch.dense("preferred").float())


@stage(reads=SEQUENCE, roles={"policy": "score"}, has_effect=True)
def train_in_secret(batch: Batch, context: StageContext) -> Batch:
    """A stage that trains, and declares that it scores."""
    context.role.train_engine.optimizer_step()
    return batch


@stage(reads=SEQUENCE, writes=["values"], roles={"judge": "score"}, critics=["judge"])
def expect(batch: Batch, context: StageContext) -> Batch:
    """The reward that a critic expects at each token."""
    with pytest.raises(KeyError, match=r"declares no language model 'judge' \(known: none\)"):
        context.language_model("judge")
    return batch.with_columns(values=context.value_model("judge").values(batch))


@stage(
    reads=[*SEQUENCE, "response_lengths", "rewards", "values"],
    roles={"actor": "train", "judge": "train"},
    critics=["judge"],
    metrics=["judge/error"],
)
def actor_critic(batch: Batch, context: StageContext) -> Batch:
    """One step of a policy on rewards minus values, and one of the critic towards the rewards."""
    actor, judge = context.language_model("actor").train_engine, context.value_model("judge")
    count = context.sum(batch.dense("response_lengths").sum().float())
    rewards = torch.repeat_interleave(batch.dense("rewards"), batch.dense("response_lengths"))
    gains = (rewards - batch.jagged("values").values) / count

    def of_actor(micro_batch: MicroBatch) -> torch.Tensor:
        return -(gains[micro_batch.response_index] * actor.forward(micro_batch).log_probs).sum()

    def of_judge(micro_batch: MicroBatch) -> torch.Tensor:
        return (judge.forward(micro_batch) - rewards[micro_batch.response_index]).square().sum() / count

    def learn(engine: Trainable, loss_of: Callable[[MicroBatch], torch.Tensor]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        passes = engine.passes(batch)
        for micro_batch in passes:
            with passes.memory():
                loss = loss_of(micro_batch)
                loss.backward()
                losses.append(loss.detach())
        engine.optimizer_step()
        return losses

    learn(actor, of_actor)
    context.metrics.total("judge/error", sum(learn(judge, of_judge)))
    return batch


@stage(reads=["old_log_probs"], roles={"judge": "train"}, critics=["judge"])
def fit(batch: Batch, context: StageContext) -> Batch:
    """A stage that is planned only."""
    return batch


@stage(reads=["rewards"], writes=["rewards"])
def without_roles(batch: Batch, context: StageContext) -> Batch:
    """A stage that uses no model."""
    return batch.with_columns(rewards=batch.dense("rewards"))


def own_workflow(*, judged: bool = True) -> Workflow:
    workflow = Workflow("own").node("rollout", run="rollout", role="policy")
    workflow = workflow.node("reward", run="reward", after="rollout")
    if judged:
        roles = {"policy": "policy", "judge": "judge"}
        workflow = workflow.node("prefer", run=f"{HERE}prefer", roles=roles, after="rollout")
        workflow = workflow.node("bonus", run=f"{HERE}bonus", after=["prefer", "reward"])
    last = "bonus" if judged else "reward"
    return workflow.node("learn", run=f"{HERE}reinforce", role="policy", after=last)


def critic_workflow() -> Workflow:
    workflow = Workflow("own").node("rollout", run="rollout", role="policy")
    workflow = workflow.node("reward", run="reward", after="rollout")
    workflow = workflow.node("expect", run=f"{HERE}expect", role="critic", after="rollout")
    roles = {"actor": "policy", "judge": "critic"}
    return workflow.node("learn", run=f"{HERE}actor_critic", roles=roles, after=["reward", "expect"])


@pytest.fixture(scope="module")
def walk(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[Step]]]:
    @functools.cache
    def walk(world_size: int, pools: tuple[str, ...] = (), *, has_critic: bool = False) -> list[list[Step]]:
        folder = tmp_path_factory.mktemp("walk")
        (folder / "own.yaml").write_text(write_workflow(critic_workflow() if has_critic else own_workflow()))
        names = ("rollout", "expect" if has_critic else "prefer", "learn")
        changes: dict[str, object] = {
            "workflow": str(folder / "own.yaml"),
            "models": {
                "policy": tiny_model(num_layers=1),
                "critic" if has_critic else "judge": tiny_model("qwen3", num_layers=1),
            },
            "reward": {"tests.end_to_end.own_reward:own_reward": 1.0},
            "layout": {name: {"ranks": own} for name, own in zip(names, pools, strict=False)},
        }
        recipe = write_recipe(folder, tiny_model(num_layers=1), changes)
        return ranks.run(world_size, walk_steps, str(recipe), "walk", 2, init_group=False)

    return walk


@pytest.mark.parametrize(("world_size", "pools"), [(2, ()), (2, ("0", "0", "1"))])
def test_a_stage_that_trains_and_one_that_uses_two_models_give_the_same_on_any_ranks(walk, world_size, pools) -> None:
    single, several = walk(1), walk(world_size, pools)
    for step in range(2):
        expected, result = merged(single, step), merged(several, step)
        assert expected["samples"] == result["samples"]
        for name in ("policy/reinforce", "bonus/preferred", "reward/mean"):
            assert result["numbers"][name] == pytest.approx(expected["numbers"][name], rel=1e-4), name
        for name, weights in expected["weights"].items():
            assert float((result["weights"][name] - weights).norm() / weights.norm().clamp(min=1e-3)) < 1e-4, name
    first, second = merged(single, 0)["weights"], merged(single, 1)["weights"]
    assert {name.partition(".")[0] for name in first} == {"policy"}
    assert any(not second[name].equal(weights) for name, weights in first.items()), "it learns"


@pytest.mark.parametrize(
    ("world_size", "pools"), [pytest.param(2, (), marks=pytest.mark.thorough), (2, ("0", "0", "1"))]
)
def test_stages_score_with_a_critic_and_train_it_on_any_ranks(walk, world_size, pools) -> None:
    single, several = walk(1, has_critic=True), walk(world_size, pools, has_critic=True)
    for step in range(2):
        expected, result = merged(single, step), merged(several, step)
        assert result["numbers"]["judge/error"] == pytest.approx(expected["numbers"]["judge/error"], rel=1e-4)
        for name, weights in expected["weights"].items():
            assert float((result["weights"][name] - weights).norm() / weights.norm().clamp(min=1e-3)) < 1e-4, name
    first, second = merged(single, 0)["weights"], merged(single, 1)["weights"]
    learned = {name.partition(".")[0] for name, weights in first.items() if not second[name].equal(weights)}
    assert learned == {"policy", "critic"}


def test_the_plan_knows_which_roles_of_a_stage_are_critics() -> None:
    plan = plan_of(critic_workflow(), 2, layout={"expect": {"ranks": "1"}, "learn": {"ranks": "0"}})
    found = {(x.role, x.layout.ranks): (x.is_critic, x.is_trained, x.scores) for x in plan.instances}
    assert found == {
        ("policy", (0,)): (False, True, False),
        ("critic", (0,)): (True, True, False),
        ("critic", (1,)): (True, False, True),
    }
    # A critic may learn from the probabilities of the policy.
    before = critic_workflow().node("old", run="log_probs", role="policy", after="rollout")
    assert (
        plan_of(before.node("fit", run=f"{HERE}fit", role="critic", after="old"))["fit"].reads["old_log_probs"] == "old"
    )
    problem = refusal(critic_workflow().node("old", run="log_probs", role="critic", after="rollout"))
    assert problem.key == "nodes.old.role"
    assert "is a critic for node 'expect'" in problem.message


@pytest.mark.parametrize("critics", [["judge"], ["policy"], "policy"])
def test_a_declaration_names_critics_among_its_roles(critics) -> None:
    with pytest.raises(ValueError, match=r"critics=.*(must be one of `roles`|must be a list of roles)"):
        stage(roles={"policy": "generate"}, critics=critics)


MODELS = {"models": {"policy": "/no/such/model", "judge": "/no/other/model"}}


def test_the_plan_knows_what_stages_do_with_models() -> None:
    plan = plan_of(own_workflow(), 2, **MODELS, layout={"prefer": {"ranks": "1"}, "learn": {"ranks": "0"}})
    uses = {(x.role, x.layout.ranks): (x.is_trained, x.generates, x.scores) for x in plan.instances}
    assert uses == {
        ("policy", (0,)): (True, True, False),
        ("policy", (1,)): (False, False, True),
        ("judge", (1,)): (False, False, True),
    }
    assert plan["learn"].spec.is_effective(Recipe.model_construct()), "a stage that trains always runs"
    assert [str(entry) for entry in plan.schedule][-1] == "weights(policy->1)"
    problem = refusal(own_workflow(judged=False), rollout={"temperature": 0.1})
    assert (problem.key, "node 'learn'" in problem.message) == ("rollout.temperature", True)
    assert "truncated" in plan_of(own_workflow(), **MODELS, algorithm={"overlong": {"filter": True}})["learn"].reads
    plan_of(own_workflow(judged=False), checkpoint={"best_metric": "policy/reinforce"})


def test_nodes_with_several_roles_are_written_and_read_back(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(write_workflow(own_workflow()))
    assert read_workflow(tmp_path / "own.yaml") == own_workflow()
    text = (tmp_path / "own.yaml").read_text().replace("judge: judge", "judge: 3")
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(RecipeError, match="must be a mapping from parameters to roles"):
        read_workflow(tmp_path / "own.yaml")


def refusal(workflow: Workflow, **sections: object) -> object:
    with pytest.raises(RecipeError) as caught:
        plan_of(workflow, **sections)
    return only_problem(caught.value)


@pytest.mark.parametrize(
    ("run", "given", "key", "rule"),
    [
        ("without_roles", {"role": "policy"}, "role", "declares no use of a role: declare it"),
        ("without_roles", {"roles": {"x": "policy"}}, "roles", "declares no use of a role: declare it"),
        ("reinforce", {}, "role", "needs a role, as role: policy"),
        ("reinforce", {"roles": {"model": "policy"}}, "roles", "uses the roles policy (train): give each"),
        ("prefer", {"role": "policy"}, "roles", "uses the roles policy (score), judge (score): give each"),
        ("prefer", {"roles": {"policy": "policy"}}, "roles", "uses the roles policy (score), judge (score)"),
        ("reinforce", {"role": "policy", "roles": {"policy": "policy"}}, "roles", "give one of the two"),
        ("reinforce", {"roles": {"policy": "a/b"}}, "roles.policy", "must be a plain word"),
    ],
)
def test_a_node_gives_the_roles_that_its_stage_declares(run, given, key, rule) -> None:
    problem = refusal(own_workflow(judged=False).node("x", run=HERE + run, after="reward", **given))
    assert (problem.key, rule in problem.message) == (f"nodes.x.{key}", True), problem


@pytest.mark.parametrize(
    ("roles", "rule"),
    [({"policy": "teach"}, "one of generate, score, train"), ({"a b": "score"}, "must give plain names")],
)
def test_a_declaration_names_uses_that_exist(roles, rule) -> None:
    with pytest.raises(ValueError, match=rule):
        stage(roles=roles)


def test_a_use_that_is_not_declared_is_refused_when_it_happens(ranks: RankPool, tmp_path: Path) -> None:
    workflow = own_workflow(judged=False).node("secret", run=f"{HERE}train_in_secret", role="policy", after="reward")
    (tmp_path / "own.yaml").write_text(write_workflow(workflow))
    recipe = write_recipe(tmp_path, tiny_model(), {"workflow": str(tmp_path / "own.yaml")})
    message = "'policy' of secret is declared to be used to score, and `optimizer_step` needs 'train'"
    with pytest.raises(RankError, match=message):
        ranks.run(1, walk_steps, str(recipe), "walk", 1, init_group=False)


class Engine:
    policy_version = 3

    def log_probs(self) -> str:
        return "scores"

    def optimizer_step(self) -> str:
        return "trained"

    def phase(self) -> str:
        return "served"


@pytest.mark.parametrize(
    ("use", "allowed"),
    [("score", {"log_probs"}), ("train", {"log_probs", "optimizer_step"}), ("generate", {"phase"})],
)
def test_an_engine_does_what_is_declared(use, allowed) -> None:
    gate = UpdateGate()
    gate.is_passed = False
    engine = limited(Engine(), use, "'policy' of x", gate)
    assert engine.policy_version == 3
    for name in ("log_probs", "optimizer_step", "phase"):
        if name in allowed:
            assert getattr(engine, name)()
        else:
            with pytest.raises(RuntimeError, match=f"`{name}` needs"):
                getattr(engine, name)()
    assert gate.is_passed == (use == "train"), "who may be writing the weights knows that they change"


def test_models_with_other_tokens_are_not_used_by_one_node(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        shutil.copytree(tiny_model(), folder)
    short = {"rollout": {"max_response_tokens": 8}, "data": {"train": {"path": "x"}, "max_prompt_tokens": 8}}
    models = {"models": {"policy": str(own), "judge": str(other)}, **short}
    plan_of(own_workflow(), **models)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    problem = refusal(own_workflow(), **models)
    assert problem.key == "models.judge"
    assert "node 'prefer' uses role 'policy'" in problem.message
    assert "different vocabularies" in problem.message
    models |= {"models": {"policy": str(own), "reference": str(other)}, "algorithm": {"kl": {"coefficient": 0.1}}}
    with pytest.raises(RecipeError, match="node 'reference' uses role 'reference'"):
        plan_of("grpo", **models)


def test_a_stage_declares_its_models_by_name() -> None:
    spec = spec_of(Node("x", f"{HERE}prefer"))
    assert (dict(spec.roles), spec.role_use) == ({"policy": "score", "judge": "score"}, "score")
    assert spec_of(Node("x", "update")).role_use == "train"
