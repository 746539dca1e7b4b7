"""The real inspect-ai and the real lighteval measure tasks with a served model; see `make test-evals`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.evaluators_in_use.served import QUESTIONS, Decoder, ran, serving

LIGHTEVAL = os.environ.get("LEADERLESS_LIGHTEVAL_PYTHON")
"""Python of an environment with lighteval, whose dependencies exclude those of this package."""
needs_inspect = pytest.mark.skipif(
    find_spec("inspect_ai") is None, reason="`make test-evals` runs this with inspect-ai"
)
MOST_TOKENS = 8
INSPECT_TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import choice, exact
from inspect_ai.solver import generate, multiple_choice


@task
def texts():
    return Task(dataset=json_dataset("rows.jsonl"), solver=generate(), scorer=exact())


@task
def choices():
    return Task(dataset=json_dataset("rows.jsonl"), solver=multiple_choice(), scorer=choice())
"""
LIGHTEVAL_TASKS = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def asked(line, task_name):
    return Doc(task_name=task_name, query=line["question"], choices=line["choices"], gold_index=line["gold"])


TASKS_TABLE = [
    LightevalTaskConfig(
        name="own",
        prompt_function=asked,
        hf_repo="FOLDER",
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        generation_size=MOST_TOKENS,
        stop_sequence=["\\n"],
        metrics=[Metrics.exact_match],
    )
]
"""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.of_tests(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def site(decoder: Decoder) -> Iterator[tuple[str, str]]:
    with serving(decoder.path) as found:
        yield found


def chat_of(decoder: Decoder, question: str) -> list[int]:
    """The tokens of a chat with a question."""
    messages = [{"role": "user", "content": question}]
    tokens: list[int] = decoder.tokenizer.apply_chat_template(messages, add_generation_prompt=True).input_ids
    return tokens


def inspected(folder: Path, decoder: Decoder, site: tuple[str, str], *options: str) -> dict[str, Any]:
    """The logs of tasks of inspect-ai, by their names."""
    url, name = site
    rows = [
        {"input": row["question"], "target": "A", "choices": row["choices"], "id": number}
        for number, row in enumerate(decoder.rows)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "own.py").write_text(INSPECT_TASKS)
    command = [sys.executable, "-m", "inspect_ai", "eval", "own.py", "--model", f"openai-api/served-here/{name}"]
    command += ["--temperature", "0", "--max-tokens", str(MOST_TOKENS), "--log-dir", "logs", "--log-format", "json"]
    keys = {"SERVED_HERE_BASE_URL": url, "SERVED_HERE_API_KEY": "none"}
    ran([*command, "--display", "plain", *options], folder, keys)
    logs = [json.loads(path.read_text()) for path in (folder / "logs").glob("*.json")]
    return {log["eval"]["task"]: log for log in logs}


@needs_inspect
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="chats"),
        pytest.param(("-M", "stream=true"), id="streamed chats"),
        pytest.param(("-M", "responses_api=true"), id="responses"),
    ],
)
def test_inspect_gets_the_greedy_answers(
    decoder: Decoder, site: tuple[str, str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    logs = inspected(tmp_path, decoder, site, *options)
    assert logs.keys() == {"texts", "choices"}
    for log in logs.values():
        assert log["status"] == "success"
        (score,) = log["results"]["scores"]
        assert {"stderr"} < score["metrics"].keys()
        assert len(log["samples"]) == len(QUESTIONS)
        for sample in log["samples"]:
            prompt = chat_of(decoder, sample["messages"][0]["content"])
            assert sample["output"]["completion"].strip() == decoder.greedy(prompt, MOST_TOKENS).strip()
            assert sample["output"]["usage"]["input_tokens"] == len(prompt)


@needs_inspect
def test_inspect_gets_log_probabilities(decoder: Decoder, site: tuple[str, str], tmp_path: Path) -> None:
    logs = inspected(tmp_path, decoder, site, "--logprobs", "--top-logprobs", "2", "--num-choices", "1", "--seed", "3")
    for sample in logs["texts"]["samples"]:
        content = sample["output"]["choices"][0]["logprobs"]["content"]
        assert content
        assert all(len(one["top_logprobs"]) == 2 and one["logprob"] <= 0 for one in content)


@pytest.mark.skipif(LIGHTEVAL is None, reason="`make test-evals` runs this with lighteval")
def test_lighteval_gets_the_greedy_answers(decoder: Decoder, site: tuple[str, str], tmp_path: Path) -> None:
    url, name = site
    rows = tmp_path / "data/test.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps(row) + "\n" for row in decoder.rows), encoding="utf-8")
    own = LIGHTEVAL_TASKS.replace("FOLDER", str(rows.parent)).replace("MOST_TOKENS", str(MOST_TOKENS))
    (tmp_path / "own.py").write_text(own)
    parameters = {"model_name": f"openai/{name}", "base_url": url, "api_key": "none", "max_model_length": 512}
    parameters |= {"cache_dir": str(tmp_path / "cache"), "generation_parameters": {"temperature": 0.0, "seed": 1}}
    (tmp_path / "model.yaml").write_text(json.dumps({"model_parameters": parameters}))  # JSON is YAML
    command = [str(LIGHTEVAL), "-m", "lighteval", "endpoint", "litellm", "model.yaml", "own|0"]
    command += ["--custom-tasks", "own.py", "--output-dir", "out", "--save-details"]
    assert "Error in API call" not in ran(command, tmp_path, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})
    (path,) = (tmp_path / "out").rglob("results_*.json")
    measured = json.loads(path.read_text())["results"]
    greedy = [decoder.greedy(chat_of(decoder, question), MOST_TOKENS).partition("\n")[0] for question in QUESTIONS]
    right = [text.strip() == row["choices"][row["gold"]] for text, row in zip(greedy, decoder.rows, strict=True)]
    assert measured["own|0"]["em"] == pytest.approx(sum(right) / len(right))
    assert "em_stderr" in measured["own|0"]
