"""The check of docstrings finds fragments."""

from __future__ import annotations

from tests.docstrings import problems_of

SOURCE = '''
def wait(rank: int, what: str, timeout_s: float) -> None:
    """Wait for a rank.

    Args:
        rank: {rank}
        what: What is waited for,
            Of which an error tells.
        timeout_s: Longest wait, in seconds.

    Raises:
        ValueError: Of a rank that is none.
    """
'''


def test_a_line_that_is_no_noun_phrase_is_found_with_its_place() -> None:
    assert not list(problems_of(SOURCE.format(rank="Rank that is late.")))
    (problem,) = problems_of(SOURCE.format(rank="That is late."))
    assert problem == (6, '"rank: That is late.": begin with what it is, not with "That"')


def test_the_help_of_an_option_is_no_fragment_either() -> None:
    assert not list(problems_of('parser.add_argument("--steps", help="steps of each run")'))
    (problem,) = problems_of('parser.add_argument("--steps", help="of each run")')
    assert problem == (1, '"help: Of each run": begin with what it is, not with "Of"')
