"""Comparisons of the responses of a group: which are made, and what a response is worth by them. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaderless.rewards.judges.verdicts import Choice


@dataclass(frozen=True)
class Pair:
    """Two different responses of a group, by their places among all."""

    first: int
    second: int


def pairs_of(responses: Sequence[str], group: Sequence[int], opponents: int) -> list[Pair]:
    """The comparisons of a group.

    Different responses are put into the order of a hash, as a ring, and each is compared with those that follow it.
    So the comparisons depend on the responses alone, neither on their order nor on ranks.

    Args:
        responses: All responses.
        group: Places of the responses of the group.
        opponents: Number of responses that each is compared with, of those that follow it.
    """
    place_of = {responses[place]: place for place in reversed(group)}
    ring = [place_of[text] for text in sorted(place_of, key=_hash)]
    found: dict[frozenset[int], Pair] = {}
    for distance in range(1, min(opponents, len(ring) - 1) + 1):
        for number, place in enumerate(ring):
            pair = Pair(place, ring[(number + distance) % len(ring)])
            found.setdefault(frozenset({pair.first, pair.second}), pair)
    return list(found.values())


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def outcome_of(straight: Choice, swapped: Choice) -> tuple[float, bool]:
    """Value of the first response of a pair, and whether the judge has said the same both times.

    Args:
        straight: Verdict with the first response in the first place.
        swapped: Verdict with the first response in the second place.
    """
    turned: Mapping[Choice, Choice] = {"first": "second", "second": "first", "tie": "tie"}
    agrees = straight == turned[swapped]
    worth = {"first": 1.0, "second": 0.0, "tie": 0.5}
    return (worth[straight] if agrees else 0.5), agrees


def win_rates(pairs: Sequence[tuple[Pair, float]]) -> dict[int, float]:
    """The mean of what each response is worth in its comparisons, by its place; none for one without comparisons."""
    won: dict[int, list[float]] = {}
    for pair, worth in pairs:
        won.setdefault(pair.first, []).append(worth)
        won.setdefault(pair.second, []).append(1.0 - worth)
    return {place: sum(values) / len(values) for place, values in won.items()}
