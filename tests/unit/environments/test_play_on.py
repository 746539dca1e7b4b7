"""Episodes that several roles continue one after the other, on ranks of their own."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from random import Random

import pytest
import torch
from tests.rows import Characters
from tests.unit.environments.scripted import ScriptedEngine, could_be
from tests.unit.recipes import make_recipe, plan_of

from leaderless.config import Recipe, RecipeError
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup
from leaderless.environments.guarded_environment import ThreadEnvironment
from leaderless.environments.journal import JournalDifference, Line, line_of
from leaderless.environments.protocol import Environment, Observation, Task, Turn
from leaderless.environments.replay import replay
from leaderless.observability.metrics import Metrics
from leaderless.planner.workflow import Workflow
from leaderless.rollout.engine import Request
from leaderless.stages.episode_rollout import EarlierTurns, earlier_episodes, play_tasks
from leaderless.stages.episode_samples import Play, Played
from leaderless.stages.rollout import recorded_support

HERE = "tests.unit.environments.test_play_on"
AGENTS = ("planner", "solver")
ROLES = {"planner": "a", "solver": "b"}
VOTERS = {"first": "a", "second": "a", "judge": "b"}
"""Two agents share a policy, and the third has one of its own."""


class Talk(Environment):
    """Planner and solver speak in turn, twice each; what one says rewards the other too."""

    agents = AGENTS
    fails_in_turn = -1

    def reset(self, task: Task, rng: Random) -> Observation:
        self.turn, self.noise = 0, rng.randrange(10)
        return f"{task.get('text', '')}{self.noise}:"

    def act(self, text: str) -> Turn:
        self.turn += 1
        if self.turn == self.fails_in_turn:
            raise KeyError("lost")
        other = AGENTS[self.turn % 2]
        rewards = {"planner": 0.5 * self.turn, "solver": 1.0 if self.turn > 1 else 0.0}
        return Turn(f"({text})", reward=rewards, done=self.turn == 4, agent=other)


class Vote(Environment):
    """Two voters and a judge. The voters act at the same time: neither sees what the other has said."""

    agents = ("first", "second", "judge")

    def reset(self, task: Task, rng: Random) -> Observation:
        self.question, self.said = f"{task.get('text', '')}{rng.randrange(10)}?", list[str]()
        return self.question

    def act(self, text: str) -> Turn:
        self.said.append(text)
        match len(self.said):
            case 1 | 4:
                return Turn(self.question, agent="second")
            case 2 | 5:
                return Turn(f"{self.said[-2]} or {self.said[-1]}", agent="judge")
            case 3:
                return Turn(f"again: {self.question}", agent="first")
        return Turn(done=True, reward=1.0)


class Lost(Talk):
    """Raises an error in what the solver says first."""

    fails_in_turn = 2


class LostAtOnce(Talk):
    """Raises an error in what the planner says first."""

    fails_in_turn = 1


COUNTER = itertools.count()


class Moody(Talk):
    """Takes a number that is not from `rng`."""

    def reset(self, task: Task, rng: Random) -> Observation:
        super().reset(task, rng)
        return str(next(COUNTER) % 10)


class Tokenizer(Characters):
    all_special_tokens = ()


def recipe_of(environment: type, role: str | None = None) -> Recipe:
    section: dict[str, object] = {"type": f"{HERE}:{environment.__name__}"}
    if role:
        section["agents"] = VOTERS if environment is Vote else ROLES
    return make_recipe(
        environment=section,
        data={"train": {"path": "rows.jsonl", "template": "plain"}},
        rollout={"max_response_tokens": 4},
        batch={"responses_per_prompt": 2},
    )


def letters(request: Request) -> list[int]:
    """What is said depends on what came before and on the number that decides the noise."""
    number = (sum(request.prompt) + 7 * request.sample_ids[0]) % 26
    return [ord("A") + number] * (1 + number % 3)


TASKS = Batch(
    torch.tensor([7, 8]),
    {"rows": ({"text": "x"}, {"text": "y"}), "prompt_tokens": Jagged.from_lists([[2], [2]], torch.int64, "tokens")},
)


def played(environment: type, role: str | None, given: Batch | None = None) -> Played:
    """What a role plays, from the beginning or from given samples."""
    play = Play([SamplingConfig()] * 2, 0, 3 * 4, 5)
    recipe, earlier, tasks = recipe_of(environment, role), None, TASKS
    if given is not None:
        assert given.prompts is not None
        earlier, tasks = earlier_episodes(given, environment.agents, 3), given.prompts  # type: ignore[attr-defined]
    data, engine = [recipe.data.train] * 2, ScriptedEngine(letters)
    return play_tasks(
        engine,  # type: ignore[arg-type]
        play,
        tasks,
        data,  # type: ignore[arg-type]
        recipe,
        Tokenizer(),  # type: ignore[arg-type]
        lambda _: None,
        role=role,
        earlier=earlier,
    )


def assert_same(first: Batch, second: Batch) -> None:
    assert first.ids.tolist() == second.ids.tolist()
    for name, column in first.columns.items():
        other = second.columns[name]
        same = column.to_lists() == other.to_lists() if isinstance(column, Jagged) else list(column) == list(other)
        assert same, name
    assert first.jagged("prompt_tokens").to_lists() == second.jagged("prompt_tokens").to_lists()


def test_roles_that_take_turns_play_what_one_role_plays_alone() -> None:
    """Samples, ids, rewards and turns are the same, also where the rows arrive in another order."""
    alone = played(Talk, None).samples()
    rows = played(Talk, "a").samples()
    assert rows.jagged("turns").to_lists()[0] == [0] * len(rows.jagged("turns").to_lists()[0])
    assert set(rows.dense("actor").tolist()) == {0}
    for role in "bab":
        rows = played(Talk, role, rows.select(torch.arange(len(rows)).flip(0))).samples()
    assert_same(rows, alone)
    assert len(alone) == 8
    assert alone.dense("environment_rewards").tolist() == [5.0, 5.0, 3.0, 3.0] * 2
    assert alone.jagged("turn_rewards").to_lists()[0].count(0.0) == len(alone.jagged("turns").to_lists()[0]) - 2


def test_an_episode_that_fails_later_is_one_empty_row_and_stays_so() -> None:
    rows = played(Lost, "b", played(Lost, "a").samples()).samples()
    assert rows.dense("response_lengths").tolist() == [0] * 4
    assert rows.objects("environment_failed")[0] == {
        "cause": "environment",
        "error": "Lost.act raised KeyError: 'lost'",
    }
    again = played(Lost, "a", rows)
    assert_same(again.samples(), rows)
    assert not again.pump.busy_s, "nothing is asked for it"
    early = played(LostAtOnce, "a").samples()
    assert_same(played(LostAtOnce, "b", early).samples(), early)


def test_an_environment_that_does_something_else_again_fails_the_episode() -> None:
    rows = played(Moody, "b", played(Moody, "a").samples())
    assert rows.first_error() is not None
    assert "has not done the same again in turn 1" in str(rows.first_error())
    assert "let it take all randomness from `rng`" in str(rows.first_error())


def test_agents_that_act_at_one_time_and_share_a_policy_play_as_one_policy_plays_them_all() -> None:
    whole, rows = played(Vote, None).samples(), None
    for role in "abab":
        rows = played(Vote, role, rows).samples()
    assert rows is not None
    assert rows.ids.tolist() == whole.ids.tolist()
    for name in ("tokens", "turns", "rollout_log_probs", "response_mask"):
        assert rows.jagged(name).to_lists() == whole.jagged(name).to_lists()
    masks, tokens = (rows.jagged(name).to_lists() for name in ("response_mask", "tokens"))
    told: dict[tuple[int, int], list[int]] = {}
    for row, actor in enumerate(rows.dense("actor").tolist()):
        assert sorted({*rows.jagged("turns").to_lists()[row]}) == [actor, actor + 3]
        told[int(rows.dense("joint_ids")[row]), actor] = tokens[row][: masks[row].index(True)]
    for play in {play for play, _ in told}:
        assert told[play, 0] == told[play, 1], "the second one has not seen what the first one said"
        assert told[play, 2] != told[play, 1]


def test_metrics_count_what_the_role_has_sampled_itself() -> None:
    rows, metrics = played(Talk, "a").samples(), Metrics()
    later = played(Talk, "b", rows)
    later.report(metrics, 1, 1.0)
    own = later.samples()
    tokens = own.dense("response_lengths")[own.dense("actor") == 1].sum()
    assert metrics.reduce(ProcessGroup((0,), 0))["rollout/response_tokens"] == pytest.approx(float(tokens) / 4)


def test_the_history_of_an_episode_is_found_in_its_samples() -> None:
    rows = played(Talk, None).samples()
    found = earlier_episodes(rows, AGENTS, 3)
    assert [one.seat for one in found] == [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
    assert [[spoken.said.agent for spoken in one.history] for one in found] == [[*AGENTS, *AGENTS]] * 4
    assert isinstance(found[0], EarlierTurns)
    first, third = found[0].history[0], found[0].history[2]
    assert third.context[: len(first.context)] == first.context, "one conversation for each agent"


def test_what_could_be_said_stays_with_each_token_in_samples_and_in_the_history() -> None:
    both = played(Talk, None)
    rows = both.samples().with_columns(both.support())
    tokens, masks = rows.jagged("tokens").to_lists(), rows.jagged("response_mask").to_lists()
    sampled = [[token for token, own in zip(*row, strict=True) if own] for row in zip(tokens, masks, strict=True)]
    expected = [[could_be(token) for token in row] for row in sampled]
    assert recorded_support(rows) == expected
    assert len({len(one) for row in expected for one in row}) > 2, "also tokens that could be anything"
    for one in earlier_episodes(rows, AGENTS, 3):
        for spoken in one.history:
            assert list(spoken.said.support) == [could_be(token) for token in spoken.tokens]


def refusal(workflow: Workflow | str, **sections: object) -> str:
    with pytest.raises(RecipeError) as caught:
        plan_of(workflow, **{"models": dict.fromkeys(("planner", "solver", "critic"), "/no/model"), **sections})
    (problem,) = caught.value.problems
    return f"{problem.key}: {problem.message}"


BOTH = {"type": f"{HERE}:Talk", "agents": {"planner": "planner", "solver": "solver"}}
TEAM: dict[str, object] = {
    "environment": BOTH,
    "reward": {},
    "models": dict.fromkeys(("planner", "solver", "critic"), "/no/model"),
    "algorithm": {"advantage": {"type": "chained_gae"}},
    "steps": 7,
}


def test_marft_is_planned_on_one_pool_and_on_two() -> None:
    plan = plan_of("marft", **TEAM)
    assert plan.agents == ("planner", "solver")
    reads = {node.name: node.reads for node in plan.nodes}
    assert reads["advantage"]["values"] == "values"
    assert reads["planner"]["tokens"] == "only_planner"
    assert plan["solver_rollout"].node.agents == ("planner",)
    assert plan["advantage"].node.agents == ("planner", "solver")
    pools = {"planner": {"ranks": "0"}, "planner_rollout": {"ranks": "0"}, "planner_old": {"ranks": "0"}}
    rest = ("solver", "solver_rollout", "solver_old", "values", "critic", "reward", "advantage", "samples")
    pools |= {name: {"ranks": "1"} for name in rest}
    apart = plan_of("marft", world_size=2, **TEAM, layout=pools)
    assert apart["planner"].layout.ranks == (0,)
    assert apart["solver_rollout"].layout.ranks == (1,)


def test_what_no_role_can_play_is_refused() -> None:
    assert "names no agent of role 'solver'" in refusal("marft", environment=f"{HERE}:Talk", reward={})
    swapped = {**BOTH, "agents": {"planner": "solver", "solver": "planner"}}
    assert "environment.agents.planner: is role 'solver', but node 'planner_rollout' begins" in refusal(
        "marft", environment=swapped, reward={}
    )
    few = {**BOTH, "agents": {"planner": "planner"}}
    assert "names planner, but Talk has the agents planner, solver" in refusal("marft", environment=few, reward={})
    strange = {**BOTH, "agents": {"planner": "policy", "solver": "critic"}}
    assert "environment.agents.solver: is role 'critic'" in refusal(
        "grpo", environment=strange, reward={}, models={"policy": "/no/model"}
    )
    assert "names no agent" in refusal("marft")


def test_samples_are_continued_only_behind_a_rollout() -> None:
    workflow = Workflow("x").node("first", run="play_on", role="planner")
    workflow = workflow.node("planner", run="update", role="planner", after="first")
    assert "no node before 'first' samples" in refusal(workflow, environment=BOTH, reward={})
    workflow = Workflow("x").node("first", run="rollout", role="planner")
    workflow = workflow.node("second", run="rollout", role="solver", after="first")
    assert "are samples already" in refusal(workflow, environment=BOTH, reward={})


def test_greedy_episodes_are_not_continued() -> None:
    workflow = Workflow("x").node("first", run="rollout_with_greedy", role="planner")
    workflow = workflow.node("second", run="play_on", role="solver", after="first")
    workflow = workflow.node("reward", run="reward", after="second").node("advantage", run="advantage", after="reward")
    workflow = workflow.node("solver", run="update", role="solver", after="advantage", where={"agent": "solver"})
    assert "node 'second' cannot continue such episodes: run 'rollout'" in refusal(
        workflow, environment=BOTH, reward={}
    )


def test_held_out_tasks_of_several_roles_are_refused() -> None:
    data = {"train": {"path": "rows.jsonl"}, "evaluation": {"path": "rows.jsonl"}}
    with pytest.raises(ValueError, match=r"evaluation\.every_steps: one role plays held-out tasks"):
        make_recipe(environment=BOTH, data=data, evaluation={"every_steps": 1})


def test_rotation_needs_several_roles_and_divides_the_updates() -> None:
    assert "no other role than 'policy' samples and is trained" in refusal(
        "grpo", algorithm={"team": {"rotate_steps": 2}}, models={"policy": "/no/model"}
    )
    algorithm = {"advantage": {"type": "chained_gae"}, "team": {"rotate_steps": 2}}
    rotated, together = plan_of("marft", **TEAM | {"algorithm": algorithm}), plan_of("marft", **TEAM)
    assert [(one.role, one.num_updates) for one in rotated.instances] == [("planner", 4), ("solver", 3), ("critic", 7)]
    assert {one.num_updates for one in together.instances} == {7}


def test_settings_of_a_team_are_those_of_all_roles() -> None:
    with pytest.raises(ValueError, match=r"roles\.planner\.algorithm\.team must be that of all roles"):
        make_recipe(roles={"planner": {"algorithm": {"team": {"rotate_steps": 2}}}})


def test_a_role_that_has_sampled_nothing_is_not_updated_in_turn() -> None:
    workflow = Workflow("x").node("first", run="rollout", role="policy").node("reward", run="reward", after="first")
    workflow = workflow.node("advantage", run="advantage", after="reward")
    workflow = workflow.node("other", run="update_in_turn", role="other", after="advantage")
    environment = {"type": f"{HERE}:Talk"}
    models = dict.fromkeys(("policy", "other"), "/no/model")
    assert "'other' has sampled none of the rows" in refusal(
        workflow, environment=environment, reward={}, models=models
    )


def lines_of(some: Played) -> list[Line]:
    return [json.loads(line) for line in some.journal()]


@pytest.mark.parametrize("roles", ["a", "ab", "aba", "abab"])
def test_an_episode_that_is_left_to_another_role_is_played_again_up_to_there(roles: str) -> None:
    rows = None
    for role in roles:
        some = played(Talk, role, rows)
        rows = some.samples()
    config = recipe_of(Talk).environment
    assert config is not None
    place_of = {line_of(one)["id"]: one.place for one in some.episodes if one.place}

    def differences(environment: type, lines: list[Line]) -> list[JournalDifference | None]:
        def open_world() -> ThreadEnvironment:
            return ThreadEnvironment(environment, 60.0, environment.agents)

        again = replay(
            lines, config, open_world, lambda line: replace(place_of[line["id"]], agents=None, history=()), 1000
        )
        return [difference for _, difference in again]

    lines = lines_of(some)
    assert len(lines) == 4
    assert differences(Talk, lines) == [None] * 4
    (first, *_) = differences(Moody, lines)
    assert first is not None
    assert first.place == "first observation"
    said = lines[0]["nodes"][-1]["said"]  # type: ignore[index,call-overload]
    said["reward"] += 1  # type: ignore[operator,index,call-overload]
    (first, *_) = differences(Talk, lines)
    assert first is not None
    assert first.place == f"turn {len(roles)}, said"
