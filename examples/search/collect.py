"""Collects facts about countries and chemical elements from two packages, for the example's file `facts.jsonl`.

The file comes with the example; this is how it was made: `pip install countryinfo mendeleev`, then this script.
"""

from __future__ import annotations

import json
from pathlib import Path

import countryinfo
from mendeleev import fetch

FACTS = Path(__file__).parent / "facts.jsonl"
COUNTRIES = {"England": "United Kingdom", "Scotland": "United Kingdom", "Great Britain": "United Kingdom"}
"""Countries as the other package calls them."""


def collect() -> list[dict[str, str]]:
    """Countries with capital, currency and name of their people, and elements with the country of their discovery."""
    facts: list[dict[str, str]] = []
    capitals: set[str] = set()
    for country in countryinfo.all_countries():
        info = country if isinstance(country, dict) else country.info()
        capital, currencies, people = info.get("capital"), info.get("currencies"), info.get("demonym")
        is_clear = isinstance(capital, str) and capital not in {"", info["name"], *capitals}
        if is_clear and currencies and people not in {None, "", info["name"]}:
            capitals.add(capital)
            facts.append({"country": info["name"], "capital": capital, "currency": currencies[0], "people": people})
    known = {fact["country"] for fact in facts}
    elements = fetch.fetch_table("elements")
    for name, place in zip(elements["name"], elements["discovery_location"], strict=True):
        found_in = COUNTRIES.get(place, place)
        if found_in in known:
            facts.append({"element": name, "discovered_in": found_in})
    return facts


if __name__ == "__main__":
    FACTS.write_text("".join(json.dumps(fact, ensure_ascii=False) + "\n" for fact in collect()), encoding="utf-8")
