"""Every feature of training gives the same on several ranks, in one pool and in two, as on one rank."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator

import pytest
from tests.distributed.ranks import RankPool
from tests.distributed.test_experts import experts_model
from tests.end_to_end.own_code import OWN_WORKFLOW
from tests.end_to_end.test_algorithms_run import CASES as ALGORITHMS
from tests.end_to_end.test_many_ranks import Step, merged, walk_steps
from tests.episodes import EPISODES_WORKFLOW
from tests.tiny import judge_model, tiny_model, write_additions, write_recipe

NUM_STEPS = 2
PLACES: dict[str, tuple[int, str, str]] = {
    "2 ranks": (2, "", ""),
    "4 ranks": (4, "", ""),
    "pools of 1 and 1": (2, "0", "1"),
    "pools of 2 and 2": (4, "0-1", "2-3"),
}
"""Number of ranks, and those that sample and those that train; empty if all do both."""
IN_ONE_POOL = [place for place in PLACES if place.endswith("ranks")]
SETTINGS: dict[str, object] = {
    "batch.updates_per_step": 2,
    "reward": {"tests.end_to_end.own_reward:own_reward": 1.0},
    "rollout.max_response_tokens": 8,
}
FEATURES: dict[str, dict[str, object]] = {
    "supervised": {
        "workflow": "sft",
        "data.train.response": "answer",
        "data.max_response_tokens": 4,
        "reward": {},
        "optimizer.learning_rate": 3e-3,
    },
    "dropped inputs of adapters": {
        "workflow": "sft",
        "models.policy": {"path": tiny_model("qwen3", num_layers=1), "lora": {"rank": 3, "dropout": 0.2}},
        "seed": 7,
        "data.train.response": "answer",
        "data.max_response_tokens": 4,
        "reward": {},
        "optimizer.learning_rate": 3e-3,
    },
    "dynamic sampling": {"workflow": "dapo", "algorithm.repeat": {"max_rounds": 4}},
    "critic": {
        "workflow": "ppo",
        "algorithm.kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1"},
        "models.critic": tiny_model(num_layers=1),
    },
    "reference": {"algorithm.kl.coefficient": 0.1},
    "own workflow": {"workflow": "own.yaml", "batch.updates_per_step": 1},
    "episodes of several samples": {"workflow": "episodes.yaml", "algorithm.aggregation": "sequence_mean_token_mean"},
    "windows": {"batch.windows_per_step": 3},
    "cool sampling": {"rollout.temperature": 0.7},
    "stop texts": {"rollout.stop": ["1", "a"]},
    "truncated sampling": {"rollout.top_p": 0.9, "rollout.top_k": 9, "algorithm.kl.coefficient": 0.1},
    "recomputed activations": {"models.policy": {"path": tiny_model(num_layers=1), "gradient_checkpointing": True}},
    "another family": {"models.policy": tiny_model("qwen3", num_layers=1)},
    "replayed experts": {"algorithm.replay_experts": True, "algorithm.kl.coefficient": 0.1},
    "adapters of experts": {"algorithm.replay_experts": True, "algorithm.kl.coefficient": 0.1},
    "falling rate": {"optimizer": {"schedule": "cosine", "warmup_updates": 1, "weight_decay": 0.1}},
    "Muon": {"optimizer": {"type": "muon", "state_dtype": "bfloat16", "weight_decay": 0.1}},
    "everything offloaded": {
        "models.policy": {
            "path": tiny_model(num_layers=1),
            "gradient_checkpointing": True,
            "offload_activations": True,
        },
        "algorithm.kl.coefficient": 0.1,
        "optimizer.offload": "disk",
        "training.offload_frozen": "disk",
    },
    "an optimizer for each role": {
        "workflow": "ppo",
        "models.critic": tiny_model(num_layers=1),
        "optimizer": {"type": "sgd", "learning_rate": 1e-4},
        "roles.critic.optimizer": {"type": "adamw", "state_dtype": "bfloat16"},
    },
    "a teacher of all words": {"workflow": "gkd", "algorithm.distillation.divergence": "forward_kl"},
    "a teacher's words": {"workflow": "gkd", "algorithm.distillation.top_k": 5},
    "skipped updates": {"guards.grad_norm_limit": 1e-3},
    "failed rewards": {"reward": {"tests.end_to_end.own_code:fail_on_small_letters": 1.0}}
    | {"guards.reward_failures_limit": None},
    "rewards of sources": {
        "reward": {
            "tests.end_to_end.own_reward:own_reward": {"sources": ["first"]},
            "format": {"pattern": r".*\d.*", "sources": ["second"]},
        },
    },
    "a judge of the plan": {
        "models.judge": judge_model(),
        "reward.judge": {
            "role": "judge",
            "prompt": "{prompt} {response}",
            "parse": {"function": "tests.end_to_end.own_reward:points_of"},
            "temperature": 1.0,
            "max_answer_tokens": 4,
            "max_question_tokens": 320,
            "retries": 1,
        },
        "guards.reward_failures_limit": None,
    },
    "rewards judged one by one": {
        "algorithm.advantage": {"type": "gdpo"},
        "reward": {
            "tests.end_to_end.own_reward:own_reward": 1.0,
            "format-digit": {"pattern": r".*\d.*", "weight": 0.5},
            "format-letter": {"pattern": r".*[a-m].*", "weight": -0.5},
        },
    },
}
"""Settings besides the algorithms that change how a step is computed."""
ELSEWHERE = {
    "windows": "test_many_ranks.py",
    "reference": "test_many_ranks.py",
    "another family": "test_many_ranks.py",
    "supervised": "here, with adapters whose inputs are dropped",
    "cool sampling": "test_two_policies.py, whose second policy samples so",
    "stop texts": "../contracts/test_rollout_engine.py, for each response alone",
    "recomputed activations": "../distributed/test_training.py, on two ranks",
    "falling rate": "../distributed/test_training.py, with warm-up and decay; test_adopt.py, with a schedule",
}
"""Features that `make test` tries on several ranks in other files, and where."""
ONLY_TRAIN = {"supervised", "dropped inputs of adapters"}
CLOCKS = ("time", "seconds/", "sent/", "throughput", "rollout/tokens_per_s", "memory", "data/", "balance/", "judge/")


def first_half(text: str) -> bool:
    """Whether this test takes one of two equally good forms."""
    return sum(text.encode()) % 2 == 0


def cases() -> Iterator[pytest.param]:
    """All features on all ranks; `make test` has most on two ranks, in one pool or in two, and some on four."""
    for feature in FEATURES:
        short = "2 ranks" if first_half(feature) else "pools of 1 and 1"
        if feature in ELSEWHERE:
            short = ""
        elif feature in ONLY_TRAIN:
            short = "2 ranks"
        elif feature in {"replayed experts", "adapters of experts", "a judge of the plan"}:
            short = "pools of 1 and 1"
        elif feature == "dynamic sampling":
            short = "pools of 2 and 2"
        for place in PLACES:
            if feature not in ONLY_TRAIN or place in IN_ONE_POOL:
                yield pytest.param(feature, place, marks=[] if place == short else pytest.mark.thorough)
    for algorithm in ALGORITHMS:
        for place in ("4 ranks", "pools of 1 and 1", "pools of 2 and 2"):
            yield pytest.param(algorithm, place, marks=pytest.mark.thorough)


@pytest.fixture(scope="module")
def walk(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int, str, str, int], list[list[Step]]]:
    """What the ranks of a place see of each step of a feature; each case is run once."""

    @functools.cache
    def walk(feature: str, world_size: int, samplers: str, trainers: str, micro_batch_tokens: int) -> list[list[Step]]:
        folder = tmp_path_factory.mktemp("walk")
        (folder / "own.yaml").write_text(OWN_WORKFLOW)
        changes = SETTINGS | {"batch.micro_batch_tokens": micro_batch_tokens} | (FEATURES | ALGORITHMS)[feature]
        if samplers:
            changes["layout"] = {"rollout": {"ranks": samplers}, "policy": {"ranks": trainers}}
            if feature == "a judge of the plan":
                changes["layout"]["reward"] = {"ranks": trainers}
        if feature in {"distillation", "a teacher of all words", "a teacher's words"}:
            changes["models.reference"] = tiny_model("qwen3", num_layers=1)
        if feature == "replayed experts":
            changes["models.policy"] = experts_model(folder, "qwen3_moe")
        if feature == "adapters of experts":
            lora = {"rank": 3, "expert_rank": "auto"}
            changes["models.policy"] = {"path": experts_model(folder, "qwen3_moe"), "lora": lora}
        if feature == "own workflow":
            changes["workflow"] = str(folder / "own.yaml")
        if feature == "episodes of several samples":
            (folder / "episodes.yaml").write_text(EPISODES_WORKFLOW)
            changes["workflow"] = str(folder / "episodes.yaml")
        if feature == "rewards of sources":
            rows = [json.loads(line) for line in write_additions(folder / "all.jsonl").read_text().splitlines()]
            texts = [json.dumps(row | {"from": ("first", "second")[n % 2]}) for n, row in enumerate(rows)]
            (folder / "rows.jsonl").write_text("\n".join(texts))
            changes |= {"data.train.path": str(folder / "rows.jsonl"), "data.train.source": "from"}
        recipe = write_recipe(folder, tiny_model(num_layers=1), changes)
        return ranks.run(world_size, walk_steps, str(recipe), "walk", NUM_STEPS, init_group=False)

    return walk


@pytest.mark.parametrize(("feature", "place"), list(cases()))
def test_a_feature_gives_what_it_gives_on_one_rank(
    walk: Callable[[str, int, str, str, int], list[list[Step]]], feature: str, place: str
) -> None:
    single, several = walk(feature, 1, "", "", 4096), walk(feature, *PLACES[place], 48)
    has_moved = False
    for step in range(NUM_STEPS):
        expected, result = merged(single, step), merged(several, step)
        assert result["samples"] == expected["samples"], f"step {step + 1}"
        for name, value in expected["numbers"].items():  # type: ignore[attr-defined]
            if not name.startswith(CLOCKS):
                other = result["numbers"][name]  # type: ignore[index]
                assert other == pytest.approx(value, rel=1e-3, abs=1e-4), f"{name}, step {step + 1}"
        assert expected["weights"].keys() == result["weights"].keys()  # type: ignore[attr-defined]
        for name, weights in expected["weights"].items():  # type: ignore[attr-defined]
            other = result["weights"][name]  # type: ignore[index]
            assert float((other - weights).norm() / weights.norm().clamp(min=1e-3)) < 1e-4, f"{name}, step {step + 1}"
        before = merged(single, step - 1)["weights"] if step else None
        has_moved |= before is not None and any(
            not before[name].equal(weights)  # type: ignore[index]
            for name, weights in expected["weights"].items()  # type: ignore[attr-defined]
        )
    assert has_moved == (feature != "skipped updates"), "there is something to learn"
