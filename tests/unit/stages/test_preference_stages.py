"""What stages make of preferences: held-out rows, imitation, mismatched responses, and rewards by a model."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from tests.preferences import (
    SINGLE_DATA,
    SINGLES,
    batch_of,
    engine_of,
    loss_and_gradient,
    moved_model,
    write_rows,
)
from tests.tiny import random_samples, tiny_model
from tests.unit.recipes import make_recipe
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from leaderless.algorithms.preference_loss import PreferenceInputs, PreferenceLoss, PreferenceOutput
from leaderless.algorithms.settings import AlgorithmConfig
from leaderless.config.data import TrainingSetConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.dataset import Dataset
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.preferences import make_encoder
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.open_source import open_source
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.metrics import Mean, Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.stages.context import Grader, StageContext
from leaderless.stages.preferences import evaluate_preferences, model_reward, rewards_of, score_sides, shares_of
from leaderless.training.engine import ValueEngine
from leaderless.worker.checkpoint.export import padding_of

ALONE = ProcessGroup((0,), 0)


def loss_of(kind: str, **settings: object) -> PreferenceLoss:
    return AlgorithmConfig.model_validate({"preference_loss": {"type": kind, **settings}}).preference_loss


@pytest.mark.parametrize("kind", ["sigmoid", "kto"])
def test_held_out_rows_have_the_loss_that_training_has(kind: str) -> None:
    loss = loss_of(kind)
    rows = batch_of(loss)
    found = evaluate_preferences(loss, rows, score_sides(engine_of(moved_model()), rows), ALONE)["loss"]
    assert isinstance(found, Mean)
    assert float(found.total) / float(found.count) == pytest.approx(loss_and_gradient(loss)[0], abs=1e-6)


def test_only_desirable_responses_are_imitated_and_their_tokens_counted() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(moved_model()), AutoTokenizer.from_pretrained(moved_model())
    total, count = 0.0, 0
    for row in SINGLES:
        if row["label"]:
            prompt = tokenizer.encode(row["prompt"])
            tokens = [*prompt, *tokenizer.encode(row["completion"]), tokenizer.eos_token_id]
            with torch.no_grad():
                scores = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
            own = range(len(prompt), len(tokens))
            total, count = total - sum(float(scores[place - 1, tokens[place]]) for place in own), count + len(own)
    added = loss_and_gradient(loss_of("kto", sft_coefficient=0.5))[0] - loss_and_gradient(loss_of("kto"))[0]
    assert added == pytest.approx(0.5 * total / count, abs=1e-5)


def reported(kind: str, first: list[float], second: list[float], is_desirable: list[bool]) -> dict[str, float]:
    """What is reported of rows with some rewards, whose log-probabilities are ten times as large."""
    rewards, others = torch.tensor(first), torch.tensor(second)
    ones, zeros = torch.ones(len(first), dtype=torch.int64), torch.zeros(len(first))
    inputs = PreferenceInputs(
        10 * rewards, 10 * others, zeros, zeros, ones, ones, torch.tensor(is_desirable), torch.zeros(())
    )
    shares = rewards_of(loss_of(kind), inputs, PreferenceOutput(rewards, rewards, others))
    return {name: float(one.total) / float(one.count) for name, one in shares.items() if isinstance(one, Mean)}


def test_equal_rewards_of_a_pair_are_in_no_order() -> None:
    expected = {
        "accuracy": 1 / 4,
        "margin": (0 + 2 - 2 - 1) / 4,
        "reward_chosen": 7 / 4,
        "reward_rejected": 8 / 4,
        "log_prob_chosen": 70 / 4,
        "log_prob_rejected": 80 / 4,
    }
    found = reported("sigmoid", [1.0, 2.0, 3.0, 1.0], [1.0, 0.0, 5.0, 2.0], [True] * 4)
    assert found == pytest.approx(expected)
    scores = shares_of(torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 5.0], [1.0, 2.0]]))
    assert {name: float(one.total) / float(one.count) for name, one in scores.items()} == pytest.approx(  # type: ignore[union-attr]
        {name: value for name, value in expected.items() if not name.startswith("log_prob")}
    )


def test_the_margin_of_single_responses_counts_undesirable_ones_the_other_way_round() -> None:
    expected = {
        "reward_chosen": (1 - 3) / 2,
        "reward_rejected": 2.0,
        "margin": (1 - 2 - 3) / 3,
        "log_prob_chosen": (10 - 30) / 2,
        "log_prob_rejected": 20.0,
    }
    assert reported("kto", [1.0, 2.0, -3.0], [0.0] * 3, [True, False, True]) == pytest.approx(expected)


def test_a_single_response_stands_next_to_that_of_the_usable_row_before(tmp_path: Path) -> None:
    config = TrainingSetConfig.model_validate(SINGLE_DATA | {"path": str(write_rows(tmp_path, "rows.jsonl", SINGLES))})
    encoder = make_encoder(AutoTokenizer.from_pretrained(tiny_model()), config, "data.train")
    source = open_source(config, "data.train", DataCache())
    dataset = Dataset(source, encoder, np.array([0, 2, 3, 6]), num_overlong=3)
    own = {row: encoder.encode(SINGLES[row], "a row").response for row in (0, 2, 3, 6)}
    assert [one.encoded.other for one in dataset.read([3, 0, 6])] == [own[2], own[6], own[3]]
    assert [one.encoded.response for one in dataset.read([3, 0, 6])] == [own[3], own[0], own[6]]


class Scores:
    """A reward model with a score for each sample, which looks at what it is asked."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def values(self, batch: Batch) -> Jagged:
        assert [sum(mask) for mask in batch.jagged("response_mask").to_lists()] == [1] * len(self.scores)
        return Jagged(self.scores, torch.ones(len(self.scores), dtype=torch.int64), "response_tokens")


