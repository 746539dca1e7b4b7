"""Policies and critics of bodies: ranks that divide episodes compute what one does, and passes of any size the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import Numbers, largest_difference
from tests.small_bodies import Bins
from tests.small_groot import install, write_small_groot
from tests.small_vla import write_small_pi0, write_small_pi05, write_small_vla
from tests.small_worlds import Line
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig, Grain, PolicyConfig
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch
from leaderless.distributed.transport import Transport
from leaderless.embodied.policies.observations import images_of, padded
from leaderless.embodied.policies.protocol import Observed
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyTask, make_body_rollout
from leaderless.embodied.rollout.vector_envs import LocalVectorEnvs
from leaderless.embodied.simulators.tabletop import TableTask
from leaderless.embodied.stages.rollout import BodyRows
from leaderless.embodied.training.decision_units import grained
from leaderless.embodied.training.policy_engine import BodyPolicyEngine, BodyValueEngine, make_body_engine
from leaderless.observability.clock import Clock
from leaderless.planner import Layout
from leaderless.training.engine import BodySetup

SHARES = {1: [12], 2: [9, 3], 4: [5, 0, 1, 6]}
MODULE = "tests.small_bodies"


def played(grain: Grain, num: int = 12, *, slots: int = 5) -> Batch:
    """Episodes of a policy with random weights, two of each task; one of them has failed."""
    torch.manual_seed(3)
    policy = Bins(Line(1).spaces)
    engine = BodyEngine(policy, lambda: LocalVectorEnvs(Line(slots), slots), torch.device("cpu"))
    tasks = [BodyTask(number, {}, seed=100 + number // 2, is_greedy=number % 5 == 4) for number in range(num)]
    episodes = engine.play(tasks, seed=7, temperature=0.8, progress=lambda _: None, clock=Clock())
    engine.close()
    episodes[3] = replace(episodes[3], frames=[], states=[], choices=[], log_probs=[], num_steps=[], rewards=[])
    episodes[3].failure = "it broke"
    prompts = Batch(torch.arange(num // 2) << 16, {"rows": tuple({} for _ in range(num // 2))})
    rows = BodyRows(policy, BodyConfig(type="tests.small_worlds:Line", log_prob=grain), 0.8, 4)
    return rows.samples(prompts, torch.arange(num), episodes)


def setup(  # type: ignore[no-untyped-def]
    transport: Transport,
    grain: Grain,
    kind: str,
    micro_batch_tokens: int,
    *,
    is_critic: bool = False,
    is_recomputed: bool = False,
):
    layout = Layout(transport.world.ranks, transport.world.size)
    own = setup_of(transport, layout, "none")
    model = ModelConfig(body=PolicyConfig(type=f"{MODULE}:{kind}"), gradient_checkpointing=is_recomputed)
    body = BodySetup(BodyConfig(type="tests.small_worlds:Line", log_prob=grain))
    return replace(own, model=model, body=body, micro_batch_tokens=micro_batch_tokens, is_critic=is_critic)


def share_of(batch: Batch, transport: Transport) -> Batch:
    shares = SHARES[transport.world.size]
    first = sum(shares[: transport.rank])
    return batch.select(torch.arange(first, first + shares[transport.rank]))


def train(grain: Grain, micro_batch_tokens: int, is_recomputed: bool = False) -> Numbers:
    """Scores, the gradient's norm and weights of two updates, and the values of a critic."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    engine = make_body_engine(setup(transport, grain, "Bins", micro_batch_tokens, is_recomputed=is_recomputed))
    assert isinstance(engine, BodyPolicyEngine)
    batch, numbers = share_of(played(grain), transport), Numbers()
    gains = batch.jagged("rollout_log_probs").values.cos()
    for update in range(2):
        for row, values in zip(batch.ids.tolist(), engine.log_probs(batch).rows(), strict=True):
            numbers[f"scores.{update}.{row}"] = values
        engine.discard_gradient()
        for micro_batch in engine.micro_batches(batch):
            outputs = engine.forward(micro_batch, "gradient")
            weights = gains[micro_batch.response_index]
            ((weights * (outputs.log_probs + 0.3 * outputs.entropies)).sum() + 0.0 * outputs.log_probs.sum()).backward()
        numbers[f"norm.{update}"] = torch.tensor(engine.optimizer_step().grad_norm)
    critic = make_body_engine(
        setup(transport, grain, "Worth", micro_batch_tokens, is_critic=True, is_recomputed=is_recomputed)
    )
    assert isinstance(critic, BodyValueEngine)
    finals = critic.final_values(batch)
    for place, (row, values) in enumerate(zip(batch.ids.tolist(), critic.values(batch).rows(), strict=True)):
        numbers[f"values.{row}"], numbers[f"final.{row}"] = values, finals[place]
    return numbers | {f"weights.{name}": value.clone() for name, value in engine.full_weights()}


