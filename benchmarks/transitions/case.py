"""The rows of a transition and its layouts; every process makes the same rows from a few numbers."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from leaderless.data.batch import Batch, Column, Jagged, make_sample_ids
from leaderless.planner import Layout, Reshard

Kind = Literal["balance", "pools"]
Way = Literal["ours", "ray", "gloo", "packed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WAYS: tuple[Way, ...] = get_args(Way)
RESPONSES = 8
"""Responses to each prompt."""
MAX_PROMPT_TOKENS = 256
VOCABULARY = 151_936
COLUMNS = (
    "prompt_tokens",
    "tokens",
    "response_mask",
    "response_lengths",
    "rollout_log_probs",
    "old_log_probs",
    "rewards",
)


class Message(BaseModel):
    """A message between processes, or a record."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Case(Message):
    """One batch and the two layouts it goes between, with one rank per host.

    Attributes:
        kind: `balance`: all hosts before and after, the last of which holds twice as many rows as the first;
            `pools`: from the first half of the hosts to the second.
        hosts: Number of hosts, even.
        prompts: Number of prompts in the batch.
        max_tokens: Length of the longest response.
        same_shares: Whether ours gives each host the same rows as a controller does, instead of moving few.
        seed: Seed of lengths and contents.
    """

    kind: Kind
    hosts: int
    prompts: int
    max_tokens: int
    same_shares: bool = False
    seed: int = 0

    @model_validator(mode="after")
    def _has_equal_shares(self) -> Case:
        if self.hosts < 2 or self.hosts % 2:
            raise ValueError(f"hosts={self.hosts}: must be even and at least 2, for two pools of one size")
        if self.prompts * RESPONSES % self.hosts:
            raise ValueError(f"prompts={self.prompts}: a controller cannot give {self.hosts} hosts as many rows each")
        return self

    @property
    def action(self) -> Reshard:
        """The transition as the planner would put it."""
        everyone, half = tuple(range(self.hosts)), self.hosts // 2
        sources, targets = (everyone, everyone) if self.kind == "balance" else (everyone[:half], everyone[half:])
        source, target = Layout(sources, len(sources)), Layout(targets, len(targets))
        return Reshard("rollout", "samples", COLUMNS, source, target, keep_groups=False)

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """[prompts] int64, lognormal around half of the cap."""
        return self._lengths(self.prompts, MAX_PROMPT_TOKENS / 2, 0.4, MAX_PROMPT_TOKENS, self.seed)

    @property
    def prompt_lengths_of_rows(self) -> Tensor:
        """[prompts * RESPONSES] int64 prompt of each row."""
        return self.prompt_lengths.repeat_interleave(RESPONSES)

    @cached_property
    def response_lengths(self) -> Tensor:
        """[prompts * RESPONSES] int64, in the order of the prompts."""
        return self._lengths(self.prompts * RESPONSES, self.max_tokens / 4, 0.8, self.max_tokens, self.seed + 1)

    @staticmethod
    def _lengths(count: int, median: float, sigma: float, cap: int, seed: int) -> Tensor:
        """[count] int64 from 1 to the cap, lognormal below it."""
        normal = torch.randn(count, generator=torch.Generator().manual_seed(seed))
        return (median * torch.exp(sigma * normal)).long().clamp(1, cap)

    @cached_property
    def ids(self) -> Tensor:
        """[prompts * RESPONSES] int64, ascending."""
        groups = torch.arange(self.prompts).repeat_interleave(RESPONSES)
        return make_sample_ids(groups, torch.arange(RESPONSES).repeat(self.prompts))

    def prompts_held(self, host: int) -> range:
        """The prompts whose rows a host has before the transition."""
        sources = self.action.source_layout.ranks
        if host not in sources:
            return range(0)
        last = max(len(sources) - 1, 1)
        weights = [1 + place / last if self.kind == "balance" else 1.0 for place in range(len(sources))]
        bounds = [round(self.prompts * sum(weights[:place]) / sum(weights)) for place in range(len(sources) + 1)]
        return range(bounds[host], bounds[host + 1])

    def make_rows(self, host: int) -> Batch | None:
        """The rows that a host has before the transition; None if it is not part of that layout."""
        held = self.prompts_held(host)
        if host not in self.action.source_layout:
            return None
        random = torch.Generator().manual_seed(self.seed * 1000 + host)
        some = slice(held.start, held.stop)
        samples = slice(held.start * RESPONSES, held.stop * RESPONSES)
        prompt_lengths, lengths = self.prompt_lengths[some], self.response_lengths[samples]
        total = int(lengths.sum())

        def tokens(count: int) -> Tensor:
            return torch.randint(VOCABULARY, (count,), generator=random)

        def log_probs() -> Jagged:
            return Jagged(-torch.rand(total, generator=random), lengths, "response_tokens")

        prompt_tokens = Jagged(tokens(int(prompt_lengths.sum())), prompt_lengths, "prompt_tokens")
        columns: dict[str, Column] = {
            "tokens": Jagged(tokens(total), lengths, "tokens"),
            "response_mask": Jagged(torch.ones(total, dtype=torch.bool), lengths, "tokens"),
            "response_lengths": lengths,
            "rollout_log_probs": log_probs(),
            "old_log_probs": log_probs(),
            "rewards": torch.rand(len(lengths), generator=random),
        }
        prompts = Batch(torch.arange(held.start, held.stop), {"prompt_tokens": prompt_tokens})
        return Batch(self.ids[samples], columns, prompts, torch.arange(len(held)).repeat_interleave(RESPONSES))


class Order(Message):
    """An order to a process.

    Attributes:
        way: Data path between the layouts.
        case: Rows and layouts.
    """

    way: Way
    case: Case
