"""The recipes for models that see images, on small data of the published forms."""

from __future__ import annotations

import json
import shutil
from base64 import b64encode
from pathlib import Path
from statistics import mean

import pyarrow as pa
import pytest
import torch
from examples.counting.prepare import prepare
from pyarrow import parquet
from tests.distributed.ranks import RankPool
from tests.distributed.test_vision import with_own_head
from tests.end_to_end.cli import ROOT, metrics, succeed
from tests.pictures import picture, vision_model
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from leaderless import Run
from leaderless.config import RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.config.models import ModelConfig
from leaderless.data.prompts.preferences import make_encoder
from leaderless.models.loading.support import register_classifiers
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.vision.image_readers import open_reader
from leaderless.observability.run_directory import RunDirectory

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALONE = ("loggers=[]", "run.reward_processes=0")
"""Settings without processes next to the ranks; the first test has them as the recipes say."""


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the data of the example."""
    folder = tmp_path_factory.mktemp("counting")
    prepare(folder, num_pictures=64)
    return folder


def test_counting_is_imitated_exported_and_reinforced(ranks: RankPool, tmp_path: Path, counting: Path) -> None:
    texts = [(counting / f"{name}.jsonl").read_text().splitlines() for name in ("test", "shuffled")]
    asked, shuffled = ([json.loads(line) for line in lines] for lines in texts)
    assert [row["answer"] for row in asked] == [row["answer"] for row in shuffled]
    assert sum(one["image"] != other["image"] for one, other in zip(asked, shuffled, strict=True)) > 480
    common = (
        f"data.train.path={counting}/train.jsonl",
        f"data.evaluation.path={counting}/test.jsonl",
        f"run.directory={tmp_path}/runs",
        *("evaluation.max_prompts=8", "steps=2", "batch.prompts_per_step=8"),
    )
    recipes, out = ROOT / "recipes/vision/counting", tmp_path / "base"
    succeed(ranks, tmp_path, "train", recipes / "sft.yaml", f"models.policy={counting}/model", *common)
    succeed(ranks, tmp_path, "export", f"{tmp_path}/runs/counting-sft", str(out))
    model, _ = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    before = AutoModelForImageTextToText.from_pretrained(counting / "model")
    assert any(bool((a != b).any()) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert open_reader(ModelConfig(path=str(out)), "policy").grid(32, 32) == (4, 4)
    succeed(ranks, tmp_path, "train", recipes / "grpo.yaml", f"models.policy={out}", *common, num_ranks=2)
    lines = metrics(tmp_path / "runs/counting")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["evaluation/failed"] == 0
    assert all(line["mismatch/abs_mean"] < 1e-5 for line in lines[1:])
    run = Run(str(recipes / "grpo.yaml"), f"models.policy={out}", *common)
    first, again, other = run.generate([asked[0], asked[0], asked[1]], temperature=0, max_tokens=2)
    assert first == again
    assert [first, other] == [run.generate([row], temperature=0, max_tokens=2)[0] for row in asked[:2]]
    with pytest.raises(RecipeError, match=r"prompt 0: its text has places for 1 images \(<image>\), but the row has 0"):
        run.generate([asked[0]["question"]])
    page = (tmp_path / "runs/counting/report.html").read_text()
    assert page.count("data:image/png;base64,iVBOR") >= 2, "the report shows pictures of training and of evaluation"


def test_a_critic_that_sees_is_resumed_and_exported(ranks: RankPool, tmp_path: Path, counting: Path) -> None:
    common = (
        f"models.policy={counting}/model",
        f"data.train.path={counting}/train.jsonl",
        f"data.evaluation.path={counting}/test.jsonl",
        f"run.directory={tmp_path}/runs",
        *("evaluation.every_steps=0", "batch.prompts_per_step=6", "checkpoint.every_steps=1"),
        *ALONE,
        *("algorithm.critic.warmup_steps=0", "optimizer.learning_rate=1e-2", "reward={format: {pattern: '.*[0-2].*'}}"),
    )
    recipe, run, seen = ROOT / "recipes/vision/counting/ppo.yaml", tmp_path / "runs/counting-ppo", []
    last = run / "checkpoints/step-000002"
    for _ in range(2):  # the second start continues from the first step
        succeed(ranks, tmp_path, "train", recipe, *common, "steps=2", num_ranks=2)
        kept = ("critic/", "policy/", "reward/")
        seen.append([{key: value for key, value in line.items() if key.startswith(kept)} for line in metrics(run)])
        whole = last.rename(tmp_path / f"whole-{len(seen)}")
        assert last.with_name("step-000001").exists()
    assert seen[0] == seen[1]
    assert seen[0][0]["critic/value_mean"] == 0
    assert seen[0][1]["critic/value_mean"] != 0
    out = tmp_path / "critic"
    succeed(ranks, tmp_path, "export", str(whole), str(out), "--role", "critic")
    register_classifiers(AutoConfig.from_pretrained(out))
    model, problems = AutoModelForTokenClassification.from_pretrained(out, output_loading_info=True)
    assert not any(problems.values()), problems
    assert bool(model.score.weight.any())


def test_a_reward_model_that_sees_learns_from_pairs_and_rewards_a_policy(
    ranks: RankPool, tmp_path: Path, counting: Path
) -> None:
    common = (
        *(f"data.{name}.path={counting}/{file}.jsonl" for name, file in (("train", "train"), ("evaluation", "test"))),
        *(f"run.directory={tmp_path}/runs", "batch.prompts_per_step=6", "optimizer.learning_rate=1e-2"),
        *("optimizer.warmup_updates=0", "evaluation.max_prompts=5"),
        *ALONE,
    )
    recipes, out, model = ROOT / "recipes/vision/counting", tmp_path / "judge", f"={counting}/model"
    learned = ("steps=2", "evaluation.every_steps=2", f"models.reward_model{model}")
    succeed(ranks, tmp_path, "train", recipes / "reward_model.yaml", *common, *learned, num_ranks=2)
    found = metrics(tmp_path / "runs/counting-reward-model")[-1]
    succeed(ranks, tmp_path, "export", f"{tmp_path}/runs/counting-reward-model", str(out), "--role", "reward_model")
    judge, problems = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not any(problems.values()), problems
    described = ModelConfig(path=str(out))
    tokenizer = load_tokenizer(described, "judge")
    reader = open_reader(described, "judge", tokenizer)
    columns = {"prompt": "question", "images": "image", "chosen": "answer", "rejected": "wrong", "template": "plain"}
    data = DatasetConfig.model_validate({"path": f"{counting}/test.jsonl", **columns})
    encoder = make_encoder(tokenizer, data, "data.evaluation", reader=lambda: reader)
    margins = []
    for line in (counting / "test.jsonl").read_text().splitlines()[:5]:
        row = encoder.encode(json.loads(line), "a row")
        pixels = reader.pixels(row.images)
        scores = []
        for response in (row.response, row.other):
            tokens = torch.tensor([[*row.prompt, *response]])
            seen = {"pixel_values": pixels.values, "image_grid_thw": pixels.grids}
            with torch.no_grad():
                kinds = (tokens == reader.token).int()
                scores.append(float(judge(input_ids=tokens, mm_token_type_ids=kinds, **seen).logits))
        margins.append(scores[0] - scores[1])
    assert abs(mean(margins)) > 1e-3, "it has learned something"
    assert found["evaluation/margin"] == pytest.approx(mean(margins), abs=1e-4)
    assert found["evaluation/accuracy"] == mean(margin > 0 for margin in margins)
    taught = ("steps=1", "evaluation.every_steps=0", f"models={{policy: {counting}/model, reward_model: {out}}}")
    succeed(ranks, tmp_path, "train", recipes / "rlhf.yaml", *common, *taught, num_ranks=2)
    (line,) = metrics(tmp_path / "runs/counting-rlhf")
    assert line["reward/failed"] == 0
    assert line["reward/std"] > 1e-3, "other answers, and those to other pictures, have other scores"


def test_a_prompt_read_in_both_directions_is_answered_and_learned(ranks: RankPool, tmp_path: Path) -> None:
    rows = [
        {
            "question": f"how many red squares? {number % 7}",
            "image": f"data:image/png;base64,{b64encode(picture(24, 16, number)).decode()}",
            "answer": str(number % 5),
        }
        for number in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = (
        f"models.policy={vision_model('paligemma')}",
        *(f"data.{name}.path={tmp_path}/rows.jsonl" for name in ("train", "evaluation")),
        *(f"run.directory={tmp_path}/runs", "batch.prompts_per_step=8", "evaluation.max_prompts=4", "steps=2"),
        *("rollout.max_response_tokens=4", *ALONE),
    )
    succeed(ranks, tmp_path, "train", ROOT / "recipes/vision/counting/grpo.yaml", *overrides, num_ranks=2)
    lines = metrics(tmp_path / "runs/counting")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["mismatch/abs_max"] < 1e-5 for line in lines[1:])


# tests/end_to_end/test_preferences.py trains on images with tp.
@pytest.mark.parametrize("axis", [pytest.param("tp", marks=pytest.mark.thorough), "pp"])
def test_geometry3k_is_read_as_published(ranks: RankPool, tmp_path: Path, axis: str) -> None:
    figures = [[{"bytes": picture(40, 24, seed), "path": None}] for seed in range(8)]
    table = pa.table({"images": figures, "problem": [f"<image>Find x{i}." for i in range(8)], "answer": ["3"] * 8})
    parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    source = with_own_head(tmp_path, "qwen3_vl") if axis == "pp" else vision_model("qwen2_5_vl")
    shutil.copytree(source, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "model")
    file = tmp_path / "train-00000-of-00001.parquet"
    overrides = (
        f"models.policy={{path: {tmp_path}/model, compute_dtype: float32}}",
        *(f"data.train.path={file}", f"data.evaluation.path={file}", f"run.directory={tmp_path}/runs"),
        *("batch.prompts_per_step=4", "batch.responses_per_prompt=4", "batch.micro_batch_tokens=1024", "steps=2"),
        *("rollout.max_response_tokens=8", "data.max_prompt_tokens=60", "evaluation.every_steps=1"),
        f"layout={{policy: {{{axis}: 2}}, old: {{{axis}: 2}}}}",
        *ALONE,
    )
    succeed(ranks, tmp_path, "train", ROOT / "recipes/vision/geometry3k.yaml", *overrides, num_ranks=2)
    (_, *lines) = metrics(tmp_path / "runs/geometry3k-grpo")
    assert all(line["reward/failed"] == 0 for line in lines)
    assert all(line["mismatch/abs_mean"] < 1e-5 for line in lines), "the engine has the weights of both ranks"
    samples = tmp_path / "runs/geometry3k-grpo/samples/step-000001.rank-0.jsonl"
    assert json.loads(samples.read_text().splitlines()[0])["answer"] == "3"


@pytest.mark.parametrize("mode", ["lockstep", "continuous"])
def test_an_album_is_leafed_through_turn_by_turn(ranks: RankPool, tmp_path: Path, counting: Path, mode: str) -> None:
    channel: tuple[str, ...] = ()
    if mode == "continuous":
        pools = '{rollout: {ranks: "0"}, reward: {ranks: "0"}, advantage: {ranks: "1"}, policy: {ranks: "1"}}'
        channel = ("channels.rollout={capacity: 1, mode: continuous}", f"layout={pools}")
    overrides = (
        f"models.policy={counting}/model",
        *(f"data.train.path={counting}/train.jsonl", f"data.evaluation.path={counting}/test.jsonl"),
        *(f"run.directory={tmp_path}/runs", "batch.prompts_per_step=8", "batch.responses_per_prompt=4", "steps=2"),
        *("evaluation.every_steps=2", "evaluation.max_prompts=4", "batch.micro_batch_tokens=256"),
        *ALONE,
    )
    recipe = ROOT / "recipes/vision/counting/album.yaml"
    succeed(ranks, tmp_path, "train", recipe, *overrides, *channel, num_ranks=2)
    lines = [dict(line) for line in RunDirectory(tmp_path / "runs/counting-album").read_metrics() if line["step"]]
    assert [(line["episode/failed"], line["episode/turns"]) for line in lines] == [(0, 2)] * 2
    if mode == "continuous":
        followed = ("run.follow=counting-album", "name=again")
        succeed(ranks, tmp_path, "train", recipe, *overrides, *channel, *followed, num_ranks=2)
        again = [line for line in RunDirectory(tmp_path / "runs/again").read_metrics() if line["step"]]
        assert [line["policy/loss"] for line in again] == [line["policy/loss"] for line in lines]
        return
    assert all(line["mismatch/abs_mean"] < 1e-5 for line in lines)
    assert all(line["rollout/prefix_hits"] == 1 for line in lines)
    page = (tmp_path / "runs/counting-album/report.html").read_text()
    assert page.count("data:image/png;base64,iVBOR") >= 12, "the report shows the pictures of each turn"
    assert "<|image_pad|> × 16" in page.replace("\\u003c", "<").replace("\\u003e", ">").replace("\\u00d7", "×")
