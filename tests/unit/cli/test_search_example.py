"""The search example: its questions can be answered by searching only, and its demonstrations give nothing away."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

import pytest
from examples.search import prepare
from examples.search.world import NAME, Search, World

from leaderless.config import load_recipe
from leaderless.environments.protocol import Turn
from leaderless.environments.registry import find_environment
from leaderless.environments.search.retriever import Bm25Retriever, Page
from leaderless.models.loading.tiny import write_word_model

ROOT = Path(__file__).parents[3]


def facts_in(searches: Sequence[Search]) -> set[tuple[str, str, str]]:
    return {(search.word, search.name, search.found) for search in searches}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "NUM_DEMONSTRATIONS", 200)
        prepare.prepare(folder / "runs/search-data", seed=3)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"runs/search-data/{name}.jsonl").read_text().splitlines()]


def test_the_first_page_that_each_search_finds_leads_on() -> None:
    world = World(3)
    retriever = Bm25Retriever([Page(page["contents"]) for page in world.pages])
    for search in {search for question in world.questions for search in question.searches}:
        (hit,) = retriever.search(f"{search.word} {search.name}", 1)
        assert search.found in hit.page.contents.partition("\n")[2]
    assert {len(question.searches) for question in world.questions} == {1, 2}


def test_held_out_questions_are_about_nothing_that_others_are_about() -> None:
    questions = World(3).questions
    held_out = facts_in([search for one in questions if one.is_held_out for search in one.searches])
    others = facts_in([search for one in questions if not one.is_held_out for search in one.searches])
    assert held_out
    assert others
    assert not held_out & others
    assert not {name for _, name, _ in held_out} & {name for _, name, _ in others}


def test_names_depend_on_the_seed_and_the_world_does_not() -> None:
    one, other = World(3), World(4)
    assert one.pages != other.pages
    blank = [[re.sub(NAME, "?", page["contents"]) for page in world.pages] for world in (one, other)]
    assert blank[0] == blank[1]


def test_demonstrations_are_about_other_names(folder: Path) -> None:
    known = {page["contents"] for page in rows(folder, "pages")}
    pattern = r"Title: (.*?)\) (.*?)</information>"
    found = {pair for row in rows(folder, "demonstrations") for pair in re.findall(pattern, row["prompt"])}
    assert len(found) > 50
    assert not known & {"\n".join(pair) for pair in found}, "no page of the world is shown"


def test_a_teacher_who_is_careful_answers_all_questions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GUESSES", "STOPS_EARLY", "LOOKS_ELSEWHERE"):
        monkeypatch.setattr(prepare, name, 0.0)
    monkeypatch.chdir(folder)
    world = World(3)
    retriever = Bm25Retriever([Page(page["contents"]) for page in world.pages])
    config = load_recipe(ROOT / "recipes/agents/search/grpo.yaml", []).recipe.environment
    assert config is not None
    make = partial(find_environment(config), **config.options)
    for question in Random(0).sample(world.questions, 20):
        environment = make()
        context = environment.reset({"question": question.text}, Random(0))
        for turn in prepare.teach(question, world, retriever, Random(0)):
            assert turn["prompt"] == context, "what the teacher was told is what the environment says"
            reply = environment.act(turn["response"])
            assert isinstance(reply, Turn)
            assert isinstance(context, str)
            context += f"{turn['response']}{reply.observation}"
        assert reply.info == {"answer": question.answer}


def test_a_tokenizer_of_words_gives_every_text_back(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "runs/search-data/model")
    texts = [row["prompt"] + row["response"] for row in rows(folder, "demonstrations")]
    texts += [row["question"] for name in ("train", "test") for row in rows(folder, name)]
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.unk_token_id not in tokens
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(" </search>")) == [" </search>"], "a single token"


def test_a_word_is_no_part_of_another_and_pieces_are(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_word_model(tmp_path, ["Let", " Let"], ["Le", "ti", " "], hidden_size=8, num_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("Let Leti")) == ["Let", " ", "Le", "ti"]
    assert tokenizer.encode("?") == [tokenizer.unk_token_id]
