"""One engine for the adapters of two roles, with a driver that fails on demand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.engines import (
    CopyDriver,
    change_weights,
    colocated,
    expected_log_probs,
    make_external,
    make_trainer,
    sampled_together,
)
from tests.tiny import tiny_model
from tests.unit.recipes import make_recipe
from torch import Tensor

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.remote.messages import Ask, Gain
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.weights.stream import WeightStream
from leaderless.planner import Cluster, make_plan
from leaderless.planner.graph.adapters import companions_of
from leaderless.planner.workflow import Workflow
from leaderless.rollout.engine import Completion, Request, SamplingParams, generate
from leaderless.rollout.external.lora_slots import Host, Hosts, LoraSlot
from leaderless.training.fsdp import FsdpEngine

ROLES = ("planner", "solver")
REQUESTS = [Request([5, 6, 7], [1, 2]), Request([9, 8], [3])]
PARAMS = SamplingParams(SamplingConfig(), 6)
ASK = Ask(1, [5, 6, 7], max_tokens=6, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, end_tokens=[0])


class Adapted(CopyDriver):
    """A driver that leaves requests with other adapters in progress; all adapters are the same here.

    The first response of a role that is `tired` is given up.
    """

    tired = ""

    def load(self, weights: WeightStream, adapter: str = "") -> None:
        others = {number: ask for number, ask in self._open.items() if ask.adapter != adapter}
        grown = {number: self._grown[number] for number in others}
        super().load(weights)
        self._open, self._grown = others, grown

    def prompt_log_probs(self, tokens: Sequence[int], adapter: str = "") -> list[float]:
        assert adapter in ROLES
        return super().prompt_log_probs(tokens)

    def _draw(self, ask: Ask, logits: Tensor) -> Gain:
        gain = super()._draw(ask, logits)
        if ask.adapter == self.tired:
            self.tired = ""
            return gain._replace(tokens=[], log_probs=[], finish_reason="abort")
        return gain

    def close(self) -> None:
        self.calls["close"] += 1
        super().close()


def shared(*failing: tuple[str, int]) -> tuple[Adapted, Host]:
    """A driver that two roles share."""
    driver, host = Adapted(tiny_model(), failing), Host({role: ModelConfig(path=tiny_model()) for role in ROLES})
    host.driver = driver
    return driver, host


def seats(*failing: tuple[str, int]) -> tuple[Adapted, LoraSlot, LoraSlot]:
    """A driver that is awake, and its seats, each with a response in progress."""
    driver, host = shared(*failing)
    planner, solver = (LoraSlot(host, role) for role in ROLES)
    for seat in (planner, solver):
        seat.start()
        seat.wake()
        seat.submit([ASK])
    return driver, planner, solver


def check(trainer: FsdpEngine, groups: list[list[Completion]]) -> None:
    """Compare responses with what a trainer makes of them."""
    for request, group in zip(REQUESTS, groups, strict=True):
        for completion in group:
            assert completion.finish_reason in {"stop", "length"}
            expected = expected_log_probs(trainer, request, completion)
            assert completion.log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("failing", [None, ("step", 3), ("submit", 2), ("load", 9), "a response of the solver"])
def test_roles_that_share_an_engine_lose_nothing_when_it_fails(failing: tuple[str, int] | str | None) -> None:
    driver, host = shared(*([failing] if isinstance(failing, tuple) else ()))
    driver.tired = "solver" if isinstance(failing, str) else ""
    trainer, messages = make_trainer(tiny_model()), list[str]()
    engines = {role: make_external(LoraSlot(host, role), None, messages) for role in ROLES}
    servings = {role: colocated(engine, trainer) for role, engine in engines.items()}
    for groups in sampled_together(servings, REQUESTS, PARAMS).values():
        check(trainer, groups)
    assert not driver.is_awake
    assert driver.calls["start"] == 1 + (failing is not None)
    assert bool(messages) == (failing is not None)
    engines["planner"].close()
    assert driver.calls["close"] == (failing is not None), "the other role still has it"
    engines["solver"].close()
    assert driver.calls["close"] == 1 + (failing is not None)


def test_a_role_whose_weights_change_leaves_those_of_others() -> None:
    _, host = shared()
    trainer = make_trainer(tiny_model())
    servings = {role: colocated(make_external(LoraSlot(host, role)), trainer) for role in ROLES}
    # In the second turn, the planner is known to generate again after the solver, which then awaits an update.
    for order in (("planner", "planner", "solver"), ("planner", "solver", "planner")):
        for role in order:
            with servings[role].phase() as engine:
                check(trainer, generate(engine, REQUESTS, PARAMS))
        change_weights(trainer)


def test_new_adapters_end_what_their_role_has_in_progress_and_nothing_else() -> None:
    driver, planner, solver = seats()
    solver.step()
    assert [gain.id for gain in planner.gains] == [ASK.id]
    planner.load(WeightStream(iter([]), 1))
    assert not planner.gains
    assert [ask.adapter for ask in driver._open.values()] == ["solver"]
    assert [seat for seat, _ in planner._host._owners.values()] == [solver]
    assert [gain.id for gain in solver.step()] == [ASK.id]


@pytest.mark.parametrize("failing", [[], [("abort", 1)]])
def test_a_role_that_leaves_takes_along_what_it_has_in_progress(failing: list[tuple[str, int]]) -> None:
    driver, planner, solver = seats(*failing)
    planner.close()
    assert driver.calls["close"] == 0
    assert [ask.adapter for ask in driver._open.values()] == ["solver"] or failing
    assert [gain.id for gain in solver.step()] == [ASK.id]
    assert not planner.gains
    solver.sleep(keep_weights=True)
    assert not driver.is_awake, "no role needs it"


def test_an_engine_sleeps_when_the_last_role_that_needs_it_leaves() -> None:
    driver, planner, solver = seats()
    solver.sleep(keep_weights=True)
    assert driver.is_awake
    planner.close()
    assert not driver.is_awake
    assert driver.calls["close"] == 0
    solver.wake()
    assert driver.is_awake
    assert driver.calls["wake"] == 2


def test_instances_that_share_an_engine_share_it_as_long_as_one_has_it_and_record_experts_if_one_does() -> None:
    models, workflow = {role: {"path": "/no/model", "lora": {"rank": 2}} for role in ROLES}, Workflow("two")
    for role in ROLES:
        workflow = workflow.node(f"{role}_rollout", run="rollout", role=role)
        workflow = workflow.node(f"{role}_reward", run="reward", after=f"{role}_rollout")
        workflow = workflow.node(f"{role}_advantage", run="advantage", after=f"{role}_reward")
        workflow = workflow.node(role, run="update", role=role, after=f"{role}_advantage")
    for replays in (False, True):
        roles = {"solver": {"algorithm": {"replay_experts": replays}}}
        recipe = make_recipe(models=models, rollout={"engine": "vllm"}, roles=roles)
        instances = make_plan(recipe, workflow, Cluster(1)).instances
        companions, hosts = companions_of(recipe, instances, instances[-1]), Hosts()
        host = hosts.of(companions, recipe)
        assert host is not None
        assert (tuple(host.models), host.records_experts) == (ROLES, replays)
        seat = LoraSlot(host, "planner")
        del host
        assert hosts.of(companions, recipe) is seat._host
        assert hosts.of(companions[:1], recipe) is None, "an engine of its own"
        del seat
        assert not hosts._kept


def test_an_engine_that_did_not_start_is_closed_and_may_be_started_again() -> None:
    driver, host = shared(("start", 1))
    seat = LoraSlot(host, "planner")
    with pytest.raises(EngineError):
        seat.start()
    seat.close()
    assert driver.calls["close"] == 1, "its process may be there"
    seat.start()
    seat.wake()
    assert driver.is_awake


def test_requests_that_an_engine_did_not_get_are_not_aborted() -> None:
    driver, planner, solver = seats(("step", 1))
    with pytest.raises(EngineError):
        planner.step()
    planner.close()
    planner.start()
    with pytest.raises(EngineError, match="the engine of planner and solver failed when another role used it"):
        solver.submit([ASK])
    solver.start()
    solver.wake()
    solver.sleep(keep_weights=True)
    assert driver.calls["abort"] == 0
