"""A world of facts under invented names: its pages and its questions.

The facts are real, but every name is replaced by an invented one, by seed. So nobody can know the answers, and a policy
has to search. The names are two syllables long, and so are made of tokens that all of them share.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from random import Random

FACTS = Path(__file__).parent / "facts.jsonl"
SYLLABLES = [consonant + vowel for consonant, vowel in product("bdfklmnrstvz", "aeiou")]
NAME = r"\b[BDFKLMNRSTVZ][aeiou][bdfklmnrstvz][aeiou]\b"
"""What an invented name looks like, and no word of the texts."""
ABOUT_COUNTRIES = {"currency": "What is the currency of {}?", "people": "What are the people of {}?"}
"""Questions about what a country's pages say."""
DISCOVERED = "Where was {} discovered?"
OF_CAPITAL, OF_ELEMENT = "the country with the capital {}", "the country where {} was discovered"
"""A country by what another page says."""
HELD_OUT_SHARE = 0.3


@dataclass(frozen=True)
class Search:
    """A search that helps to answer a question.

    Attributes:
        word: Word to search for.
        name: Name of what it is about.
        found: Text of the page.
    """

    word: str
    name: str
    found: str


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    Attributes:
        text: The question.
        searches: Searches that lead to the answer, one after the other; one or two.
        is_held_out: Whether it is about things that no question of the other kind is about.
    """

    text: str
    searches: tuple[Search, ...]
    is_held_out: bool

    @property
    def answer(self) -> str:
        """What the last search finds."""
        return self.searches[-1].found


class World:
    """All facts, under the names of a seed."""

    def __init__(self, seed: int) -> None:
        facts = [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()]
        generator = Random(seed)
        pairs = [first.capitalize() + second for first, second in product(SYLLABLES, SYLLABLES)]
        self.names = generator.sample(pairs, len(pairs))
        things = dict.fromkeys(value for fact in facts for value in fact.values())
        by_thing = dict(zip(things, self.names, strict=False))
        renamed = [{key: by_thing[value] for key, value in fact.items()} for fact in facts]
        self.countries = {fact["country"]: fact for fact in renamed if "country" in fact}
        self.elements = {fact["element"]: fact["discovered_in"] for fact in renamed if "element" in fact}
        held_out = Random(0)  # the same things in every world
        self._held_out = {name for name in self.countries if held_out.random() < HELD_OUT_SHARE}

    @cached_property
    def pages(self) -> list[dict[str, str]]:
        """The pages of the world in Search-R1's format."""
        texts = [
            *((name, f"The currency of {name} is {fact['currency']}.") for name, fact in self.countries.items()),
            *((name, f"The people of {name} are {fact['people']}.") for name, fact in self.countries.items()),
            *((fact["capital"], f"The capital of {name}.") for name, fact in self.countries.items()),
            *((name, f"An element discovered in {country}.") for name, country in self.elements.items()),
        ]
        return [{"id": str(number), "contents": f"{name}\n{text}"} for number, (name, text) in enumerate(texts)]

    @cached_property
    def questions(self) -> list[Question]:
        """All questions, those of one search first."""
        one, two = [], []
        for name, fact in self.countries.items():
            is_held_out, capital = name in self._held_out, fact["capital"]
            for word, text in ABOUT_COUNTRIES.items():
                last = Search(word, name, fact[word])
                one.append(Question(text.format(name), (last,), is_held_out))
                searches = (Search("capital", capital, name), last)
                two.append(Question(text.format(OF_CAPITAL.format(capital)), searches, is_held_out))
        for name, country in self.elements.items():
            is_held_out = country in self._held_out
            first = Search("discovered", name, country)
            one.append(Question(DISCOVERED.format(name), (first,), is_held_out))
            for word, text in ABOUT_COUNTRIES.items():
                searches = (first, Search(word, country, self.countries[country][word]))
                two.append(Question(text.format(OF_ELEMENT.format(name)), searches, is_held_out))
        return one + two
