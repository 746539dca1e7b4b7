"""Policies that move bodies, their critics and SAC on the device of `tests.fake_accelerator`: copies and waits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from tests import fake_accelerator as fake
from tests.distributed.test_bodies import played
from tests.small_worlds import Line
from tests.unit.embodied.test_sac import SMALL, decisions, memory_of, policy_of

from leaderless.config.environment import PolicyConfig
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.embodied.policies.mlp import Mlp, MlpValue
from leaderless.embodied.policies.protocol import BodyPolicy, BodyValue
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyTask
from leaderless.embodied.rollout.vector_envs import LocalVectorEnvs
from leaderless.embodied.training.policy_engine import BodyPolicyEngine, BodyValueEngine, HeldBody
from leaderless.embodied.training.sac_learner import SacLearner
from leaderless.observability.clock import Clock

BATCH = played("token")
"""Episodes of which each decision has two steps."""


def engine_of(model: BodyPolicy | BodyValue) -> BodyPolicyEngine | BodyValueEngine:
    """An engine of a policy or a critic with its weights on the device."""
    held = cast("HeldBody", fake.moved(HeldBody(model, lambda _: None), torch.float32))
    make = BodyPolicyEngine if isinstance(model, BodyPolicy) else BodyValueEngine
    config = ModelConfig(body=PolicyConfig(type="mlp"), compute_dtype="float32")
    engine = make(held, config, fake.ALONE, fake.DEVICE, 16, optimizer=OptimizerConfig(), num_updates=2)
    engine.grain = "token"
    return engine


def learner_of() -> SacLearner:
    """SAC with its weights on the device."""
    optimizer = OptimizerConfig(learning_rate=3e-3, max_grad_norm=100.0)
    policy = fake.moved(policy_of(), torch.float32)
    torch.nn.Module.to, before = cast("Callable[..., torch.nn.Module]", fake.moved_to), torch.nn.Module.to
    try:
        return SacLearner(policy, SMALL, optimizer, seed=3, device=fake.DEVICE)  # type: ignore[arg-type]
    finally:
        torch.nn.Module.to = before  # type: ignore[method-assign]


def bodies(accelerator: fake.Accelerator) -> Mapping[str, Mapping[str, float]]:
    """Copies to the device, waits and copies back of a pass, of a round of decisions, and of an update of SAC."""

    def counted(work: Callable[[], object], num: int = 1) -> dict[str, float]:
        def numbers() -> dict[str, float]:
            here = accelerator
            waits = here.num_waits + here.num_reads
            return {"copies in": here.num_sent, "waits": waits, "copies back": here.num_copies}

        before = numbers()
        work()
        return {name: (count - before[name]) / num for name, count in numbers().items()}

    spaces, found = Line(1).spaces, dict[str, dict[str, float]]()
    policy, critic = engine_of(Mlp(spaces, chunk=2)), engine_of(MlpValue(spaces, chunk=2, per_step=True))
    assert isinstance(policy, BodyPolicyEngine)
    assert isinstance(critic, BodyValueEngine)
    num_passes = len(policy.micro_batches(BATCH))

    def train(engine: BodyPolicyEngine | BodyValueEngine) -> None:
        for micro_batch in engine.micro_batches(BATCH):
            outputs = engine.forward(micro_batch)
            (outputs if isinstance(outputs, torch.Tensor) else outputs.log_probs).sum().backward()

    found["policy"] = counted(lambda: train(policy), num_passes)
    found["critic"] = counted(lambda: train(critic), num_passes)
    found["scores"] = counted(lambda: policy.log_probs(BATCH), num_passes)
    found["final values"] = counted(lambda: critic.final_values(BATCH))
    engine = BodyEngine(
        cast("BodyPolicy", fake.moved(Mlp(spaces, chunk=2), torch.float32)), lambda: worlds, fake.DEVICE
    )
    worlds, tasks = LocalVectorEnvs(Line(4), 4), [BodyTask(number, {}, seed=number) for number in range(4)]
    rounds = 0
    decide = engine.decide

    def once(*arguments: object) -> object:
        nonlocal rounds
        rounds += 1
        return decide(*arguments)  # type: ignore[arg-type]

    engine.decide = once  # type: ignore[assignment, method-assign]
    whole = counted(lambda: engine.play(tasks, seed=7, temperature=0.8, progress=lambda _: None, clock=Clock()))
    found["decisions"] = {name: count / rounds for name, count in whole.items()}
    with tempfile.TemporaryDirectory() as folder:
        learner, memory = learner_of(), memory_of(Path(folder), decisions(0))
        learner.update(memory.draw)
        found["sac"] = counted(lambda: learner.update(memory.draw))
    return found