@pytest.mark.parametrize("grain", ["token", "action", "chunk"])
def test_ranks_and_passes_of_any_size_learn_like_one(ranks: RankPool, grain: Grain) -> None:
    (expected,) = ranks.run(1, train, grain, 1 << 20)
    assert largest_difference(ranks.run(1, train, grain, 1), expected) < 1e-5
    assert largest_difference(ranks.run(2, train, grain, 8), expected) < 1e-5
    assert largest_difference(ranks.run(1, train, grain, 6, True), expected) < 1e-5
    if grain == "token":
        assert largest_difference(ranks.run(2, train, grain, 2, True), expected) < 1e-5
        assert largest_difference(ranks.run(4, train, grain, 16), expected) < 1e-5


def held(is_recomputed: bool) -> int:
    """Decisions that a model is given at once, at most, in passes of all episodes."""
    transport, seen = Transport(torch.device("cpu"), timeout_s=60), list[int]()
    engine = make_body_engine(setup(transport, "action", "Bins", 4, is_recomputed=is_recomputed))
    assert isinstance(engine, BodyPolicyEngine)
    score = engine.policy.score
    engine.policy.score = lambda observed, *more: (seen.append(len(observed)), score(observed, *more))[1]  # type: ignore[method-assign]
    engine.log_probs(played("action"))
    return max(seen)


def test_models_that_recompute_divide_episodes(ranks: RankPool) -> None:
    assert ranks.run(1, held, True) == [2], "4 steps, of which each decision has 2"
    assert ranks.run(1, held, False) == [3], "a whole episode"


def alone(batch: Batch, row: int, what: str) -> Observed:
    """What one episode saw, without any other."""
    (pixels, states) = (batch.jagged(name).rows()[row] for name in ("frames", "states"))
    part = slice(-1, None) if what == "end" else slice(0, -1)
    assert batch.prompts is not None
    assert batch.prompt_index is not None
    words = batch.prompts.jagged("prompt_tokens").to_lists()[int(batch.prompt_index[row])]
    images = images_of(pixels[part], Line(1).spaces)
    return Observed(images, states[part], padded([words] * len(states[part]), torch.device("cpu")))


