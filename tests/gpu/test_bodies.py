"""Policies that move bodies on a GPU, in bfloat16: they learn, and are scored as they were played."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_bodies import setup
from tests.gpu.test_cuda import NUM_GPUS, join
from tests.small_worlds import Line

from leaderless.config.environment import BodyConfig, PolicyConfig
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyTask, make_body_rollout
from leaderless.embodied.rollout.vector_envs import LocalVectorEnvs
from leaderless.embodied.stages.rollout import BodyRows
from leaderless.embodied.training.policy_engine import BodyPolicyEngine
from leaderless.observability.clock import Clock
from leaderless.training.fsdp import make_engine

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="this machine has no CUDA device")


def learn(kind: str) -> tuple[float, int, int]:
    """Mean difference between log-probs of rollout and trainer, and how many weights got a gradient, of how many."""
    transport, device = join()
    model = ModelConfig(body=PolicyConfig(type=kind), compute_dtype="bfloat16")
    world = BodyConfig(type="tests.small_worlds:Line", log_prob="token")
    trained = make_engine(replace(setup(transport, "token", "Bins", 1 << 20), model=model, device=device))
    assert isinstance(trained, BodyPolicyEngine)
    policy = make_body_rollout(model, "models.policy", world, device).policy
    weights = {name: value.clone() for name, value in trained.full_weights()}
    policy.load_state_dict(weights)
    playing = BodyEngine(policy, lambda: LocalVectorEnvs(Line(4), 4), device)
    tasks = [BodyTask(number, {}, seed=100 + number // 2) for number in range(12)]
    episodes = playing.play(tasks, seed=7, temperature=1.0, progress=lambda _: None, clock=Clock())
    prompts = Batch(torch.arange(6) << 16, {"rows": tuple({} for _ in range(6))})
    batch = BodyRows(policy, world, 1.0, 4).samples(prompts, torch.arange(12), episodes)
    mismatch = (trained.log_probs(batch).values - batch.jagged("rollout_log_probs").values).abs().mean()
    for micro_batch in trained.micro_batches(batch):
        trained.forward(micro_batch, "none").log_probs.sum().backward()
    trained.optimizer_step()
    moments = [value for name, value in trained.state().items() if name.startswith("optimizer.exp_avg.")]
    return float(mismatch), sum(float(one.norm()) > 0 for one in moments), len(weights)


@pytest.mark.parametrize("kind", ["mlp", "flow"])
def test_a_policy_learns_in_bfloat16_and_is_scored_as_it_was_played(ranks: RankPool, kind: str) -> None:
    mismatch, num_learnt, count = ranks.run(1, learn, kind, init_group=False)[0]
    print(f"{kind}: {mismatch:.1e}")
    assert mismatch < 0.01
    assert num_learnt == count
