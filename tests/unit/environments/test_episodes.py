"""An episode counts once, however many samples it has: in statistics, means and rewards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.episodes import cut_into_samples
from tests.tiny import random_samples, tiny_model
from tests.unit.algorithms.naive import AGGREGATIONS
from tests.unit.recipes import end, make_recipe, plan_of
from tests.unit.stages.test_decoupled_ppo import Table
from tests.unit.stages.test_rows_that_do_not_count import (
    ADVANTAGES,
    GROUP,
    IN_REWARD,
    OF_BODIES,
    OF_PARTS,
    OF_TEAMS,
    PER_TOKEN,
    context_of,
)
from tests.unit.stages.test_rows_that_do_not_count import CASES as LOSSES
from torch import Tensor

from leaderless import algorithms
from leaderless.algorithms import ResponseLoss
from leaderless.algorithms.advantages import ADVANTAGES as BUILT_IN
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.algorithms.losses.topr import ToprLoss
from leaderless.algorithms.losses.vespo import VespoLoss
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.encode import Tokenizer
from leaderless.models.causal_lm import load_causal_lm
from leaderless.observability.metrics import Metrics
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import Workflow, resolve_workflow, stage
from leaderless.rewards.pool import Graded
from leaderless.rewards.protocol import Passage, RewardInput
from leaderless.stages.advantage import advantage, dynamic_sampling, remax
from leaderless.stages.context import ModelRole, StageContext
from leaderless.stages.episodes import Counted, Episodes, count_failures
from leaderless.stages.reward import reward
from leaderless.stages.update import update
from leaderless.training.engine import TrainEngine, UpdateInfo
from leaderless.training.fsdp import FsdpEngine

CASES: dict[str, dict[str, Any]] = ADVANTAGES | {
    "grpo without deviation": {"advantage": {"type": "grpo", "normalize_by_std": False}},
    "reinforce_pp over groups": {"advantage": {"type": "reinforce_pp", "group_baseline": True}},
    "gae without whitening": {"advantage": {"type": "gae", "whiten": False, "discount": 0.9}, "kl": IN_REWARD},
    "gae by length": {"advantage": {"type": "gae", "length_alpha": 0.4, "critic_decay": 1.0}},
    "long responses": {"advantage": {"type": "grpo"}, "overlong": {"buffer_tokens": 3, "filter": True}},
}

Result = TypeVar("Result")
REMAX = functools.cache(lambda: context_of("advantage", {"kl": IN_REWARD}, "remax"))
DAPO = functools.cache(lambda: context_of("keep", {}, "dapo"))


@st.composite
def episodes(draw: st.DrawFn, *, with_greedy: bool = False) -> tuple[Batch, list[list[int]]]:
    """Groups of one to three episodes, and where each is cut into one to five samples."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sizes = [size + with_greedy for size in sizes]
    counts = [draw(st.integers(0, 6)) for _ in range(sum(sizes))]
    cuts = [sorted(draw(st.lists(st.integers(0, count), max_size=4))) for count in counts]
    rewards = [draw(st.sampled_from([0.0, 0.5, 1.0])) for _ in counts]
    flags = [draw(st.tuples(st.booleans(), st.booleans())) for _ in counts]
    noise = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    lengths, total = torch.tensor(counts), sum(counts)
    tokens = Jagged(torch.randint(1, 60, (total,), generator=noise), lengths, "tokens")
    prompts = Jagged.from_lists([[7, 8]] * len(sizes), torch.int64, "prompt_tokens")
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    is_first = [place == 0 or groups[place - 1] != group for place, group in enumerate(groups)]
    columns = {name: 0.1 * torch.randn(total, generator=noise) - 1 for name in PER_TOKEN}
    batch = Batch(
        torch.arange(len(counts)) + 5,
        {
            "tokens": tokens,
            "response_mask": Jagged(torch.ones(total, dtype=torch.bool), lengths, "tokens"),
            "response_lengths": lengths,
            "truncated": torch.tensor([cut for cut, _ in flags]),
            "reward_valid": torch.tensor([valid for _, valid in flags]),
            "rewards": torch.tensor(rewards),
            "policy_versions": Jagged(torch.full((total,), 3), lengths, "response_tokens"),
            "is_greedy": torch.tensor(is_first),
            "turns": Jagged(torch.arange(total) // 2, lengths, "response_tokens"),
            **{name: Jagged(values, lengths, "response_tokens") for name, values in columns.items()},
        },
        Batch(torch.arange(len(sizes)), {"prompt_tokens": prompts}),
        torch.tensor(groups),
    )
    return batch, cuts


@functools.cache
def planned(case: str, node: str, aggregation: str) -> StageContext:
    """The context of a node, which takes long to plan."""
    workflow = "ppo" if CASES[case]["advantage"]["type"] == "gae" else "grpo"
    return context_of(node, {**CASES[case], "aggregation": aggregation}, workflow)


def context_for(case: str, node: str, aggregation: str = "token_mean", model: object = None) -> StageContext:
    role = None if model is None else ModelRole(cast("TrainEngine", model), None)
    return replace(planned(case, node, aggregation), model=role, metrics=Metrics(), state={})


def trained(case: str, aggregation: str, batch: Batch, scores: Tensor) -> tuple[Tensor, ...]:
    """Advantages, the gradient of an update with them, and the numbers that both report."""
    context = context_for(case, "advantage")
    batch = advantage(batch, context)
    policy = Table(scores)
    updated = context_for(case, "policy", aggregation, policy)
    update(batch, updated)
    assert policy.log_probs.grad is not None
    numbers = context.metrics.reduce(GROUP) | updated.metrics.reduce(GROUP)
    numbers.pop("throughput/tokens")  # samples that repeat the tokens before them are more to compute
    states = {**context.state, **updated.state}
    ordered = torch.tensor([value for _, value in sorted({**numbers, **states}.items())], dtype=torch.float64)
    return batch.jagged("advantages").values, policy.log_probs.grad, ordered


@pytest.mark.parametrize("case", CASES)
def test_cutting_episodes_into_samples_changes_neither_advantages_nor_gradients(case: str) -> None:
    @settings(max_examples=max(8, settings.default.max_examples // 4))
    @given(drawn=episodes(), aggregation=st.sampled_from(AGGREGATIONS))
    def check(drawn: tuple[Batch, list[list[int]]], aggregation: str) -> None:
        whole, cuts = drawn
        scores = whole.jagged("old_log_probs").values + 0.05
        expected = trained(case, aggregation, whole, scores)
        result = trained(case, aggregation, cut_into_samples(whole, cuts), scores)
        for value, other in zip(expected, result, strict=True):
            torch.testing.assert_close(other, value, rtol=1e-6, atol=1e-6, equal_nan=True)

    check()


def test_an_episode_is_overlong_if_its_longest_message_is() -> None:
    turns = [[0, 0, 0, 2, 2, 4, 4, 4, 4], [1] * 5, [1], [0, 1, 2, 3, 4, 5]]  # messages of 4, 5, 1 and 1 tokens at most
    lengths = torch.tensor([len(one) for one in turns])
    batch = random_samples([(2, len(one)) for one in turns], siblings=4).with_columns(
        response_lengths=lengths,
        rewards=torch.zeros(4),
        reward_valid=torch.ones(4, dtype=torch.bool),
        truncated=torch.zeros(4, dtype=torch.bool),
        turns=Jagged.from_lists(turns, torch.int32, "response_tokens"),
    )
    context = context_of("advantage", {"overlong": {"buffer_tokens": 2}, "advantage": {"type": "rloo"}})
    found = algorithms.segment_mean(advantage(batch, context).jagged("advantages").values, lengths)
    penalty = torch.tensor([-0.5, -1.0, 0.0, 0.0])  # of 5 tokens at most, over the last 2
    torch.testing.assert_close(found, 4 / 3 * (penalty - penalty.mean()))
    assert context.metrics.reduce(GROUP)["reward/overlong_penalty"] == pytest.approx(-1.5 / 4)


def test_messages_are_told_apart_where_an_environment_makes_them() -> None:
    overlong = {"algorithm": {"overlong": {"buffer_tokens": 2}}}
    assert "turns" in plan_of("grpo", environment="calculator", **overlong)["advantage"].reads
    assert "turns" not in plan_of("grpo", environment="calculator")["advantage"].reads
    assert "turns" not in plan_of("grpo", **overlong)["advantage"].reads


def test_every_advantage_is_cut() -> None:
    assert {*BUILT_IN, "remax"} <= {
        *(case["advantage"]["type"] for case in CASES.values()),
        "remax",
        *OF_TEAMS,
        *OF_BODIES,
        *OF_PARTS,
    }


def gradients(case: str, strength: float) -> list[tuple[Tensor, Tensor]]:
    """Gradients and metrics of an update, of whole episodes and of the same ones cut into samples.

    Log-probabilities differ by about the strength between the policy, the trainer's before it and the engine's.
    """
    counts = [5, 8, 0, 6]
    noise = torch.Generator().manual_seed(3)
    columns = {name: strength * torch.randn(sum(counts), generator=noise) - 2 for name in PER_TOKEN}
    columns["advantages"] = torch.tensor([1.0, -0.5, 2.0, -1.0]).repeat_interleave(torch.tensor(counts))
    whole = random_samples([(2, count) for count in counts], siblings=4).with_columns(
        response_lengths=torch.tensor(counts),
        truncated=torch.zeros(4, dtype=torch.bool),
        reward_valid=torch.ones(4, dtype=torch.bool),
        policy_versions=Jagged(torch.full((sum(counts),), 3), torch.tensor(counts), "response_tokens"),
        **{name: Jagged(values, torch.tensor(counts), "response_tokens") for name, values in columns.items()},
    )
    scores, results = strength * torch.randn(sum(counts), generator=noise) - 2, []
    for batch in (whole, cut_into_samples(whole, [[2], [1, 1, 5], [], [3]])):
        policy = Table(scores)
        context = context_of("policy", LOSSES[case], model=ModelRole(cast("TrainEngine", policy), None))
        update(batch, context)
        assert policy.log_probs.grad is not None
        numbers = sorted(context.metrics.reduce(GROUP).items())
        report = [value for name, value in numbers if name != "throughput/tokens"]
        results.append((policy.log_probs.grad, torch.tensor(report)))
    return results


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_changes_with_the_samples_of_an_episode_only_if_it_judges_them_as_a_whole(case: str) -> None:
    loss = POLICY_LOSSES[LOSSES[case].get("policy_loss", {}).get("type", "ppo")]
    judges_samples = issubclass(loss, ResponseLoss | ToprLoss | VespoLoss) or case.endswith((" sequence", " geometric"))
    whole, cut = gradients(case, strength=1.0)
    assert float(whole[0].abs().max()) > 1e-3
    if judges_samples:
        assert not torch.allclose(cut[0], whole[0], rtol=1e-3)
    else:
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)
    # Each ratio is 1 where nothing has moved: the weights of an episode's samples add up to that of the episode.
    torch.testing.assert_close(*gradients(case, strength=0.0), rtol=1e-5, atol=1e-6)


def test_every_loss_is_cut() -> None:
    assert {case["policy_loss"]["type"] for case in LOSSES.values() if "policy_loss" in case} == {*POLICY_LOSSES}


@given(drawn=episodes(with_greedy=True))
def test_cutting_episodes_changes_nothing_in_remax(drawn: tuple[Batch, list[list[int]]]) -> None:
    whole, cuts = drawn
    results = []
    for batch in (whole, cut_into_samples(whole, cuts)):
        context = replace(REMAX(), metrics=Metrics(), state={})
        made = remax(batch, context)
        assert not made.dense("is_greedy").any()
        results.append((made.jagged("advantages").values, {**context.metrics.reduce(GROUP), **context.state}))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[1][1] == pytest.approx(results[0][1], nan_ok=True)


@given(drawn=episodes())
def test_dynamic_sampling_keeps_the_same_groups_of_episodes(drawn: tuple[Batch, list[list[int]]]) -> None:
    whole, cuts = drawn
    results = []
    for batch in (whole, cut_into_samples(whole, cuts)):
        context = replace(DAPO(), metrics=Metrics())
        kept = dynamic_sampling(batch, context)
        results.append((torch.unique(kept.group_ids).tolist(), context.metrics.reduce(GROUP)))
    assert results[0] == results[1]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_model_gets_the_same_gradient_from_an_episode_in_several_samples(aggregation: str) -> None:
    lengths = torch.tensor([6, 4, 9, 5, 1, 7])
    total, noise = int(lengths.sum()), torch.Generator().manual_seed(4)
    per_token = {
        "advantages": torch.randn(total, generator=noise),
        "rollout_log_probs": torch.randn(total, generator=noise) - 3,
        "policy_versions": torch.zeros(total, dtype=torch.int32),
        "temperatures": torch.rand(total, generator=noise) + 0.5,
    }
    whole = random_samples([(3, length) for length in lengths.tolist()], siblings=3).with_columns(
        response_lengths=lengths,
        truncated=torch.zeros(6, dtype=torch.bool),
        reward_valid=torch.tensor([True, True, True, False, True, True]),
        **{name: Jagged(values, lengths, "response_tokens") for name, values in per_token.items()},
    )
    cuts = [[2, 5], [], [0, 4, 4], [3], [1], [6]]
    gradients = []
    for batch in (whole, cut_into_samples(whole, cuts)):
        config = ModelConfig(path=tiny_model(), compute_dtype="float32")
        model, optimizer = load_causal_lm(config, "policy"), OptimizerConfig(learning_rate=1e-9)
        engine = FsdpEngine(model, config, GROUP, torch.device("cpu"), 40, optimizer=optimizer, num_updates=1)
        seen: dict[str, Tensor] = {}

        def step(allow: object, engine: FsdpEngine = engine, seen: dict[str, Tensor] = seen) -> UpdateInfo:
            seen |= {name: weight.grad.clone() for name, weight in engine.named_weights() if weight.grad is not None}
            return UpdateInfo(1.0, 1e-9)

        engine.optimizer_step = step  # type: ignore[assignment]
        update(batch, context_for("grpo without deviation", "policy", aggregation, engine))
        gradients.append(seen)
    for name, gradient in gradients[0].items():
        assert float((gradients[1][name] - gradient).norm()) < 1e-5 * max(1e-3, float(gradient.norm())), name
    assert max(float(gradient.norm()) for gradient in gradients[0].values()) > 1e-2


def test_three_samples_do_not_weigh_three_times() -> None:
    """Rewards 1, 0 and 0 of three episodes, of which the first has three samples: the mean is 1/3, not 3/5."""
    counts = torch.tensor([3, 1, 1])
    whole = Batch(
        torch.arange(3),
        {
            "tokens": Jagged.from_lists([[1, 2, 3], [4], [5]], torch.int64, "tokens"),
            "response_lengths": counts,
            "truncated": torch.zeros(3, dtype=torch.bool),
            "rewards": torch.tensor([1.0, 0.0, 0.0]),
            "reward_valid": torch.ones(3, dtype=torch.bool),
        },
        Batch(torch.tensor([0])),
        torch.zeros(3, dtype=torch.int64),
    )
    context = context_for("grpo without deviation", "advantage")
    made = advantage(cut_into_samples(whole, [[1, 2], [], []]), context)
    assert made.jagged("advantages").lengths.tolist() == [1, 1, 1, 1, 1]
    torch.testing.assert_close(made.jagged("advantages").values, torch.tensor([2, 2, 2, -1, -1]) / 3)


class Spread:
    """Samples on several ranks, which call a function that gathers once."""

    def __init__(self, batch: Batch, seed: int, num_ranks: int) -> None:
        self.owner = torch.randint(num_ranks, (len(batch),), generator=torch.Generator().manual_seed(seed))
        self.num_ranks = num_ranks

    def call(self, function: Callable[[int, Tensor, Callable[[Tensor], Tensor]], Result]) -> list[Result]:
        """What a function of rank, [n] bool own samples and gathering returns on each rank."""
        sent: list[Tensor] = []
        for rank in range(self.num_ranks):
            function(rank, self.owner == rank, lambda mine: (sent.append(mine), mine)[1])
        return [function(rank, self.owner == rank, lambda _: torch.cat(sent)) for rank in range(self.num_ranks)]


@given(drawn=episodes(), seed=st.integers(0, 99), num_ranks=st.integers(1, 4))
def test_what_is_counted_does_not_depend_on_where_samples_are(
    drawn: tuple[Batch, list[list[int]]], seed: int, num_ranks: int
) -> None:
    whole, cuts = drawn
    batch = cut_into_samples(whole, cuts)
    spread, is_counted = Spread(batch, seed, num_ranks), batch.dense("reward_valid") & ~batch.dense("truncated")

    def counted(rank: int, rows: Tensor, gather: object) -> Counted:
        context = cast("StageContext", SimpleNamespace(gather=gather))
        return Counted.of(batch.select(rows), is_counted[rows], context)

    expected = counted(0, torch.ones(len(batch), dtype=torch.bool), lambda mine: mine)
    for rank, result in enumerate(spread.call(counted)):
        own = spread.owner == rank
        assert torch.equal(result.is_counted, expected.is_counted[own])
        assert torch.equal(result.episodes.lengths, expected.episodes.lengths[own])
        assert torch.equal(result.episodes.is_first, expected.episodes.is_first[own])
    assert int(expected.episodes.is_first.sum()) == len(whole)
    alone = whole.dense("reward_valid") & ~whole.dense("truncated")
    assert int((expected.is_counted & expected.episodes.is_first).sum()) == int(alone.sum())


@given(drawn=episodes(), seed=st.integers(0, 99), num_ranks=st.integers(1, 4))
def test_an_episode_without_a_reward_counts_once_wherever_its_samples_are(
    drawn: tuple[Batch, list[list[int]]], seed: int, num_ranks: int
) -> None:
    whole, cuts = drawn
    batch = cut_into_samples(whole, cuts)
    node = SimpleNamespace(needs_whole_groups=False, layout=SimpleNamespace(ranks=range(num_ranks)))

    def counted(rank: int, rows: Tensor, gather: object) -> tuple[int, int]:
        here = SimpleNamespace(gather=gather, node=node, process_group=SimpleNamespace(rank=rank))
        return count_failures(batch.select(rows), cast("StageContext", here))

    shares = Spread(batch, seed, num_ranks).call(counted)
    expected = int((~whole.dense("reward_valid")).sum()), len(whole)
    assert (sum(failed for failed, _ in shares), sum(count for _, count in shares)) == expected


@stage(reads=["tokens"], writes=["rewards", "reward_valid"])
def grade(batch: Batch, context: StageContext) -> Batch:
    """A stage that gives rewards, and asks for no episodes."""
    return batch


def test_the_episode_of_a_sample_reaches_a_custom_stage_that_gives_rewards() -> None:
    workflow = Workflow("own").node("rollout", run="rollout", role="policy")
    workflow = workflow.node("play", run="tests.episodes:play", after="rollout")
    workflow = end(workflow.node("grade", run=f"{__name__}:grade", after="play"), "grade")
    plan = make_plan(make_recipe(), workflow, Cluster(2))
    assert plan["grade"].reads["episode_ids"] == "play"
    assert not plan["grade"].needs_whole_groups


def test_the_episode_of_a_sample_reaches_every_stage_that_counts() -> None:
    rollout = Workflow("own").node("rollout", run="rollout", role="policy")
    workflow = rollout.node("play", run="tests.episodes:play", after="rollout")
    workflow = end(workflow.node("reward", run="reward", after="play"), "reward")
    layout = {"rollout": {"ranks": "0"}, "reward": {"ranks": "1"}, "policy": {"ranks": "2-3"}}
    plan = make_plan(make_recipe(layout=layout), workflow, Cluster(4))
    assert [node.name for node in plan.nodes if "episode_ids" in node.reads] == ["reward", "advantage", "policy"]
    is_whole = {node.name: node.needs_whole_groups for node in plan.nodes}
    assert is_whole == {"rollout": False, "play": False, "reward": True, "advantage": True, "policy": False}
    without = make_plan(make_recipe(), resolve_workflow("grpo"), Cluster(1))
    assert not without["reward"].needs_whole_groups
    assert not any("episode_ids" in node.reads for node in without.nodes)


def two_samples(**columns: Tensor) -> Batch:
    """An episode of two samples, with columns of their own."""
    rewards = {"rewards": torch.tensor([1.0, 1.0]), "reward_valid": torch.tensor([True, True])}
    columns = {"episode_ids": torch.tensor([40, 40]), **rewards, **columns}
    return Batch(torch.tensor([6, 7]), columns, Batch(torch.tensor([1, 2])), torch.tensor([0, 0]))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (two_samples(rewards=torch.tensor([1.0, 0.5])), "samples 6 and 7 of episode 40 have the rewards 1.0 and 0.5"),
        (two_samples(reward_valid=torch.tensor([False, True])), "have as reward_valid False and True: an episode has"),
        (replace(two_samples(), prompt_index=torch.tensor([0, 1])), "of episode 40 belong to the prompts 1 and 2"),
    ],
)
def test_samples_of_an_episode_that_disagree_are_refused(batch: Batch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Episodes.of(batch)


def test_failed_rewards_of_an_episode_may_hold_anything() -> None:
    batch = two_samples(rewards=torch.tensor([float("nan"), 2.0]), reward_valid=torch.tensor([False, False]))
    assert Episodes.of(batch).rows.dense("reward_valid").tolist() == [False]


def test_an_episode_is_graded_once_with_all_that_the_policy_wrote() -> None:
    seen: list[RewardInput] = []

    def grade(samples: list[RewardInput], sources: list[str | None]) -> list[Graded]:
        seen.extend(samples)
        return [Graded(float(len(one.response)), is_valid=True, details={}) for one in samples]

    letters = SimpleNamespace(decode=lambda tokens, **_: "".join(chr(96 + token) for token in tokens))
    context = replace(context_of("reward", {}), tokenizer=cast("Tokenizer", letters), grade=grade)
    masks = [[True, True], [False, False, True], [True, False, True]]
    batch = Batch(
        torch.tensor([1, 2, 3]),
        {
            "tokens": Jagged.from_lists([[1, 2], [1, 2, 3], [4, 5, 6]], torch.int64, "tokens"),
            "response_mask": Jagged.from_lists(masks, torch.bool, "tokens"),
            "truncated": torch.tensor([True, False, False]),
            "episode_ids": torch.tensor([9, 9, 8]),
            "rows": tuple({"question": "?", "answer": "!"} for _ in range(3)),
        },
        Batch(torch.tensor([0])),
        torch.zeros(3, dtype=torch.int64),
    )
    made = reward(batch, context)
    assert [(one.response, one.is_truncated) for one in seen] == [("df", False), ("abc", True)]
    assert seen[0].transcript == (Passage("d"), Passage("e", is_sampled=False), Passage("f"))
    assert seen[1].transcript == (Passage("ab", is_sampled=False), Passage("c"))
    assert made.dense("rewards").tolist() == [3, 3, 2]
    assert context.metrics.reduce(GROUP)["reward/mean"] == 2.5
