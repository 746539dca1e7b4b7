"""Engines that span ranks: what is sampled and learned is the same as with engines of one rank each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.end_to_end.test_many_ranks import Step, merged, walk_steps
from tests.loops import SETTINGS as LAG_SETTINGS
from tests.loops import Seen, train
from tests.tiny import tiny_model, write_additions, write_recipe

from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.transport import Transport
from leaderless.rollout.engine import Delta, Request, SamplingParams, generate
from leaderless.rollout.wrapped_engine import compared

NUM_STEPS = 2
SPANNING = "tests.contracts.spanning_engine:make"
PLACES: dict[str, tuple[int, dict[str, object]]] = {
    "an engine on each of 2 ranks": (2, {}),
    "1 engine on 2 ranks": (2, {"rollout": {"tp": 2}}),
    "2 engines on 4 ranks": (4, {"rollout": {"tp": 2}}),
    "1 engine on ranks of its own": (3, {"rollout": {"ranks": "0-1", "tp": 2}, "policy": {"ranks": "2"}}),
    "2 engines on some of the ranks that train": (
        4,
        {"rollout": {"ranks": "0-3", "tp": 2}, "reward": {"ranks": "1-2"}, "policy": {"ranks": "0-3"}},
    ),
}
CLOCKS = ("time", "seconds/", "sent/", "throughput", "rollout/tokens_per_s", "memory", "data/", "balance/")


@pytest.fixture(scope="module")
def walked(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[Step]]]:
    """What the ranks see of each step; each run is made once."""

    @functools.cache
    def walk(place: str) -> list[list[Step]]:
        world_size, layout = PLACES[place]
        folder = tmp_path_factory.mktemp("walk")
        held_out = {"path": str(write_additions(folder / "held_out.jsonl", 3)), "prompt": "question"}
        settings = {
            "rollout.engine": SPANNING,
            "batch.prompts_per_step": 4,
            "batch.updates_per_step": 2,
            "reward": {"tests.end_to_end.own_reward:own_reward": 1.0},
            "evaluation.every_steps": 1,
            "data.evaluation": held_out | {"answer": "answer", "template": "plain"},
            "optimizer.learning_rate": 3e-3,
            "layout": layout,
        }
        recipe = write_recipe(folder, tiny_model(num_layers=1), settings)
        return ranks.run(world_size, walk_steps, str(recipe), "walk", NUM_STEPS, init_group=False)

    return walk


@pytest.mark.parametrize("place", list(PLACES)[1:])
def test_ranks_that_make_one_engine_change_nothing(walked: Callable[[str], list[list[Step]]], place: str) -> None:
    expected, found = walked(next(iter(PLACES))), walked(place)
    for step in range(NUM_STEPS):
        theirs, ours = merged(expected, step), merged(found, step)
        assert ours["samples"] == theirs["samples"]
        for name, value in theirs["numbers"].items():  # type: ignore[attr-defined]
            if not name.startswith(CLOCKS):
                assert ours["numbers"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name  # type: ignore[index]
        for name, weights in theirs["weights"].items():  # type: ignore[attr-defined]
            torch.testing.assert_close(ours["weights"][name], weights, atol=1e-5, rtol=1e-4)  # type: ignore[index]
    assert theirs["numbers"]["policy/grad_norm"] > 1e-3, "there is something to learn"  # type: ignore[index]
    assert "evaluation/mean@1" in ours["numbers"], "it has answered held-out prompts, too"  # type: ignore[operator]
    samples = [set(result[0]["samples"]) for result in found if result[0]["samples"]]  # type: ignore[call-overload]
    assert samples[0] == samples[1], "ranks of one engine hold the same rows"


def test_an_engine_of_two_ranks_is_ahead_of_training_like_one_of_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    held_out = {"path": str(tmp_path / "train.jsonl"), "prompt": "question", "answer": "answer", "template": "plain"}

    def run(num_ranks: int) -> Seen:
        trained = {"ranks": str(num_ranks)}
        layout = {"rollout": {"ranks": f"0-{num_ranks - 1}", "tp": num_ranks}, "reward": trained, "policy": trained}
        changes = {"rollout.engine": SPANNING, "channels": {"rollout": {"capacity": 1}}, "layout": layout, "steps": 4}
        settings = {**LAG_SETTINGS, **changes, "data.evaluation": held_out}
        recipe = write_recipe(tmp_path, tiny_model(num_layers=1), settings)
        return ranks.run(num_ranks + 1, train, str(recipe), [f"name=span-{num_ranks}"], init_group=False)[-1]

    one, two = run(1), run(2)
    assert one.trained == two.trained
    assert len(one.trained) == 4
    for name, weights in one.weights.items():
        torch.testing.assert_close(two.weights[name], weights, atol=1e-4, rtol=1e-3)


@dataclass
class Echo:
    """An engine that answers each request with one token."""

    token: int
    experts: bytes
    policy_version: int = 0
    num_requests: int = 0

    def submit(self, request: Request, params: SamplingParams) -> int:  # noqa: ARG002
        self.num_requests += 1
        return self.num_requests

    def step(self) -> list[Delta]:
        said = (self.token,), (0.0,), "length", 0, 0, (self.experts,)
        return [Delta(number, 0, *said) for number in range(1, self.num_requests + 1)]

    def forget(self, conversation: int) -> None: ...

    def abort(self, request: int) -> None: ...


def sample_differently(what: str) -> str:
    """Sample on two ranks that make one engine; the error."""
    transport = Transport(torch.device("cpu"), 30)
    is_other = transport.rank == 1
    prompts = [[5], [6]][:: -1 if is_other and what == "requests" else 1]
    engine = Echo(3 + (is_other and what == "tokens"), b"\1" if is_other and what == "experts" else b"\0")
    try:
        with compared(engine, transport.world) as witness:  # type: ignore[arg-type]
            generate(witness, [Request(prompt, [0]) for prompt in prompts], SamplingParams(SamplingConfig(), 1))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["nothing", "requests", "tokens", "experts"])
def test_ranks_of_one_engine_that_sample_differently_are_stopped(ranks: RankPool, what: str) -> None:
    errors = ranks.run(2, sample_differently, what)
    expected = "" if what == "nothing" else "ranks 0-1 make one engine, but those of rank 1 are other requests or other"
    for rank, error in enumerate(errors):
        assert error.startswith(f"rank {rank}: {expected}" if expected else "")
        assert bool(error) == bool(expected), error


def walk_until_it_breaks(recipe_file: str) -> str:
    """Be one rank of a run whose engine breaks on another rank; the error."""
    try:
        walk_steps(recipe_file, "breaks", 2)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_part_that_breaks_ends_the_attempt_on_all_ranks_in_time(ranks: RankPool, tmp_path: Path) -> None:
    settings = {
        "rollout.engine": "tests.contracts.spanning_engine:make_breaking",
        "layout": {"rollout": {"tp": 2}},
        "reward": {"format": {"pattern": r"[^0-9]*"}},  # some responses have it, so that weights change
        "run.timeout_s": 6,
    }
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), settings)
    waiting, broken = ranks.run(2, walk_until_it_breaks, str(recipe), init_group=False)
    assert broken == "EngineError: this part is broken"
    assert waiting.startswith("CollectiveError: rank 0 waited for logits of other tokens with ranks [1]")


@pytest.mark.parametrize(
    "place", ["1 engine on 2 ranks", pytest.param("1 engine on ranks of its own", marks=pytest.mark.thorough)]
)
def test_a_run_whose_engine_samples_differently_on_its_ranks_is_stopped(
    ranks: RankPool, tmp_path: Path, place: str
) -> None:
    world_size, layout = PLACES[place]
    engine = {"rollout.engine": "tests.contracts.spanning_engine:make_differing"}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {**engine, "layout": layout, "run.timeout_s": 6})
    errors = ranks.run(world_size, walk_until_it_breaks, str(recipe), init_group=False)
    for rank, error in enumerate(errors[:2]):
        assert error.startswith(f"RuntimeError: rank {rank}: ranks 0-1 make one engine, but those of rank 1")
    assert all(errors)
