"""The real lm-eval measures tasks of its kinds with a served model; see `make test-evals`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evaluators_in_use.served import QUESTIONS, Decoder, evaluated, ran, serving

from leaderless.observability.evaluations import read_evaluations

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="`make test-evals` runs this with lm-eval")
CHOICES, TEXTS, WORDS, CHATS = "own_choices", "own_texts", "own_words", "own_chats"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.of_tests(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tasks(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of each kind, whose rows are a file next to it."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in decoder.rows), encoding="utf-8")
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}, train: {rows}}}}}
test_split: test
fewshot_split: train
doc_to_text: "{{{{question}}}}"
"""
    generation = """
output_type: generate_until
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
    kinds = {
        CHOICES: """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
        TEXTS: generation,
        CHATS: generation,
        WORDS: """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    }
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}{common}{kind}", encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Measured:
    """What one call has measured: its scores by task and metric, and what it was answered, by task."""

    scores: dict[tuple[str, str], Any]
    samples: dict[str, list[Any]]


def measured(folder: Path) -> Measured:
    """What lies in the folder of an evaluation."""
    (found,) = read_evaluations(folder)
    samples = {
        re.findall(r"samples_(\w+?)_\d{4}-", path.name)[0]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.rglob("samples_*.jsonl")
    }
    return Measured({(one.task, one.metric): one for one in found.scores}, samples)


@pytest.fixture(scope="module")
def found(decoder: Decoder, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """All kinds, by `leaderless eval`."""
    folder = tmp_path_factory.mktemp("measured")
    named = [word for name in (CHOICES, TEXTS, WORDS) for word in ("--task", name)]
    output = evaluated(decoder.path, *named, "--include-path", tasks, "--out", folder / "evaluations/one", "--", "-s")
    assert f"{CHOICES} │ acc │" in " ".join(output.split())
    return measured(folder)


def test_multiple_choice_has_the_log_probabilities_of_the_model(decoder: Decoder, found: Measured) -> None:
    num_right = num_greedy = largest = 0
    assert len(found.samples[CHOICES]) == len(QUESTIONS)
    for sample in found.samples[CHOICES]:
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        own = [decoder.score(question, choice) for choice in choices]
        for (log_prob, is_greedy), (expected, expected_greedy) in zip(sample["filtered_resps"], own, strict=True):
            largest = max(largest, abs(float(log_prob) - expected))
            assert str(is_greedy) == str(expected_greedy)
            num_greedy += expected_greedy
        num_right += max(range(len(own)), key=lambda place: own[place][0]) == sample["doc"]["gold"]
    assert largest < 1e-4, largest
    assert num_greedy > 0
    print(f"log-probabilities differ by at most {largest:.1e}; {num_greedy} choices are greedy")
    accuracy = found.scores[CHOICES, "acc"]
    assert accuracy.value == pytest.approx(num_right / len(QUESTIONS))
    assert accuracy.standard_error > 0
    assert accuracy.num_rows == len(QUESTIONS)


def test_generated_texts_are_the_greedy_ones(decoder: Decoder, found: Measured) -> None:
    for sample in found.samples[TEXTS]:
        expected = decoder.greedy(decoder.encode(sample["doc"]["question"]), 8).partition("\n")[0]
        assert sample["resps"] == [[expected]]
    assert (TEXTS, "exact_match") in found.scores


def test_whole_texts_have_their_bits(decoder: Decoder, found: Measured) -> None:
    bits = size = 0.0
    for question in QUESTIONS:
        tokens = decoder.encode(question)
        bits -= decoder.log_prob([decoder.tokenizer.eos_token_id], tokens)[0] / torch.tensor(2.0).log().item()
        size += len(question.encode())
    assert found.scores[WORDS, "bits_per_byte"].value == pytest.approx(bits / size, abs=1e-4)


def test_examples_limits_and_chat_templates_are_passed_on(decoder: Decoder, tasks: Path, tmp_path: Path) -> None:
    named = ("--task", CHATS, "--include-path", tasks, "--limit", 3, "--num-fewshot", 1)
    evaluated(decoder.path, *named, "--out", tmp_path / "evaluations/one", "--", "--apply_chat_template", "-s")
    found = measured(tmp_path)
    score = found.scores[CHATS, "exact_match"]
    assert (score.num_rows, score.num_shots) == (3, 1)
    for sample in found.samples[CHATS]:
        prompt = sample["arguments"]["gen_args_0"]["arg_0"]
        assert prompt.count("user") == 2, "an example, and the question"
        assert sample["resps"] == [[decoder.greedy(decoder.encode(prompt), 8).partition("\n")[0]]]


def test_its_own_command_asks_a_server(decoder: Decoder, tasks: Path, tmp_path: Path) -> None:
    """As its documentation says: completions by text and by tokens, and chats."""
    with serving(decoder.path) as (url, name):
        for model, path, more in (
            ("local-completions", "completions", f",tokenizer={decoder.path},tokenized_requests=False"),
            ("local-completions", "completions", f",tokenizer={decoder.path},num_concurrent=4,max_length=512"),
            ("local-chat-completions", "chat/completions", ",num_concurrent=4"),
        ):
            command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--include_path", str(tasks)]
            command += ["--model_args", f"model={name},base_url={url}/{path}{more}"]
            command += ["--tasks", TEXTS if "chat" in path else f"{TEXTS},{CHOICES}", "--output_path", str(tmp_path)]
            command += ["--apply_chat_template"] * ("chat" in path)
            output = ran(command, tmp_path)
            assert "API request failed" not in output
            assert f"|{TEXTS}|" in output.replace(" ", "")


def test_a_task_that_does_not_exist_is_named_with_the_nearest_one(decoder: Decoder, tasks: Path) -> None:
    said = evaluated(decoder.path, "--task", "own_choises", "--include-path", tasks, code=2)
    assert f"'own_choises' is no task of lm-eval 0.4.13 (did you mean '{CHOICES}'?)" in " ".join(said.split())
    assert "(did you mean 'hellaswag'?)" in " ".join(evaluated(decoder.path, "--task", "helaswag", code=2).split())
