"""The check of docstrings finds fragments."""

from __future__ import annotations

import pytest
from tests.docstrings import problems_of

SOURCE = '''
def wait(rank: int, what: str, timeout_s: float) -> None:
    """Wait for a rank.

    Args:
        rank: {rank}
        what: Name of the operation,
            What an error names.
        timeout_s: Longest wait, in seconds.

    Raises:
        ValueError: Of a rank that is none.
    """
'''


def test_a_line_that_is_no_noun_phrase_is_found_with_its_place() -> None:
    assert not list(problems_of(SOURCE.format(rank="Rank that is late.")))
    (problem,) = problems_of(SOURCE.format(rank="That is late."))
    assert problem == (6, '"rank: That is late.": begin with what it is, not with "That"')


@pytest.mark.parametrize("first", ["What", "How", "Why", "The same"])
def test_a_question_is_no_noun_phrase(first: str) -> None:
    (problem,) = problems_of(SOURCE.format(rank=f"{first} it waits for."))
    assert problem[1].endswith(f'not with "{first}"')


def test_the_help_of_an_option_is_no_fragment_either() -> None:
    assert not list(problems_of('parser.add_argument("--steps", help="steps of each run")'))
    (problem,) = problems_of('parser.add_argument("--steps", help="of each run")')
    assert problem == (1, '"help: Of each run": begin with what it is, not with "Of"')
