"""State on the host of the responses that a device decodes ahead of it, in arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from leaderless.data.prompts.encode import Tokenizer
from leaderless.rollout.engine import TOKENS_AT_ONCE, Delta, FinishReason, has_stopped
from leaderless.rollout.native.kv_cache import Segment
from leaderless.rollout.native.paged_plan import Arrangement, Ints
from leaderless.rollout.native.prompts import Draws, Response, draws_of

GOES_ON, STOPPED, CUT_OFF = range(3)
REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")
"""Reasons by the numbers above."""


class Running:
    """Responses in progress. The seat of each is its place in all arrays, which are [seats] int64, until it leaves.

    What was drawn for a response stays in arrays until it is reported: at its end, or when there are as many tokens as
    may come at once.

    Attributes:
        responses: Response in each seat. Its tokens are those that were reported.
        started: Tokens of each response that were drawn or are about to be.
        limits: Tokens with which it is cut off.
        sample_ids: Number of its sample.
        saved: Positions that the images of its prompt save.
        departures: Number of responses that have left each seat; what was drawn for one of them is dropped.
    """

    def __init__(self, num_seats: int, end_tokens: Collection[int], tokenizer: Tokenizer) -> None:
        """Start with free seats; responses end with end tokens, and with their own stop texts."""
        self._end_tokens, self._tokenizer = np.array([*end_tokens], dtype=np.int64), tokenizer
        self._free = list(range(num_seats - 1, -1, -1))
        self.responses: list[Response | None] = [None] * num_seats
        numbers = np.zeros((15, num_seats), dtype=np.int64)
        self.started, self.limits, self.sample_ids, self.saved, self.departures = numbers[:5]
        self._num_read, self._num_held, self._at_once = numbers[5:8]
        self._before, self._shared = numbers[8:10]  # tokens before the response, and those that it shares
        self._own_slots, self._prompt_slots = numbers[10:12]
        self._reasons = numbers[12]
        self._seeds, self._ways = numbers[13:]  # by which responses are drawn, a way by the address of its distribution
        self._tokens = np.zeros((num_seats, TOKENS_AT_ONCE), dtype=np.int64)
        self._log_probs = np.zeros((num_seats, TOKENS_AT_ONCE))
        self._experts: dict[int, list[bytes]] = {}
        self._support: dict[int, list[bytes]] = {}

    @property
    def num_free(self) -> int:
        """Number of free seats."""
        return len(self._free)

    def take(self, sequence: Response, experts: Sequence[bytes]) -> int:
        """Give a seat to a response whose first token is about to be drawn; return the seat.

        Experts of tokens before that one are reported with it.
        """
        seat, prompt, params = self._free.pop(), sequence.prompt, sequence.params
        self.responses[seat], sequence.seat, known = sequence, seat, len(sequence.completion.tokens)
        self.started[seat], self._num_read[seat], self._num_held[seat] = known + 1, known, 0
        self.limits[seat], self.sample_ids[seat] = params.max_tokens, sequence.sample_id
        # What follows a stop text would be in vain.
        self._at_once[seat] = 1 if params.stop else min(params.tokens_at_once, TOKENS_AT_ONCE)
        self._before[seat], self.saved[seat] = sequence.num_tokens - known, prompt.saved
        self._own_slots[seat] = cast("Segment", sequence.segment).slot
        has_shared = prompt.is_shared and prompt.segment is not None
        self._shared[seat] = len(prompt.tokens) if has_shared else 0
        self._prompt_slots[seat] = cast("Segment", prompt.segment).slot if has_shared else -1
        self._seeds[seat], self._ways[seat] = params.seed, id(params.distribution)
        if experts:
            self._experts[seat] = [*experts]
        return seat

    def leave(self, seat: int) -> None:
        """Free a seat."""
        self.responses[seat] = None
        self.departures[seat] += 1
        self._experts.pop(seat, None)
        self._support.pop(seat, None)
        self._free.append(seat)

    def begins(self, seats: Ints) -> Ints:
        """Places of the tokens that the next pass reads, in sequences with their prompts."""
        begins: Ints = self._before[seats] + self.started[seats] - 1
        return begins

    def lengths(self, seats: Ints) -> Ints:
        """Tokens in the segments of responses before the next pass."""
        lengths: Ints = self.begins(seats) - self._shared[seats]
        return lengths

    def arranged(self, seats: Ints) -> tuple[Arrangement, Draws]:
        """Arrange the rows of passes over some responses, and find those that are drawn together."""
        arrangement = Arrangement(self._own_slots[seats], self._prompt_slots[seats], self._shared[seats])
        first = self._response(int(seats[0])).params
        if (self._ways[seats] == id(first.distribution)).all() and (self._seeds[seats] == first.seed).all():
            return arrangement, {(first.seed, first.distribution): [*range(len(seats))]}
        return arrangement, draws_of([self._response(seat) for seat in seats.tolist()])

    def _response(self, seat: int) -> Response:
        return cast("Response", self.responses[seat])

    def add(
        self,
        seats: Ints,
        tokens: Ints,
        log_probs: npt.NDArray[np.float64],
        experts: Sequence[bytes],
        support: Sequence[bytes],
    ) -> Ints:
        """Add a token for each of some responses, with the tokens that it could be, if known.

        With it come the experts that were chosen for the token before it, if known.

        Returns:
            Seats of the responses that are to be reported.
        """
        held = self._num_held[seats]
        self._tokens[seats, held], self._log_probs[seats, held] = tokens, log_probs
        self._num_held[seats] = held + 1
        self._num_read[seats] += 1
        for seat, choices in zip(seats.tolist(), experts, strict=False):
            self._experts.setdefault(seat, []).append(choices)
        for seat, words in zip(seats.tolist(), support, strict=False):
            self._support.setdefault(seat, []).append(words)
        reasons = CUT_OFF * (self._num_read[seats] >= self.limits[seats])
        reasons[(tokens[:, None] == self._end_tokens).any(1)] = STOPPED
        self._reasons[seats] = reasons
        due: Ints = seats[(held + 1 >= self._at_once[seats]) | (reasons != GOES_ON)]
        return due

    def held(self, seats: Ints) -> Ints:
        """Those seats whose responses have tokens that were not reported."""
        held: Ints = seats[self._num_held[seats] > 0]
        return held

    def report(self, seats: Ints, version: int | None) -> list[Delta]:
        """Report the tokens of some responses, which weights of some version have drawn; they become part of them."""
        deltas: list[Delta] = []
        counts = self._num_held[seats]
        most, self._num_held[seats] = int(counts.max(initial=0)), 0
        columns = (seats, counts, self._reasons[seats], self._tokens[seats, :most], self._log_probs[seats, :most])
        for seat, count, number, tokens, log_probs in zip(*(column.tolist() for column in columns), strict=True):
            sequence, experts, reason = self._response(seat), self._experts.pop(seat, ()), REASONS[number]
            if count < most:
                del tokens[count:], log_probs[count:]
            completion, stop = sequence.completion, sequence.params.stop
            completion.tokens += tokens
            completion.experts += experts
            support = self._support.pop(seat, ())
            completion.support += support
            sequence.num_tokens += count
            known, sequence.num_known = sequence.num_known, 0
            if stop and has_stopped(completion.tokens, stop, self._tokenizer):
                reason = "stop"
            recorded = experts, support
            deltas.append(
                Delta(sequence.request, sequence.sibling, tokens, log_probs, reason, version, known, *recorded)
            )
        return deltas
