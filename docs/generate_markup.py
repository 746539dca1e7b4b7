"""Functions that the generators of pages share."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel


def sections_of(annotation: object) -> list[type[BaseModel]]:
    """The sections in a field's annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in {Union, UnionType, Annotated, Mapping, tuple}:
        return [section for argument in get_args(annotation) for section in sections_of(argument)]
    return []


def cell(text: str, *, keep_lines: bool = False) -> str:
    """A text on one line, safe inside a table."""
    text = " ".join(text.split())
    return text if keep_lines else text.replace("|", "\\|")


def table_of(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown; the cells must be safe."""
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


NO_RESULTS = "There are no results yet: the script has not been run."


def between(page: str, name: str, content: str | None) -> str:
    """A page with a content between the two marks of a name; None says that nothing has been measured.

    Raises:
        ValueError: The page does not have each of the marks once.
    """
    first, last = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if page.count(first) != 1 or page.count(last) != 1:
        raise ValueError(f"a page must have '{first}' and '{last}' once each")
    before, _, rest = page.partition(first)
    return f"{before}{first}\n\n{NO_RESULTS if content is None else content}\n\n{last}{rest.partition(last)[2]}"
