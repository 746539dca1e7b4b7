"""Makes the model and the data of the search example: a tiny untrained Qwen3, pages, questions, and demonstrations.

The demonstrations come from a careless teacher, who often guesses where it should search, and about other worlds, in
which all names are different. A model that imitates the teacher knows how to search and how to read, but no answer.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from examples.search.world import NAME, SYLLABLES, Question, World

from leaderless.environments.search.retriever import Bm25Retriever, Page, Retriever
from leaderless.environments.search.search_r1 import INVALID, show_pages
from leaderless.models.loading.tiny import write_word_model

TOPK = 1
NUM_DEMONSTRATIONS = 8000
GUESSES, STOPS_EARLY, LOOKS_ELSEWHERE = 0.35, 0.6, 0.1
"""How often the teacher answers before a first search, before a second one, or searches for another name."""
NUM_HELD_OUT, NUM_TRAINING = 256, 1024
"""Most questions of each kind."""


def prepare(folder: Path, seed: int = 0) -> None:
    """Write `model/`, `pages.jsonl`, `train.jsonl`, `test.jsonl`, and `demonstrations.jsonl`.

    The questions of `test.jsonl` are about countries and elements that no other question is about.

    Args:
        folder: Folder to write into.
        seed: Seed of the names, the order of the questions, the teacher's mistakes and the model's weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    world, generator = World(seed), Random(seed)
    questions = generator.sample(world.questions, len(world.questions))
    test = [row(question) for question in questions if question.is_held_out]
    train = [row(question) for question in questions if not question.is_held_out]
    shown = list(demonstrate(seed + 1))
    write_rows(folder / "pages.jsonl", world.pages)
    write_rows(folder / "train.jsonl", train[:NUM_TRAINING])
    write_rows(folder / "test.jsonl", test[:NUM_HELD_OUT])
    write_rows(folder / "demonstrations.jsonl", shown)
    write_word_model(folder / "model", words(), pieces(), seed=seed, hidden_size=128, num_layers=2)


def row(question: Question) -> dict[str, str]:
    """A question as a row of data."""
    kind = f"{question.searches[-1].word}, {len(question.searches)} searches"
    response = f"<answer> {question.answer} </answer>"
    return {"question": question.text, "answer": question.answer, "response": response, "kind": kind}


def demonstrate(seed: int) -> Iterator[dict[str, str]]:
    """What the teacher says in some episodes: each message with everything before it.

    Each episode is in a world with other names.
    """
    world, generator = World(seed), Random(seed)
    retriever = Bm25Retriever([Page(page["contents"]) for page in world.pages])
    kinds = [[one for one in world.questions if len(one.searches) == number] for number in (1, 2)]
    for number in range(NUM_DEMONSTRATIONS):
        others = dict(zip(world.names, generator.sample(world.names, len(world.names)), strict=True))
        for turn in teach(generator.choice(kinds[number % 2]), world, retriever, generator):
            yield {key: renamed(text, others) for key, text in turn.items()}


def renamed(text: str, others: Mapping[str, str]) -> str:
    """A text with other names."""
    return re.sub(NAME, lambda name: others[name[0]], text)


def teach(question: Question, world: World, retriever: Retriever, generator: Random) -> Iterator[dict[str, str]]:
    """What the careless teacher says to a question."""
    before, answer = f"{question.text}\n", generator.choice(world.names)
    for place, search in enumerate(question.searches):
        if generator.random() < (STOPS_EARLY if place else GUESSES):
            break
        is_elsewhere = generator.random() < LOOKS_ELSEWHERE
        name, answer = (generator.choice(world.names), answer) if is_elsewhere else (search.name, search.found)
        query = f"{search.word} {name}"
        said = f"<search> {query} </search>"
        yield {"prompt": before, "response": said}
        found = show_pages(retriever.search(query, TOPK))
        before += f"{said}\n\n<information>{found}</information>\n\n"
        if is_elsewhere:
            break
    yield {"prompt": before, "response": f"<answer> {answer} </answer>"}


def words() -> list[str]:
    """The words of all texts with the blank before them, and tags."""
    world = World(0)
    texts = [INVALID, *(page["contents"] for page in world.pages), *(question.text for question in world.questions)]
    texts += ["<information>Doc</information>\n\n<search> discovered currency people capital </search>"]
    texts += ["<answer> </answer>"]
    found = {word for text in texts for word in re.findall(r" ?</?[a-z]+>| ?[A-Za-z]+", re.sub(f" ?{NAME}", "", text))}
    return sorted({*found, *(f"Doc {number}(Title:" for number in range(1, TOPK + 1))})


def pieces() -> list[str]:
    """The syllables of names, with a blank before those that begin one, and single characters."""
    first = (mark + syllable.capitalize() for syllable in SYLLABLES for mark in ("", " "))
    return [*SYLLABLES, *first, *string.digits, *" .?:()<>/,\n"]


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    """Write a JSON-lines file.

    Args:
        path: File to write.
        rows: Content of each line.
    """
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    prepare(Path("runs/search-data"))
