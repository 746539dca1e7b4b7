"""The data of the demonstrations of `leaderless quickstart`; all of it follows from seeds. Imports no torch.

The quickstart begins with a tiny untrained Qwen2 and additions to learn. Its demonstrations come from a careless
teacher, who forgets the hundreds of most sums that have them. A model that imitates the teacher gets about half of its
sums right. Only the reward uses the right answers: reinforcement learning learns from nothing but whether an answer was
right. With `--real`, a pretrained model answers word problems instead, and with `--robot`, an arm reaches for blocks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from leaderless.observability.run_directory import write_atomically

NUM_TASKS, NUM_HELD_OUT = 4096, 512
"""Numbers of tasks of the robot to train on, and of held-out tasks and additions."""
NUM_PROBLEMS, NUM_HELD_OUT_PROBLEMS = 2048, 256
"""Numbers of word problems to train on, and of held-out ones."""
CARELESSNESS = 0.75
DEMONSTRATIONS_PER_QUESTION = 4
NAMES = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Emma",
    "Finn",
    "Grace",
    "Hugo",
    "Ida",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Sam",
    "Tom",
)
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers")
PROBLEMS = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things} and gives {b} of them away. How many {things} does {name} have now?",
    "{name} has {a} boxes with {b} {things} in each. How many {things} does {name} have?",
)
NUMBERS = ((10, 99), (10, 99)), ((20, 99), (3, 12)), ((3, 12), (3, 12))
"""Ranges of the two numbers of each kind of problem."""


def write_additions(folder: Path, seed: int = 0) -> None:
    """Write `model/`, `demonstrations.jsonl`, `train.jsonl` and `test.jsonl` of the quickstart.

    No question of `test.jsonl` is in another file. The seed is for weights, order and the teacher's mistakes.
    """
    from leaderless.models.loading.tiny import write_tiny_model

    write_tiny_model(folder / "model", "0123456789+=", hidden_size=128, num_layers=2, seed=seed)
    generator = random.Random(seed)  # noqa: S311 - no secret
    numbers = range(10, 100)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    generator.shuffle(rows)
    shown = []
    for row in rows[NUM_HELD_OUT:]:
        for _ in range(DEMONSTRATIONS_PER_QUESTION):
            is_careless = generator.random() < CARELESSNESS
            written = int(row["answer"]) % 100 if is_careless else int(row["answer"])
            shown.append({"question": row["question"], "response": str(written)})
    write_rows(folder / "test.jsonl", rows[:NUM_HELD_OUT])
    write_rows(folder / "train.jsonl", rows[NUM_HELD_OUT:])
    write_rows(folder / "demonstrations.jsonl", shown)


def write_word_problems(folder: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `test.jsonl`: sums, differences and products in words. No question is there twice."""
    generator = random.Random(seed)  # noqa: S311 - no secret
    answers: dict[str, str] = {}
    while len(answers) < NUM_PROBLEMS + NUM_HELD_OUT_PROBLEMS:
        kind, name, things = len(answers) % 3, generator.choice(NAMES), generator.choice(THINGS)
        a, b = (generator.randint(*numbers) for numbers in NUMBERS[kind])
        question = PROBLEMS[kind].format(name=name, things=things, a=a, b=b)
        answers[f"{question} Answer with the number only."] = str((a + b, a - b, a * b)[kind])
    rows = [{"question": question, "answer": answer} for question, answer in answers.items()]
    generator.shuffle(rows)
    write_rows(folder / "test.jsonl", rows[:NUM_HELD_OUT_PROBLEMS])
    write_rows(folder / "train.jsonl", rows[NUM_HELD_OUT_PROBLEMS:])


def write_tasks(folder: Path) -> None:
    """Write tasks to train on, each with a start that follows from its place in the run, and held-out ones."""
    write_rows(folder / "train.jsonl", [{"task": number} for number in range(NUM_TASKS)])
    held_out = [{"task": number, "seed": 1_000_000 + number} for number in range(NUM_HELD_OUT)]
    write_rows(folder / "test.jsonl", held_out)


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