def scores_of_rows(grain: Grain) -> float:
    """Largest difference between scores of a batch and those of each episode alone, in the model's own pass."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    engine = make_body_engine(setup(transport, grain, "Bins", 1 << 20))
    critic = make_body_engine(setup(transport, grain, "Worth", 1 << 20, is_critic=True))
    assert isinstance(engine, BodyPolicyEngine)
    assert isinstance(critic, BodyValueEngine)
    batch, largest = played(grain), 0.0
    found, values, finals = engine.log_probs(batch).rows(), critic.values(batch).rows(), critic.final_values(batch)
    for row in range(len(batch)):
        choices, turns = batch.jagged("choices").rows()[row], batch.jagged("turns").rows()[row].long()
        if not len(choices):
            assert not len(found[row])
            assert float(finals[row]) == 0.0
            continue
        places = batch.jagged("tokens").rows()[row]
        scores = engine.policy.score(alone(batch, row, "decisions"), choices, 0.8).log_probs
        worth = critic.model.model
        expected: list[tuple[Tensor, Tensor]] = [
            (found[row], grained(scores, grain, turns, places)),
            (values[row], worth.values(alone(batch, row, "decisions"))[turns]),  # type: ignore[union-attr]
            (finals[row : row + 1], worth.values(alone(batch, row, "end"))),  # type: ignore[union-attr]
        ]
        largest = max([largest, *(float((one - other).abs().max()) for one, other in expected)])
    return largest


@pytest.mark.parametrize("grain", ["token", "action", "chunk"])
def test_scores_are_those_of_each_episode_alone(ranks: RankPool, grain: Grain) -> None:
    assert ranks.run(1, scores_of_rows, grain)[0] < 1e-6


def worth_of_steps(micro_batch_tokens: int, chunk: int) -> float:
    """The same of a critic that has a value for each step of a decision."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    own = setup(transport, "token", "Bins", micro_batch_tokens, is_critic=True)
    options = {"chunk": chunk, "per_step": True}
    own = replace(own, model=ModelConfig(body=PolicyConfig(type="mlp", options=options)))
    with pytest.raises(RecipeError, match="which does not go with"):
        make_body_engine(own)
    assert own.body is not None
    critic = make_body_engine(replace(own, body=replace(own.body, values_steps=True)))
    assert isinstance(critic, BodyValueEngine)
    batch, largest = played("token"), 0.0
    found, finals, worth = critic.values(batch).rows(), critic.final_values(batch), critic.model.model
    for row in range(len(batch)):
        turns, steps = (batch.jagged(name).rows()[row].long() for name in ("turns", "env_steps"))
        if len(turns):
            first = torch.stack([steps[turns == turn].min() for turn in turns])
            by_step: Tensor = worth.values(alone(batch, row, "decisions"))  # type: ignore[union-attr]
            end: Tensor = worth.values(alone(batch, row, "end"))  # type: ignore[union-attr]
            assert by_step.shape[1] == chunk
            pairs = (found[row], by_step[turns, steps - first]), (finals[row], end[0, 0])
            largest = max([largest, *(float((one - other).abs().max()) for one, other in pairs)])
    return largest


def test_values_of_steps_are_those_of_each_episode_alone(ranks: RankPool) -> None:
    for size in (1, 1 << 20):
        assert ranks.run(1, worth_of_steps, size, 3)[0] < 1e-6


def test_a_critic_has_values_for_all_steps_of_a_decision(ranks: RankPool) -> None:
    with pytest.raises(Exception, match="give both the same option chunk"):
        ranks.run(1, worth_of_steps, 1 << 20, 1)


def test_what_is_played_does_not_depend_on_how_many_play_at_once() -> None:
    whole = played("token")
    for slots in (1, 3, 12):
        other = played("token", slots=slots)
        for name in ("tokens", "turns", "env_steps", "choices", "frames", "turn_rewards"):
            assert torch.equal(whole.jagged(name).values, other.jagged(name).values), name
        difference = whole.jagged("rollout_log_probs").values - other.jagged("rollout_log_probs").values
        assert float(difference.abs().max()) < 1e-6


def refusals() -> Sequence[str]:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    own = setup(transport, "token", "Bins", 64)
    wrong = setup_of(transport, Layout(transport.world.ranks, 1, tp=2), "none")
    with pytest.raises(RecipeError) as caught:
        make_body_engine(replace(wrong, model=own.model, body=own.body))
    return [str(caught.value)]


def test_a_policy_is_not_divided_along_other_axes(ranks: RankPool) -> None:
    assert "cannot be divided along tp: use dp alone" in ranks.run(2, refusals)[0][0]


VLAS = {
    "openvla_oft": (write_small_vla, {"statistics": "small_arm"}, "Llama, towers"),
    "pi0": (partial(write_small_pi0, state_size=2), {}, "both Gemmas, SigLIP"),
    "pi05": (partial(write_small_pi05, state_size=2), {}, "both Gemmas, SigLIP"),
    "groot": (
        write_small_groot,
        {
            "robot": {"embodiment": "new_embodiment", "state": ["arm"], "action": ["hand", "arm"]},
            "cameras": ["top", "top"],
        },
        "SigLIP, Qwen, both transformers of the head",
    ),
}
NUM_LAYERS = {"openvla_oft": 5, "pi0": 6, "pi05": 6, "groot": 5}


