"""The ranks and parallel sizes of nodes."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from leaderless.base.section import Section

SHARE = r"(\d+)%-(\d+)%"
"""Pattern of a share of all ranks: from the first percentage up to, but without, the second."""


class LayoutConfig(Section):
    """The ranks of one node and how it divides them."""

    ranks: str = Field(default="all", coerce_numbers_to_str=True, json_schema_extra={"type": ["string", "integer"]})
    """`all`; ranks and inclusive ranges such as `0-3,8-11`; or a share of all ranks such as `0%-50%`."""
    dp: int | None = Field(default=None, ge=1)
    """Data-parallel size; by default the number of ranks divided by the other sizes."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size."""
    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel size."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel size."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel size: neighboring ranks that divide the experts of every layer, and send each other tokens for
    them. It divides the number of ranks, with `pp` the number of each stage; ranks with the same experts divide their
    weights. With 1, experts are gathered like other weights."""
    groups: Literal["auto", "whole"] = "auto"
    """`whole` keeps all responses to a prompt on one rank when rows are resharded, `auto` only if the node needs it."""

    @field_validator("ranks", mode="before")
    @classmethod
    def _ranks_are_readable(cls, value: object) -> object:
        if isinstance(value, list):
            raise ValueError('must be text: write "0-1" or "0,1"')
        if not re.fullmatch(rf"all|\d+(-\d+)?(,\d+(-\d+)?)*|{SHARE}", str(value)):
            raise ValueError(
                "must be 'all', ranks and inclusive ranges such as '0-3,8-11', or a share such as '0%-50%'"
            )
        return value

    def ranks_of(self, world_size: int) -> tuple[int, ...]:
        """The ranks in ascending order; a ValueError if they make no sense, or do not exist in a world of that size."""
        if self.ranks == "all":
            return tuple(range(world_size))
        if share := re.fullmatch(SHARE, self.ranks):
            return _ranks_of_share(int(share[1]), int(share[2]), world_size)
        ranks: list[int] = []
        for part in self.ranks.split(","):
            first, last = (int(number) for number in (part if "-" in part else f"{part}-{part}").split("-"))
            if last < first:
                raise ValueError(f"range '{part}' runs backwards")
            if last >= world_size:
                raise ValueError(
                    f"names rank {last}, but there are {world_size} (0-{world_size - 1}): "
                    f"start at least {last + 1} workers or name other ranks"
                )
            ranks.extend(range(first, last + 1))
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"'{self.ranks}' names a rank twice")
        return tuple(sorted(ranks))


def _ranks_of_share(first: int, last: int, world_size: int) -> tuple[int, ...]:
    if not first < last <= 100:
        raise ValueError(f"share '{first}%-{last}%' must begin before it ends, at 100% or before")
    for bound in (first, last):
        if bound * world_size % 100:
            raise ValueError(
                f"share '{first}%-{last}%': {bound}% of {world_size} ranks is no whole number: name ranks, or start a "
                "number of workers that it divides"
            )
    return tuple(range(first * world_size // 100, last * world_size // 100))