def rewarded(scores: Tensor, **earlier: object) -> tuple[Batch, dict[str, float]]:
    """The samples of two prompts after the node `reward` of the workflow `rlhf`, and what it reports."""
    workflow, metrics = resolve_workflow("rlhf"), Metrics()
    models = {name: tiny_model() for name in ("policy", "reward_model")}
    sizes = {"data": {"train": {"path": "rows.jsonl"}, "max_prompt_tokens": 8}, "rollout": {"max_response_tokens": 8}}
    recipe = make_recipe(models=models, reward={}, algorithm={"reward_model": {"weight": 2.0}}, **sizes)
    context = StageContext(
        recipe=recipe,
        node=make_plan(recipe, workflow, Cluster(1))["reward"],
        step=1,
        process_group=ALONE,
        metrics=metrics,
        run_directory=cast("RunDirectory", None),
        tokenizer=cast("Tokenizer", None),
        model=cast("ValueEngine", Scores(scores)),
        grade=cast("Grader", None),
    )
    batch = random_samples([(2, 3), (2, 1), (3, 2), (3, 4)], siblings=2).with_columns(**earlier)  # type: ignore[arg-type]
    return model_reward(batch, context), dict(metrics.reduce(ALONE))


def test_a_score_that_is_no_number_fails_its_response_and_no_other() -> None:
    batch, metrics = rewarded(torch.tensor([1.0, math.nan, -0.5, math.inf]))
    assert batch.dense("rewards").tolist() == [2.0, 0.0, -1.0, 0.0]
    assert batch.dense("reward_valid").tolist() == [True, False, True, False]
    details = batch.objects("reward_details")
    assert details[0] == {"reward_model": {"value": 1.0, "answer": None}}
    assert "the reward model has the score nan: look at its weights" in str(details[1])
    assert metrics["reward/reward_model"] == pytest.approx(0.25)
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/failed"] == 2


def test_a_score_is_added_to_earlier_rewards_unless_one_of_both_has_failed() -> None:
    earlier = {
        "rewards": torch.tensor([10.0, 20.0, 30.0, 0.0]),
        "reward_valid": torch.tensor([True, True, True, False]),
        "reward_details": tuple({"math": {"value": number}} for number in range(4)),
    }
    batch, metrics = rewarded(torch.tensor([1.0, math.nan, -0.5, 3.0]), **earlier)
    assert batch.dense("rewards").tolist() == [12.0, 0.0, 29.0, 0.0]
    assert batch.dense("reward_valid").tolist() == [True, False, True, False]
    assert batch.objects("reward_details")[2] == {
        "math": {"value": 2},
        "reward_model": {"value": -0.5, "answer": None},
    }
    assert set(metrics) == {"reward/reward_model"}, "the earlier node reports the others"


@pytest.mark.parametrize(
    ("pad", "unknown", "expected"),
    [("<pad>", None, ("<pad>", 7)), ("<end>", "<unk>", ("<unk>", 7)), ("<end>", None, (None, None))],
)
def test_padding_of_a_sequence_classifier_is_never_the_end(
    pad: str | None, unknown: str | None, expected: tuple[object, object]
) -> None:
    tokenizer = SimpleNamespace(pad_token=pad, unk_token=unknown, eos_token="<end>", convert_tokens_to_ids=lambda _: 7)
    assert padding_of(cast("PreTrainedTokenizerBase", tokenizer)) == expected
