"""Value models that see images: each value is that of its row alone, by the layers of `transformers`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.pictures import Family, samples_with, vision_critic, vision_model
from tests.preferences import PAIR_DATA
from tests.tiny import tiny_model
from tests.unit.models.test_vision import alone_inputs, gain, rows_of
from tests.unit.recipes import only_problem, plan_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.support import register_classifiers
from leaderless.models.value_model import load_value_model
from leaderless.models.vision.vision_models import VisionLM, VisionValueModel
from leaderless.stages.preferences import with_ends
from leaderless.training.fsdp import FsdpValueEngine
from leaderless.training.micro_batches import MicroBatch

FAMILIES = get_args(Family)
CPU = torch.device("cpu")


def engine_of(path: str, micro_batch_tokens: int = 4096, **settings: object) -> FsdpValueEngine:
    config = ModelConfig(path=path, **settings)  # type: ignore[arg-type]
    model = load_value_model(config, "critic")
    optimizer = OptimizerConfig(learning_rate=1e-3)
    return FsdpValueEngine(model, config, ProcessGroup((0,), 0), CPU, micro_batch_tokens, optimizer=optimizer)


@cache
def head_of(family: Family) -> tuple[Tensor, Tensor]:
    score = load_value_model(ModelConfig(path=vision_critic(family)), "critic").model.score
    return score.weight.detach(), score.bias.detach()


@cache
def twin_of(family: Family) -> VisionLM:
    """The language model with the same layers, as `transformers` computes it."""
    model = load_causal_lm(ModelConfig(path=vision_model(family)), "policy")
    assert isinstance(model, VisionLM)
    model.model.set_attn_implementation("eager")
    return model


def values_alone(family: Family, batch: Batch, head: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Values of the rows of a batch, one after the other, with gradient."""
    model, found = twin_of(family), []
    for prompt, images, response in rows_of(batch):
        hidden = model.model.model(**alone_inputs(model, prompt, images, response)).last_hidden_state
        found.append(torch.nn.functional.linear(hidden[0, len(prompt) - 1 : -1], *head).squeeze(1))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_rows_alone(family: Family) -> None:
    batch, engine = samples_with(family), engine_of(vision_critic(family), 90)
    found = engine.values(batch).rows()
    whole = engine_of(vision_critic(family)).values(batch.select(torch.arange(len(batch)).flip(0))).rows()[::-1]
    for micro_batch in engine.micro_batches(batch):
        loss_of(engine.forward(micro_batch), micro_batch).backward()
    head = [one.clone().requires_grad_() for one in head_of(family)]
    model = twin_of(family).requires_grad_(True)
    model.zero_grad()
    expected = values_alone(family, batch, (head[0], head[1]))
    for values, others, wanted in zip(found, whole, expected, strict=True):
        torch.testing.assert_close(values, wanted.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(others, wanted.detach(), rtol=0, atol=1e-5)
    sum((gain(torch.tensor(row[2])) * one).sum() for row, one in zip(rows_of(batch), expected, strict=True)).backward()
    gradients = {name: weight.grad for name, weight in model.model.named_parameters()}
    gradients |= {"score.weight": head[0].grad, "score.bias": head[1].grad}
    for name, weight in engine.named_weights():
        wanted = gradients[name]
        assert (weight.grad is None) == (wanted is None), name
        if wanted is not None and weight.grad is not None:
            assert float((weight.grad - wanted).norm()) < 1e-5 * max(1.0, float(wanted.norm())), name


def loss_of(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    return (gain(micro_batch.targets) * values[: len(micro_batch.targets)]).sum()


def test_a_language_model_that_sees_gets_a_head_of_zeros_and_looks_at_pictures() -> None:
    batch, engine = samples_with(), engine_of(vision_model())
    assert isinstance(engine.model, VisionValueModel)
    assert not engine.values(batch).values.any()
    seeing = engine_of(vision_critic())
    assert batch.prompts is not None
    others = samples_with(sizes=[[(16, 16)]] * 2)
    assert others.prompts is not None
    images = others.prompts.jagged("images")
    swapped = others.prompts.with_columns(images=images.select(torch.tensor([1, 0])))
    before, after = (
        seeing.values(one) for one in (others, Batch(others.ids, others.columns, swapped, others.prompt_index))
    )
    assert float((before.values - after.values).abs().min()) > 1e-4


def test_what_sees_may_be_left_as_it_is_and_adapters_take_part() -> None:
    batch = samples_with()
    for settings in ({"freeze_vision": True}, {"freeze_vision": True, "lora": LoraConfig(rank=4)}):
        engine = engine_of(vision_critic(), **settings)
        before = {name: weight.detach().clone() for name, weight in engine.named_weights()}
        for micro_batch in engine.micro_batches(batch):
            loss_of(engine.forward(micro_batch), micro_batch).backward()
        engine.optimizer_step()
        for name, weight in engine.named_weights():
            is_same = torch.equal(weight, before[name])
            assert is_same == (name.startswith("model.visual.") or name.endswith("lora_A")), name  # B is 0 at first
        assert any("lora_B" in name for name in before) == ("lora" in settings)


@pytest.mark.parametrize("freezes", [False, True])
def test_a_reward_model_that_sees_has_no_offset_to_train(freezes: bool) -> None:
    model = load_value_model(ModelConfig(path=vision_critic(), freeze_vision=freezes), "reward_model")
    model.become_reward_model("models.reward_model")
    frozen = {name for name, _ in model.trained_weights() if model.is_frozen(name)}
    assert "score.bias" in frozen
    assert any(name.startswith("model.visual.") for name in frozen) == freezes
    assert not any(name.startswith("model.language_model.") for name in frozen)


def test_a_critic_of_text_foresees_without_the_images() -> None:
    batch, engine = samples_with(), engine_of(tiny_model("qwen3"))
    batch.jagged("tokens").values.clamp_(max=5)
    assert batch.prompts is not None
    batch.prompts.jagged("prompt_tokens").values.clamp_(max=5)
    assert len(engine.values(batch).values) == len(batch.jagged("tokens").values)
    engine.model.become_reward_model("models.critic")
    with pytest.raises(RuntimeError, match=r"a pass has \d+ images, but the model reads text alone"):
        engine.values(batch)


@pytest.mark.parametrize("family", ["qwen3_vl", "llava", "paligemma"])
def test_a_reward_model_scores_like_its_sequence_classifier(family: Family, tmp_path: Path) -> None:
    samples, engine = samples_with(family), engine_of(vision_critic(family))
    engine.model.become_reward_model("models.critic")
    engine.model.clear_offset()
    scores = engine.values(with_ends(samples)).values
    engine.write_description(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    ending = "ForSequenceClassification"
    assert [name.endswith(ending) for name in config.architectures] == [True]
    register_classifiers(config)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    assert config.architectures == [type(model).__name__]
    own = dict(engine.model.model.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(own[name])
        for score, (prompt, images, response) in zip(scores, rows_of(samples), strict=True):
            wanted = model(**alone_inputs(twin_of(family), prompt, images, response)).logits
            torch.testing.assert_close(score, wanted[0, 0], rtol=0, atol=1e-5)


def test_plans_have_critics_and_reward_models_that_see() -> None:
    images = {"train": {"path": "a.jsonl", "images": "image"}, "max_prompt_tokens": 32}
    plan = plan_of("ppo", 2, models={"policy": vision_model()}, data=images, algorithm={"advantage": {"type": "gae"}})
    (critic,) = (one for one in plan.instances if one.is_critic)
    (values,) = (node for node in plan.nodes if node.node.run == "values")
    assert critic.role == "critic"
    assert "images" in {column for edge in plan.edges if edge.target == values.name for column in edge.columns}
    pairs = {"train": PAIR_DATA | {"images": "image"}, "max_prompt_tokens": 32, "max_response_tokens": 8}
    for model in (vision_model(), "/no/such/model"):
        assert plan_of("reward_model", models={"reward_model": model}, data=pairs, reward={}).instances
    with pytest.raises(RecipeError) as caught:
        plan_of("reward_model", models={"reward_model": tiny_model()}, data=pairs, reward={})
    problem = only_problem(caught.value)
    assert problem.key == "models.reward_model"
    assert "read text alone, so that the reward model" in problem.message
