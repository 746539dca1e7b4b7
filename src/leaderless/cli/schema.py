"""`leaderless schema`."""

from __future__ import annotations

from leaderless.config import Recipe
from leaderless.observability.console import print_json


def schema() -> None:
    """Print the JSON Schema of recipes, by which editors complete and check them."""
    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()})
