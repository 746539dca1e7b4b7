"""GSM8K as published, and Qwen models with a chat template, with the recipe for them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, metrics, succeed
from tests.tiny import tiny_model

from leaderless.config import load_recipe
from leaderless.config.data import DatasetConfig
from leaderless.data.prompts.encode import RowEncoder
from leaderless.data.sources.open_source import open_source
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.rewards.pool import RewardPool
from leaderless.rewards.protocol import RewardInput

ROWS = [
    (
        (
            "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
            "How many clips did Natalia sell altogether in April and May?"
        ),
        (
            "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
            "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"
        ),
    ),
    (
        (
            "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. "
            "How much did she earn?"
        ),
        (
            "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 = "
            "$<<0.2*50=10>>10.\n#### 10"
        ),
    ),
    (
        "A factory makes 1,250 toys a day. It sells them in boxes of 10 for $40. How much does it earn in 5 days?",
        (
            "It makes 1250*5=<<1250*5=6250>>6,250 toys.\nThat is 6250/10=<<6250/10=625>>625 boxes.\n"
            "So it earns 625*$40=$<<625*40=25000>>25,000\n#### 25,000"
        ),
    ),
    ("The temperature was 3 degrees and fell by 8. What is it now?", "3-8=<<3-8=-5>>-5\n#### -5"),
] * 3
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def gsm8k(tmp_path: Path) -> dict[str, Path]:
    """The two files of the dataset's configuration `main`."""
    files = {}
    for split in ("train", "test"):
        questions, answers = zip(*ROWS, strict=True)
        table = pa.table({"question": pa.array(questions, pa.string()), "answer": pa.array(answers, pa.string())})
        files[split] = tmp_path / f"{split}-00000-of-00001.parquet"
        parquet.write_table(table, files[split])
    return files


SMALL = (
    *("data.max_prompt_tokens=400", "rollout.max_response_tokens=8", "rollout.max_sequences=16"),
    *("batch.prompts_per_step=4", "batch.responses_per_prompt=4", "batch.micro_batch_tokens=1024"),
    *(
        "loggers=[]",
        "steps=2",
        "evaluation.every_steps=2",
        "optimizer.learning_rate=1e-3",
        "optimizer.warmup_updates=0",
    ),
)


@pytest.mark.parametrize(
    ("family", "compute_dtype", "num_ranks"),
    [("qwen2", "bfloat16", 2), pytest.param("qwen3", "float32", 1, marks=pytest.mark.thorough)],
)
def test_the_gsm8k_recipe_trains_a_qwen_model_on_the_published_format(
    ranks: RankPool, tmp_path: Path, gsm8k: dict[str, Path], family: str, compute_dtype: str, num_ranks: int
) -> None:
    model = tiny_model(family, CHAT)  # type: ignore[arg-type]
    overrides = (
        f"models.policy.path={model}",
        f"models.policy.compute_dtype={compute_dtype}",
        f"data.train.path={gsm8k['train']}",
        f"data.evaluation.path={gsm8k['test']}",
        f"run.directory={tmp_path}/runs",
        # An untrained model is never right; a letter more or less gives its groups a signal.
        "reward={math: 1.0, 'tests.end_to_end.own_code:share_of_digits': 1.0}",
        *SMALL,
    )
    succeed(ranks, tmp_path, "train", ROOT / "recipes/gsm8k/grpo.yaml", *overrides, num_ranks=num_ranks)
    lines = metrics(tmp_path / "runs/gsm8k-grpo")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["evaluation/mean@1"] == lines[2]["evaluation/mean@1"] == 0
    assert lines[0]["evaluation/failed"] == 0, "every expected answer could be read"
    for line in lines[1:]:
        assert (line["reward/failed"], line["reward/math"]) == (0, 0)
        assert line["policy/grad_norm"] > 0
        assert line["mismatch/abs_mean"] < (0.05 if compute_dtype == "bfloat16" else 1e-4)
    file = tmp_path / "runs/gsm8k-grpo/samples/step-000001.rank-0.jsonl"
    sample = json.loads(file.read_text().splitlines()[0])
    assert (sample["prompt"], sample["answer"]) in ROWS


def test_prompts_are_what_the_chat_template_makes_of_question_and_system(gsm8k: dict[str, Path]) -> None:
    recipe = load_recipe(ROOT / "recipes/gsm8k/grpo.yaml", [f"data.train.path={gsm8k['train']}"]).recipe
    model = recipe.models["policy"].model_copy(update={"path": tiny_model("qwen2", CHAT)})
    tokenizer = load_tokenizer(model, "policy")
    source = open_source(recipe.data.train, "data.train")
    assert len(source) == len(ROWS)
    encoded = RowEncoder(tokenizer, recipe.data.train, "data.train").encode(source.row(1), "row 1")
    text = tokenizer.decode(encoded.prompt)
    assert text.startswith("<|im_start|>system\nReason step by step")
    assert text.endswith(f"<|im_end|>\n<|im_start|>user\n{ROWS[1][0]}<|im_end|>\n<|im_start|>assistant\n")


RESPONSES = {
    "So the final answer is \\boxed{ANSWER}.": 1.0,
    "Step by step, she gets there.\n#### ANSWER": 1.0,
    "It is $ANSWER$, I think.": 1.0,
    "The answer is 123456.": 0.0,
    "": 0.0,
}


def test_answers_of_gsm8k_are_graded_by_their_last_line(gsm8k: dict[str, Path]) -> None:
    recipe = load_recipe(ROOT / "recipes/gsm8k/grpo.yaml").recipe
    data = DatasetConfig(path=str(gsm8k["train"]), prompt="question", answer="answer")
    source = open_source(data, "data.train")
    rows = [source.row(index) for index in range(4)]
    inputs = [
        RewardInput(
            row["question"], response.replace("ANSWER", str(row["answer"]).rpartition("#### ")[2]), row["answer"], row,
            is_truncated=False,
        )
        for response in RESPONSES
        for row in rows
    ]  # fmt: skip
    with RewardPool(recipe.reward, 1) as pool:
        graded = pool.grade(inputs, [None] * len(inputs))
    wanted = [(expected, True) for expected in RESPONSES.values() for _ in rows]
    assert [(g.value, g.is_valid) for g in graded] == wanted