def engine_of_vla(name: str, path: str, **settings: object) -> tuple[BodyPolicyEngine, Batch]:
    """A trainer of a model whose layers are gathered one by one, and this rank's share of what the model has played."""
    install(sys.modules.__setitem__)
    transport = Transport(torch.device("cpu"), timeout_s=60)
    table = BodyConfig(type="table", options={"max_steps": 4}, max_steps=4)
    kind = PolicyConfig.model_validate({"type": name, "options": {"path": path, "chunk": 2, **VLAS[name][1]}})
    model = ModelConfig(body=kind, **settings)  # type: ignore[arg-type]
    engine = make_body_rollout(model, "models.policy", table, torch.device("cpu"))
    policy = engine.policy
    tasks = [BodyTask(number, {}, seed=100 + number // 2) for number in range(12)]
    playing = BodyEngine(policy, lambda: LocalVectorEnvs(TableTask(6, max_steps=4), 6), torch.device("cpu"))
    episodes = playing.play(tasks, seed=7, temperature=1.0, progress=lambda _: None, clock=Clock())
    prompts = Batch(torch.arange(6) << 16, {"rows": tuple({} for _ in range(6))})
    batch = share_of(BodyRows(policy, table, 1.0, 0).samples(prompts, torch.arange(12), episodes), transport)
    layout = Layout(transport.world.ranks, transport.world.size)
    own = replace(setup_of(transport, layout, "none"), model=model, body=BodySetup(table))
    trained = make_body_engine(replace(own, micro_batch_tokens=4))
    assert isinstance(trained, BodyPolicyEngine)
    return trained, batch


def train_vla(name: str, path: str, is_recomputed: bool) -> Numbers:
    """Scores, the gradient's norm and weights of an update of a model whose layers are gathered one by one."""
    trained, batch = engine_of_vla(name, path, gradient_checkpointing=is_recomputed)
    numbers = Numbers()
    assert len(trained.units) == (0 if trained.process_group.size == 1 else NUM_LAYERS[name] + 1), (
        f"{VLAS[name][2]}, the rest"
    )
    for row, values in zip(batch.ids.tolist(), trained.log_probs(batch).rows(), strict=True):
        numbers[f"scores.{row}"] = values
    for micro_batch in trained.micro_batches(batch):
        log_probs = trained.forward(micro_batch, "none").log_probs
        (log_probs * batch.jagged("rollout_log_probs").values.cos()[micro_batch.response_index]).sum().backward()
    numbers["norm"] = torch.tensor(trained.optimizer_step().grad_norm)
    return numbers | {f"weights.{name}": value.clone() for name, value in trained.full_weights()}


@pytest.mark.parametrize("name", VLAS)
def test_ranks_gather_large_models_layer_by_layer(ranks: RankPool, name: str, tmp_path: Path) -> None:
    path = str(VLAS[name][0](tmp_path / "vla"))
    (expected,) = ranks.run(1, train_vla, name, path, False)
    assert float(expected["norm"]) > 0.01
    assert largest_difference(ranks.run(2, train_vla, name, path, True), expected) < 1e-4


def mismatch(name: str, path: str) -> float:
    """Mean difference between log-probs of the rollout and of the trainer, both in bfloat16."""
    trained, batch = engine_of_vla(name, path, compute_dtype="bfloat16")
    return float((trained.log_probs(batch).values - batch.jagged("rollout_log_probs").values).abs().mean())


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_the_trainer_scores_what_was_done_in_bfloat16_as_the_rollout_did(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    """Neither rounds what was done or frequencies of positions: the mismatches would be 0.09 and 0.008."""
    assert ranks.run(1, mismatch, name, str(VLAS[name][0](tmp_path / "vla")))[0] < 1e-3
