"""Repeated nodes train on the same groups on any ranks, and use every prompt exactly once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tests.counts import held_bytes
from tests.distributed.ranks import RankPool
from tests.tiny import random_samples, tiny_model, write_additions, write_recipe
from torch import Tensor

from leaderless.data.batch import SIBLING_BITS, Batch, Jagged
from leaderless.observability.console import Display
from leaderless.observability.metrics import Metrics
from leaderless.planner import Cluster, Repeat, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.context import StageContext
from leaderless.stages.update import check_versions
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo

PROMPTS, RESPONSES, ROWS = 6, 4, 64
NUM_STEPS = 3
"""Steps of the runs that are compared: the second has a surplus, which saves the third a round."""
SETTINGS = {"workflow": "dapo", "batch.updates_per_step": 2}


def mixed(group: int, sibling: int) -> tuple[float, bool]:
    """Of five groups, one is all right and one all wrong."""
    return float([True, False, *[sibling % 2 == group % 2] * 3][group % 5]), True


def rare(group: int, sibling: int) -> tuple[float, bool]:
    """Few groups have a signal."""
    return float(group % 8 == 3 and sibling == 0), True


def silent(group: int, sibling: int) -> tuple[float, bool]:
    """No group has a signal."""
    return 1.0, True


def on_first_rank(group: int, sibling: int) -> tuple[float, bool]:
    """Of two ranks that share the prompts of a round, only the first gets groups with a signal."""
    return float(group % PROMPTS < PROMPTS // 2 and sibling == 0), True


def failing(group: int, sibling: int) -> tuple[float, bool]:
    """Some rewards fail; with one valid reward left, a group has no signal."""
    return float(sibling % 2), not (group % 3 == 0 and sibling > 0) and not (group % 3 == 1 and sibling == 0)


@dataclass
class Step:
    """What one rank saw of a step.

    Attributes:
        asked: Group ids given to the rollout, and the question of each.
        trained: Columns of each sample that the update received.
        carried: Group ids that wait for the next step.
        numbers: The step's metrics, on the first rank.
        weights: Weights after the step.
    """

    asked: dict[int, str] = field(default_factory=dict)
    trained: dict[int, dict[str, object]] = field(default_factory=dict)
    carried: set[int] = field(default_factory=set)
    numbers: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(recipe_file: str, overrides: Sequence[str], rule: Callable[[int, int], tuple[float, bool]]) -> list[Step]:
    """Be one worker of a run, or of the rest of it, with rewards that follow a rule."""
    recipe = load_recipe(recipe_file, overrides).recipe
    place = RankInfo.from_environment()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    steps: list[Step] = []
    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        stages, run_step = worker.chain.stages, worker.run_step

        def rollout(batch: Batch, context: StageContext) -> Batch:
            questions = [str(row["question"]) for row in batch.objects("rows")]
            steps[-1].asked |= dict(zip(batch.ids.tolist(), questions, strict=True))
            return stages["rollout"](batch, context)

        def reward(batch: Batch, context: StageContext) -> Batch:
            pairs = [rule(row >> SIBLING_BITS, row % (1 << SIBLING_BITS)) for row in batch.ids.tolist()]
            rewards, valid = (torch.tensor([pair[i] for pair in pairs]) for i in range(2))
            return batch.with_columns(
                rewards=rewards.float(), reward_valid=valid.bool(), reward_details=tuple({} for _ in pairs)
            )

        def update(batch: Batch, context: StageContext) -> Batch:
            names = [name for name in ("tokens", "rollout_log_probs", "old_log_probs") if name in batch]
            columns = {name: batch.jagged(name).rows() for name in names}
            versions = [row.tolist() for row in batch.jagged("policy_versions").rows()]
            for place, row in enumerate(batch.ids.tolist()):
                values = {name: rows[place].tolist() for name, rows in columns.items()}
                steps[-1].trained[row] = {**values, "version": versions[place]}
            return stages["policy"](batch, context)

        def watched_step() -> dict[str, float]:
            steps.append(Step())
            step, step.numbers = steps[-1], run_step()
            surplus = worker.chain.buffer.surplus.batch
            step.carried = set() if surplus is None else set(surplus.group_ids.tolist())
            trained = worker.parts.roles.trained().get("policy")
            step.weights = {} if trained is None else {name: w.clone() for name, w in trained.full_weights()}
            return step.numbers

        end_round = worker.chain.buffer.end_round

        def checked_round(repeat: Repeat) -> None:
            end_round(repeat)
            assert held_bytes(worker.chain.buffer) == 0, "a round leaves nothing behind but what was chosen"

        worker.chain.buffer.end_round = checked_round
        watched = {"rollout": rollout, "reward": reward, "policy": update}
        worker.chain.stages = {**stages, **{name: stage for name, stage in watched.items() if name in stages}}
        worker.run_step = watched_step
        worker.run()
    return steps


def refusal(recipe_file: str, overrides: Sequence[str], rule: Callable[[int, int], tuple[float, bool]]) -> str:
    """The reason why a run stops, as one worker sees it."""
    try:
        train(recipe_file, overrides, rule)
    except RuntimeError as error:
        return str(error)
    return ""


def together(results: Sequence[Sequence[Step]]) -> list[Step]:
    """The steps as all ranks together saw them."""
    return [
        Step(
            {key: value for part in parts for key, value in part.asked.items()},
            {key: value for part in parts for key, value in part.trained.items()},
            set().union(*(part.carried for part in parts)),
            parts[0].numbers,
            {key: value for part in parts for key, value in part.weights.items()},
        )
        for parts in zip(*results, strict=True)
    ]


def runner(ranks: RankPool, folder: Path):
    """Trains in a folder, or continues training."""

    def start(world_size: int, name: str, steps: int, rule=mixed, work=train, rows: int = ROWS, **changes: object):
        layout = changes.pop("layout", {})
        recipe = write_recipe(
            folder,
            tiny_model(num_layers=1),
            {
                **SETTINGS,
                "batch.prompts_per_step": PROMPTS,
                "batch.responses_per_prompt": RESPONSES,
                **({"layout": layout} if layout else {}),
                **{key.replace("__", "."): value for key, value in changes.items()},
            },
        )
        write_additions(folder / "train.jsonl", rows)
        overrides = [f"name={name}", f"steps={steps}"]
        results = ranks.run(world_size, work, str(recipe), overrides, rule, init_group=False)
        return together(results) if work is train else results

    return start


@pytest.fixture
def run(ranks: RankPool, tmp_path: Path):
    """Trains, or continues training."""
    return runner(ranks, tmp_path)


@pytest.fixture(scope="module")
def single(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """The steps on one rank, for comparison."""
    return runner(ranks, tmp_path_factory.mktemp("single"))(1, "single", NUM_STEPS)


def samples_of(step: Step) -> dict[int, tuple[object, object]]:
    return {row: (values["tokens"], values["version"]) for row, values in step.trained.items()}


def groups_of(step: Step) -> list[int]:
    return sorted({row >> SIBLING_BITS for row in step.trained})


def has_signal(rule: Callable[[int, int], tuple[float, bool]], group: int) -> bool:
    rewards = [value for value, is_valid in (rule(group, sibling) for sibling in range(RESPONSES)) if is_valid]
    return len(rewards) >= 2 and len(set(rewards)) > 1


def check_accounting(steps: Sequence[Step], rule: Callable[[int, int], tuple[float, bool]], rows: int = ROWS) -> None:
    """Every prompt is asked once, and then trained on, carried over or dropped; the metrics say the same.

    Args:
        steps: Steps of a run.
        rule: Reward and its validity for each prompt and sibling.
        rows: Number of rows of the run's data.
    """
    taken, waiting = 0, list[int]()
    for step in steps:
        numbers = step.numbers
        rounds = int(numbers["sampling/rounds"])
        assert sorted(step.asked) == list(range(taken, taken + rounds * PROMPTS)), "no prompt left out or asked twice"
        taken += rounds * PROMPTS
        candidates = waiting + [group for group in sorted(step.asked) if has_signal(rule, group)]
        assert groups_of(step) == candidates[:PROMPTS]
        assert Counter(row >> SIBLING_BITS for row in step.trained) == dict.fromkeys(groups_of(step), RESPONSES)
        waiting = candidates[PROMPTS:]
        assert sorted(step.carried) == waiting
        assert numbers["sampling/carried"] == len(waiting) < PROMPTS
        assert numbers["sampling/missing"] == PROMPTS - len(groups_of(step))
        kept = numbers.get("sampling/kept", 0)
        assert kept == sum(has_signal(rule, group) for group in step.asked)
        dropped = [numbers.get(f"sampling/dropped_{why}", 0) for why in ("all_right", "all_wrong", "failed")]
        assert kept + sum(dropped) == len(step.asked)
        assert numbers["data/epoch"] == pytest.approx(taken / rows)


def largest_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((value - right[name]).norm() / value.norm()) for name, value in left.items())


LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "4 ranks": (4, {}),
    "rollout on 0-1, update on 2-3": (4, {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}}),
    "repeated nodes without the first rank": (3, {"rollout": {"ranks": "1-2"}, "policy": {"ranks": "0"}}),
    "every node elsewhere": (
        4,
        {
            "rollout": {"ranks": "0-1"},
            "reward": {"ranks": "1-2"},
            "keep": {"ranks": "3"},
            "old": {"ranks": "0"},
            "advantage": {"ranks": "2"},
            "policy": {"ranks": "0-3"},
        },
    ),
    "whole groups come together to be judged": (
        4,
        {"reward": {"tp": 2}, "keep": {"tp": 4}, "policy": {"ranks": "0-3"}},
    ),
}


@pytest.mark.parametrize(
    "layout",
    [  # "every node elsewhere" has separate pools and four ranks, too
        pytest.param(layout, marks=pytest.mark.thorough if layout.startswith(("rollout on", "4 ranks")) else ())
        for layout in LAYOUTS
    ],
)
def test_any_ranks_train_on_the_same_groups_and_account_for_every_prompt(run, single: list[Step], layout: str) -> None:
    world_size, nodes = LAYOUTS[layout]
    several = run(world_size, "several", NUM_STEPS, layout=nodes)
    check_accounting(single, mixed)
    assert single[1].carried, "something is carried over"
    for expected, result in zip(single, several, strict=True):
        assert samples_of(result) == samples_of(expected)
        assert (result.asked, result.carried) == (expected.asked, expected.carried)
        assert largest_difference(expected.weights, result.weights) < 1e-4
        for name, value in expected.numbers.items():
            if name.startswith(("sampling/", "data/", "rollout/staleness")):
                assert result.numbers[name] == pytest.approx(value), name


@pytest.mark.parametrize("world_size", [1, *(pytest.param(size, marks=pytest.mark.thorough) for size in (2, 4))])
def test_no_prompt_is_left_out_or_used_twice_over_epochs(run, world_size: int) -> None:
    rows = 25  # not a multiple of a round's prompts
    steps = run(world_size, "long", 5, rows=rows)
    check_accounting(steps, mixed, rows)
    questions = [question for step in steps for _, question in sorted(step.asked.items())]
    assert len(questions) > 2 * rows
    (expected,) = {tuple(sorted(questions[rows * i : rows * (i + 1)])) for i in range(2)}
    assert len(set(expected)) == rows
    rounds = [step.numbers["sampling/rounds"] for step in steps]
    assert {1, 2} <= set(rounds), "what was carried over saves rounds"


def test_carried_samples_are_as_they_were_sampled_and_one_step_old(run) -> None:
    steps = run(2, "stale", NUM_STEPS)
    assert steps[1].carried
    for number, step in enumerate(steps):
        now = 2 * number
        old = {row for row, values in step.trained.items() if {now} != set(values["version"])}
        assert {row >> SIBLING_BITS for row in old} == (steps[number - 1].carried if number else set())
        assert all(set(step.trained[row]["version"]) == {now - 2} for row in old)
        num_tokens = {row: len(values["version"]) for row, values in step.trained.items()}
        staleness = 2 * sum(num_tokens[row] for row in old) / sum(num_tokens.values())
        assert step.numbers["rollout/staleness"] == pytest.approx(staleness)
        share = len(old) / len(step.trained)
        shares = [step.numbers[f"staleness/share/{age}"] for age in range(3)]
        assert shares == pytest.approx([1 - share, 0, share])
        assert step.numbers["staleness/oldest"] == pytest.approx(2 * share)
        assert (step.numbers["mismatch/effective_samples"] < 1 - 1e-6) == bool(old)
        assert step.numbers["mismatch/kl_by_age/0"] == pytest.approx(0, abs=1e-4)
        for row, values in step.trained.items():
            sampled, scored = torch.tensor(values["rollout_log_probs"]), torch.tensor(values["old_log_probs"])
            is_same = torch.allclose(sampled, scored, atol=1e-4)
            assert is_same == (row not in old), "the trainer scores with the weights that it is about to train"


def test_one_update_of_surplus_needs_no_pass_before_it(run) -> None:
    settings = {"batch__updates_per_step": 1, "algorithm__correction": {"type": "truncate"}}
    expected = run(1, "recomputed", NUM_STEPS, **settings)
    result = run(1, "interpolated", NUM_STEPS, **settings, algorithm__proximal="interpolated")
    assert any(step.numbers["rollout/staleness"] > 0 for step in expected)
    for one, other in zip(expected, result, strict=True):
        assert samples_of(other) == samples_of(one)
        assert all("old_log_probs" not in values for values in other.trained.values())
        assert largest_difference(one.weights, other.weights) < 1e-5
        for name in ("mismatch/kl", "mismatch/effective_samples", "correction/weight", "policy/grad_norm"):
            assert other.numbers[name] == pytest.approx(one.numbers[name], rel=1e-4, abs=1e-6), name


def test_a_step_may_need_no_round(run) -> None:
    carried = sorted(run(1, "resumed", 2)[-1].carried)
    assert carried
    (step,) = run(1, "resumed", 3, batch__prompts_per_step=len(carried))
    assert groups_of(step) == carried
    assert (step.asked, step.numbers["sampling/rounds"], step.carried) == ({}, 0, set())


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(run, single: list[Step], world_size: int) -> None:
    whole = single if world_size == 1 else run(world_size, "whole", NUM_STEPS)
    first = run(world_size, "parts", 2)
    second = run(world_size, "parts", NUM_STEPS)
    assert first[-1].carried
    for expected, result in zip(whole, [*first, *second], strict=True):
        assert (result.asked, result.trained, result.carried) == (expected.asked, expected.trained, expected.carried)
        assert all(torch.equal(value, result.weights[name]) for name, value in expected.weights.items())
    check_accounting([*first, *second], mixed)


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(1, 4, marks=pytest.mark.thorough), pytest.param(4, 1, marks=pytest.mark.thorough), (2, 3)],
)
def test_what_is_carried_over_moves_to_another_number_of_ranks(
    run, single: list[Step], before: int, after: int
) -> None:
    parts = [*run(before, "parts", 2), *run(after, "parts", NUM_STEPS)]
    check_accounting(parts, mixed)
    for expected, result in zip(single, parts, strict=True):
        assert samples_of(result) == samples_of(expected)
        assert largest_difference(expected.weights, result.weights) < 1e-4


def test_a_rank_that_has_nothing_stays_with_the_others(run) -> None:
    single = run(1, "single", 3, on_first_rank)
    several = run(2, "several", 3, on_first_rank)
    check_accounting(several, on_first_rank)
    for expected, result in zip(single, several, strict=True):
        assert samples_of(result) == samples_of(expected)
        assert largest_difference(expected.weights, result.weights) < 1e-4


def test_the_last_round_leaves_fewer_groups_and_they_are_trained(run) -> None:
    layout = {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2"}}
    single = run(1, "single", 2, rare, algorithm__repeat__max_rounds=3)
    several = run(3, "several", 2, rare, algorithm__repeat__max_rounds=3, layout=layout)
    check_accounting(several, rare)
    assert [step.numbers["sampling/rounds"] for step in single] == [3, 3]
    assert [groups_of(step) for step in single] == [[3, 11], [19, 27, 35]]
    for expected, result in zip(single, several, strict=True):
        assert samples_of(result) == samples_of(expected)
        assert expected.numbers["policy/grad_norm"] > 0
        assert largest_difference(expected.weights, result.weights) < 1e-4


def test_too_few_groups_stop_a_run_that_asks_for_it(run) -> None:
    for message in run(2, "stopped", 2, rare, refusal, algorithm__repeat={"max_rounds": 3, "on_exhausted": "stop"}):
        assert re.search(r"has chosen 2 of the 6 groups .*max_rounds=3 rounds", message)


def test_a_step_without_any_group_stops_the_run(run) -> None:
    for message in run(2, "silent", 1, silent, refusal, algorithm__repeat__max_rounds=2):
        assert "has chosen 0 of the 6 groups" in message


def second_step_is_silent(group: int, sibling: int) -> tuple[float, bool]:
    """All rewards of the second of three steps are equal."""
    return float(sibling % 2 == 0 or group // PROMPTS == 1), True


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_without_any_signal_changes_no_weight_by_momentum_or_decay(run, world_size: int) -> None:
    settings = {"workflow": "grpo", "batch__updates_per_step": 1, "optimizer__weight_decay": 0.1}
    steps = run(world_size, "silent", NUM_STEPS, second_step_is_silent, **settings)
    assert [step.numbers["policy/grad_norm"] > 0 for step in steps] == [True, False, True]
    name = "policy/updates_without_signal"
    assert [step.numbers.get(name) for step in steps] == [None, 1, None]
    assert all(torch.equal(value, steps[1].weights[name]) for name, value in steps[0].weights.items())
    assert largest_difference(steps[1].weights, steps[2].weights) > 0
    versions = [{version for values in step.trained.values() for version in values["version"]} for step in steps]
    assert versions == [{0}, {1}, {1}]


@pytest.mark.parametrize(("extra", "is_made"), [({}, False), ({"algorithm__entropy_coefficient": 0.01}, True)])
def test_an_entropy_bonus_is_a_signal(run, extra: Mapping[str, object], is_made: bool) -> None:
    (step,) = run(1, "bonus", 1, silent, workflow="grpo", batch__updates_per_step=1, **extra)
    assert ("policy/updates_without_signal" not in step.numbers) == is_made == (step.numbers["policy/grad_norm"] > 0)


def test_failed_rewards_are_no_signal(run) -> None:
    steps = run(2, "failing", 2, failing)
    check_accounting(steps, failing)
    assert steps[0].numbers["sampling/dropped_failed"] == sum(group % 3 == 0 for group in steps[0].asked) > 0


@pytest.mark.parametrize(("version", "is_refused"), [(5, False), (4, False), (3, False), (2, True), (6, True)])
def test_samples_may_be_as_old_as_surplus_may_be_and_no_older(version: int, is_refused: bool) -> None:
    batch = random_samples([(2, 3)]).with_columns(
        policy_versions=Jagged.from_lists([[5, version, 5]], torch.int32, "response_tokens")
    )
    context = SimpleNamespace(
        role=SimpleNamespace(train_engine=SimpleNamespace(policy_version=5)),
        node=SimpleNamespace(name="policy", max_staleness=2, node=SimpleNamespace(is_carried=True)),
        process_group=SimpleNamespace(rank=0),
        metrics=Metrics(),
        recipe=SimpleNamespace(open_channels={}, online=None),
        step=3,
    )
    if is_refused:
        message = f"drawn by policy version {version}, but version 5 is trained and a token may be 2 behind"
        with pytest.raises(RuntimeError, match=message):
            check_versions(batch, context)
    else:
        check_versions(batch, context)
