"""Several policies that play together: the same on any ranks and pools, and they agree on a language."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from examples.signal_game.prepare import prepare
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import succeed
from tests.end_to_end.test_many_ranks import Step, merged, walk_steps

ROOT = Path(__file__).parents[2]
CLOCKS = (
    "time",
    "seconds/",
    "sent/",
    "throughput",
    "rollout/tokens_per_s",
    "rollout/engine_busy",
    "memory",
    "data/",
    "balance/",
    "episode/",
)
POOLS = {
    **dict.fromkeys(("planner_rollout", "planner", "reward", "samples"), "0"),
    **dict.fromkeys(("solver_rollout", "solver", "values", "advantage", "critic"), "1"),
}
CASES: Mapping[str, Mapping[str, object]] = {
    "marft": {"workflow": "marft", "advantage": {"type": "chained_gae", "decay": 0.9}},
    "actions": {"workflow": "marft", "advantage": {"type": "chained_gae", "level": "action", "whiten": "all"}},
    "critics": {"workflow": "marft_critics", "advantage": {"type": "chained_gae", "decay": 0.9}},
    "rotated": {"workflow": "marft", "team": {"rotate_steps": 1}},
    "happo": {"workflow": "happo", "advantage": {"type": "chained_gae", "decay": 0.9}},
    "penalized": {
        "workflow": "marft",
        "advantage": {"type": "chained_gae"},
        "kl": {"coefficient": 1, "place": "reward"},
    },
    "happo-penalized": {"workflow": "happo", "advantage": {"type": "chained_gae"}, "kl": {"coefficient": 1}},
    "dr_mas": {"workflow": "dr_mas"},
    "magrpo": {"workflow": "dr_mas", "advantage": {"type": "magrpo"}},
    "rae": {"workflow": "dr_mas", "advantage": {"type": "rae", "reward": "team"}},
}
WATCHED = {"marft", "critics", "rotated", "happo"}
"""Cases of which a test follows the roles over three steps."""
Walk = Callable[[str, int, bool], list[list[Step]]]


def write_game(folder: Path, case: str, layout: Mapping[str, object], **changes: object) -> Path:
    """The signal game with small batches, as a recipe."""
    own = dict(CASES[case])
    recipe = {
        "name": "team",
        "workflow": own.pop("workflow"),
        "models": {role: str(folder / role) for role in ("planner", "solver", "critic")},
        "data": {
            "train": {"path": str(folder / "digits.jsonl"), "prompt": "digit", "template": "plain"},
            "max_prompt_tokens": 2,
        },
        "environment": {
            "type": "examples.signal_game.game:SignalGame",
            "agents": {"planner": "planner", "solver": "solver"},
            "max_episode_tokens": 4,
        },
        "batch": {"prompts_per_step": 8, "responses_per_prompt": 4, "updates_per_step": 2, "micro_batch_tokens": 512},
        "rollout": {"max_response_tokens": 1, "max_sequences": 64},
        "optimizer": {"learning_rate": 0.01, "epsilon": 0.1},
        "algorithm": own,
        "layout": layout,
        "run": {"directory": str(folder / "runs"), "timeout_s": 60, "reward_processes": 0},
        "loggers": [],
        "steps": 3,
    }
    if recipe["workflow"] in {"dr_mas", "marft_critics"}:
        del recipe["models"]["critic"]  # type: ignore[attr-defined]
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe | changes))
    return path


@pytest.fixture(scope="module")
def walk(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """What the ranks see of each step of a case; each is run once."""
    models = prepare(tmp_path_factory.mktemp("game"))

    @functools.cache
    def walk(case: str, world_size: int, is_apart: bool) -> list[list[Step]]:
        nodes = {"planner_old": "0", "solver_old": "1"} if CASES[case]["workflow"] != "happo" else {}
        if "kl" in CASES[case]:
            nodes |= {"planner_reference": "0", "solver_reference": "1"}
        unused = {"values", "critic"} if CASES[case]["workflow"] in {"dr_mas", "marft_critics"} else set()
        if case == "critics":
            nodes |= {"planner_values": "0", "planner_critic": "0", "solver_values": "1", "solver_critic": "1"}
        pools = {name: {"ranks": own} for name, own in (POOLS | nodes).items() if name not in unused}
        recipe = write_game(models, case, pools if is_apart else {})
        num_steps = 3 if case in WATCHED else 2
        name = f"{case}-{world_size}-{is_apart}"
        return ranks.run(world_size, walk_steps, str(recipe), name, num_steps, init_group=False)

    return walk


IN_SHORT_FORM = (
    *(("marft", True), ("actions", True), ("critics", True), ("happo-penalized", True)),
    *(("rotated", True), ("magrpo", True), ("rae", False)),
)
"""Each workflow and each advantage on two pools or on two ranks that do all."""
PLACES = [*((case, True) for case in CASES), ("marft", False), ("happo", False), ("rae", False)]


@pytest.mark.parametrize(
    ("case", "is_apart"),
    [pytest.param(*place, marks=[] if place in IN_SHORT_FORM else pytest.mark.thorough) for place in PLACES],
)
def test_a_team_learns_the_same_on_two_ranks_and_on_two_pools(walk: Walk, case: str, is_apart: bool) -> None:
    single, several = walk(case, 1, False), walk(case, 2, is_apart)
    for step in range(len(single[0])):
        expected, result = merged(single, step), merged(several, step)
        for name, value in expected["numbers"].items():  # type: ignore[attr-defined]
            if not name.startswith(CLOCKS):
                other = result["numbers"][name]  # type: ignore[index]
                assert other == pytest.approx(value, rel=1e-3, abs=1e-4), f"{name}, step {step + 1}"
        assert expected["weights"].keys() == result["weights"].keys()  # type: ignore[attr-defined]
        for name, weights in expected["weights"].items():  # type: ignore[attr-defined]
            difference = (result["weights"][name] - weights).norm() / weights.norm().clamp(min=1e-3)  # type: ignore[index]
            assert float(difference) < 1e-4, f"{name}, step {step + 1}"


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_planner_and_solver_agree_on_a_language(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    """Of three digits, the solver would guess one in three; benchmarks/signal_game.py has eight, and eight seeds."""
    prepare(tmp_path)
    (tmp_path / "digits.jsonl").write_text("".join(f'{{"digit": "{digit}"}}\n' for digit in "012" * 4))
    changes = {
        "batch": {"prompts_per_step": 12, "responses_per_prompt": 8, "micro_batch_tokens": 4096},
        "optimizer": {"learning_rate": 0.03, "epsilon": 0.1},
        "algorithm": {"entropy_coefficient": 0.2},
        "rollout": {"max_response_tokens": 1, "max_sequences": 128},
        "steps": 20,
    }
    pools = {name: {"ranks": own} for name, own in POOLS.items() if name not in {"values", "critic"}}
    pools |= {"planner_old": {"ranks": "0"}, "solver_old": {"ranks": "1"}}
    recipe = write_game(tmp_path, "dr_mas", pools if world_size > 1 else {}, **changes)
    steps, *_ = ranks.run(world_size, walk_steps, str(recipe), "learn", 20, init_group=False)
    won = [2 * step["numbers"]["reward/mean"] for step in steps]  # of two agents, one is rewarded
    assert sum(won[:3]) / 3 < 0.3
    assert sum(won[-5:]) / 5 > 0.8, won


def moved(steps: list[list[Step]], step: int) -> set[str]:
    """Roles whose weights have changed since the step before."""
    before, after = merged(steps, step - 1)["weights"], merged(steps, step)["weights"]
    return {name.partition(".")[0] for name in after if not torch.equal(before[name], after[name])}  # type: ignore[attr-defined, index]


def test_roles_are_trained_together_or_in_rotation(walk: Walk) -> None:
    assert [moved(walk("marft", 1, False), step) for step in (1, 2)] == [{"planner", "solver", "critic"}] * 2
    assert moved(walk("rotated", 1, False), 1) == {"solver", "critic"}
    assert moved(walk("rotated", 1, False), 2) == {"planner", "critic"}


def test_each_role_may_have_a_critic_of_its_own(walk: Walk) -> None:
    roles = {"planner", "solver", "planner_critic", "solver_critic"}
    assert [moved(walk("critics", 1, False), step) for step in (1, 2)] == [roles] * 2
    numbers = merged(walk("critics", 1, False), 2)["numbers"]
    assert {f"{role}/explained_variance" for role in roles if role.endswith("critic")} <= numbers.keys()  # type: ignore[attr-defined]


def test_a_later_agent_is_trained_with_what_the_update_of_an_earlier_one_has_changed(walk: Walk) -> None:
    """The planner comes first, so that only the solver's update differs from one at the same time."""
    together, in_turn = (walk(case, 1, False) for case in ("marft", "happo"))
    ratios = [merged(in_turn, step)["numbers"]["planner/joint_ratio"] for step in range(3)]  # type: ignore[index]
    assert all(0.5 <= ratio <= 2 and ratio != 1 for ratio in ratios)
    first, other = (merged(steps, 0)["weights"] for steps in (together, in_turn))
    same = {name: torch.equal(weights, other[name]) for name, weights in first.items()}  # type: ignore[attr-defined, index]
    assert all(is_same for name, is_same in same.items() if not name.startswith("solver."))
    assert not all(is_same for name, is_same in same.items() if name.startswith("solver."))


def test_episodes_that_were_played_on_two_pools_are_played_again(ranks: RankPool, tmp_path: Path) -> None:
    """The first rank has left its episodes to the second one, whose journal has them whole."""
    pools = {name: {"ranks": own} for name, own in POOLS.items() if name not in {"values", "critic"}}
    write_game(prepare(tmp_path), "dr_mas", pools, steps=1)
    succeed(ranks, tmp_path, "train", "recipe.yaml", num_ranks=2)
    journal = "runs/team/episodes/step-000001/played.rank-{}.jsonl.gz"
    for target in ("runs/team", journal.format(0), journal.format(1)):
        assert "32 episodes played again; none differs" in succeed(ranks, tmp_path, "env", "replay", target)
