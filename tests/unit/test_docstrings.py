"""The check of docstrings finds what it is for."""

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
