"""The native engine on a device that computes ahead of the host, with keys and values in pages of a fixed pool.

It is for a CUDA device without vLLM, which `rollout.engine: auto` prefers: it computes in the trainer's process, with
any torch. Layers that ranks divide, quantized weights and kernels for large models are left to vLLM.

    host      |start 1|start 2|....read 1|admit|start 3|....read 2|admit|start 4|....
    device            |     pass 1      |         pass 2         |         pass 3 ...

The host starts a pass before it reads the tokens of the last one, so that the device never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from leaderless.base.devices import release_memory
from leaderless.config.rollout import SamplingConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.in_flight import mark
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.causal_lm import CausalLM
from leaderless.models.routers import Routers
from leaderless.models.uploads import placed
from leaderless.planner.memory.limits import PAGE_TOKENS
from leaderless.rollout.engine import Delta, Request, SamplingParams
from leaderless.rollout.native.cuda_graph import BucketGraphs
from leaderless.rollout.native.decode_state import Running
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.kv_cache import Segment, Store
from leaderless.rollout.native.lean_forward import LeanForward
from leaderless.rollout.native.paged_attention import PagedAttend, PagedAttention
from leaderless.rollout.native.paged_plan import Arrangement, Ints, PagedPlan
from leaderless.rollout.native.paged_staging import Staging, pinned
from leaderless.rollout.native.pages import OutOfPagesError, PagePool
from leaderless.rollout.native.prompts import CachedPrompt, Draws, Response
from leaderless.rollout.native.sampling import (
    Draw,
    num_mask_numbers,
    read_support,
    uniform_noise,
    write_drawn,
    write_recorded,
)
from leaderless.rollout.shaping import refuse_shaping


class PagedOptions(NamedTuple):
    """How an engine uses the memory of its device.

    Attributes:
        attend: Attention over pages.
        pool_tokens: Tokens of the pool for keys and values.
        longest: Tokens of the longest sequence, its prompt included; a longer one makes the engine prepare again.
        keeps_memory: Whether the pool, the memory of weights and recorded passes stay while the engine sleeps.
        page_tokens: Tokens of a page.
        draw: Drawing of tokens.
    """

    attend: PagedAttend
    pool_tokens: int
    longest: int = 4096
    keeps_memory: bool = False
    page_tokens: int = PAGE_TOKENS
    draw: Draw = write_drawn


@dataclass
class _Flight:
    """Tokens that the device draws for responses, and that the host has not read yet.

    `results` are [2 or more, n] int64 in host memory; see `Staging.drawn`. They are there once `event` has happened.
    `departures` counts departures from each seat when the pass was started: after another one, its token is dropped.
    """

    seats: Ints
    departures: Ints
    results: Tensor
    event: torch.Event | None

    def read(self) -> npt.NDArray[np.int64]:
        """Wait for the results, and return them."""
        if self.event is not None:
            self.event.synchronize()
        return self.results.numpy()


class PagedEngine(NativeEngine):
    """Native engine with keys and values in pages, which starts a pass before it has read what the last one has drawn.

    The last token of each response stays on the device, where the next pass finds it, and the host reads it while the
    next pass is computed. A response that has ended by then has one token too many, which is dropped. Noise does not
    depend on what was drawn, so that everything that the host knows of a pass is copied before it, in one piece.

    When pages run out, the youngest response gives up its own, and is read again later, with its tokens. Noise depends
    on the sample and the place of a token alone, so that this changes no token beyond what rounding does.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        end_tokens: frozenset[int],
        max_sequences: int,
        device: torch.device,
        options: PagedOptions,
        routers: Routers | None = None,
        *,
        records_support: bool = False,
    ) -> None:
        """Decode at most `max_sequences` responses at a time; see `NativeEngine`."""
        self._options = options
        self._pages = PagePool(max(1, options.pool_tokens // options.page_tokens), options.page_tokens)
        self._passes = BucketGraphs(is_enabled=device.type == "cuda")
        self._num_choices = routers.num_layers * routers.num_chosen if routers else 0
        text = model.model.config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        # Behind tokens and log-probabilities come masks of what could be drawn, then eight choices in each number.
        self._choices_at = 2 + num_mask_numbers(self._vocabulary) * records_support
        num_recorded = self._choices_at - 2 - (-self._num_choices // 8)
        self._staging = Staging(max_sequences, options.page_tokens, options.longest, device, num_recorded)
        self._last = torch.zeros(0, dtype=torch.int64)  # the last tokens of responses, by seat
        self._owned = set[str]()  # weights in memory of this engine
        self._addresses = tuple[int, ...]()  # of weights that recorded passes read
        self._num_allocations = 0  # of the memory through which numbers reach the device
        super().__init__(model, tokenizer, end_tokens, max_sequences, device, routers, records_support=records_support)

    def _reset(self) -> None:
        self._pages.clear()
        super()._reset()
        self._flights: list[_Flight] = []
        self._running = Running(self.max_sequences, self.end_tokens, self.tokenizer)
        self._order: Ints | None = None  # the seats of active responses, until one comes or goes
        self._arranged: tuple[Ints, Arrangement, Draws] | None = None

    def _make_stores(self) -> tuple[Store, Store]:
        return self._pages, self._pages

    def _set_weight(self, name: str, tensor: Tensor) -> None:
        """Copy a weight into memory that stays, if there is room for it, so that recorded passes find it."""
        if not self._options.keeps_memory:
            super()._set_weight(name, tensor)
            return
        parameter = self._parameters[name]
        if name not in self._owned or parameter.dtype != tensor.dtype:
            joined = self._pass.joined if isinstance(self._pass, LeanForward) else None
            room = None if joined is None else joined.room(parameter, tensor.dtype, self.device)
            new = torch.empty(self._weights[name], dtype=tensor.dtype, device=self.device) if room is None else room
            parameter.data = new
            self._owned.add(name)
        parameter.data.copy_(tensor.view(self._weights[name]))

    @override
    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:
        # Tokens in flight were drawn with the old weights, and are reported with their version.
        self._collect()
        self._report(self._running.held(self._in_order()))  # while their version is known
        super().load_weights(weights, keep_cache=keep_cache)
        # Recorded passes read weights at fixed addresses: they are of no use where weights lie elsewhere now.
        addresses = tuple(parameter.data_ptr() for parameter in self.model.parameters())
        if addresses != self._addresses:
            self._passes.clear()
            self._addresses = addresses

    @override
    def wake(self, reload: Callable[[], None]) -> None:
        """Allocate the pool of pages.

        Before the pool is allocated, what torch keeps cached for a trainer is given back: its blocks have other sizes,
        and some belong to other streams.
        """
        super().wake(reload)
        if not self._pages.is_allocated:
            release_memory(self.device)

    @override
    def abort(self, request: int) -> None:
        seats = [sequence.seat for sequence in self._active.values() if sequence.request == request]
        self._report(self._running.held(np.array(seats, dtype=np.int64)))
        super().abort(request)

    @override
    def sleep(self, *, keep_weights: bool) -> None:
        if self._options.keeps_memory and self._owned >= self._weights.keys():
            self._reset()
            self.policy_version = self.policy_version if keep_weights else None
            return
        self._release_memory()
        super().sleep(keep_weights=keep_weights)

    @override
    def close(self) -> None:
        self._release_memory()
        super().sleep(keep_weights=False)

    def _release_memory(self) -> None:
        self._passes.clear()
        self._pages.release()
        self._staging.release()
        self._last = torch.zeros(0, dtype=torch.int64)
        self._owned.clear()
        if isinstance(self._pass, LeanForward):
            self._pass.joined.release()
        self._addresses = ()

    @override
    def submit(self, request: Request, params: SamplingParams) -> int:
        """See `RolloutEngine`; the device draws ahead of the host, which knows what a response has too late."""
        refuse_shaping(params.shaping, "the native engine on an accelerator")
        return super().submit(request, params)

    @override
    @torch.no_grad()
    def step(self) -> list[Delta]:
        try:
            if self._is_stale:
                self._read_again()
            while True:
                # First the next pass, then the tokens of the last: the device has work while the host reads.
                self._collect(but=self._launch())
                # Behind the reading, since responses that have ended free seats and pages.
                self._admit()
                # Without something to report the caller would do nothing but call again.
                if self._deltas or not self._flights:
                    break
        except BaseException:
            self._passes.clear()
            self._pages.release()
            self._reset()  # a pass that was interrupted cannot be continued
            raise
        deltas, self._deltas = self._deltas, []
        return deltas

    def _collect(self, but: _Flight | None = None) -> None:
        """Read the tokens that have been drawn, except by the pass that has just been started."""
        while self._flights and self._flights[0] is not but:
            flight = self._flights.pop(0)
            results = flight.read()
            # The response of a seat may have ended, been preempted or aborted since, and another one may be there.
            is_there = self._running.departures[flight.seats] == flight.departures
            seats, (tokens, bits, *recorded) = flight.seats[is_there], results[:, is_there]
            masks, choices = recorded[: self._choices_at - 2], recorded[self._choices_at - 2 :]
            experts = [row.tobytes()[: self._num_choices] for row in np.stack(choices, 1)] if choices else ()
            support = read_support(np.stack(masks, 1)) if masks else ()
            # Log-probabilities come as the bits of their float64: one copy brings everything.
            self._report(self._running.add(seats, tokens, bits.view(np.float64), experts, support))

    def _report(self, seats: Ints) -> None:
        """Report what was drawn for some responses, and release those that have ended."""
        deltas = self._running.report(seats, self.policy_version)
        self._deltas += deltas
        for seat, delta in zip(seats.tolist(), deltas, strict=True):
            if delta.finish_reason is not None:
                self._release(self._response(seat), has_ended=True)

    def _read_again(self) -> None:
        for segment, length in zip(self._active, self._running.lengths(self._in_order()).tolist(), strict=True):
            segment.length = length
        super()._read_again()

    # --- decoding ----------------------------------------------------------------------------------------------------

    def _launch(self) -> _Flight | None:
        """Start a pass over all responses that may go on; it is the last of the flights."""
        seats = self._with_pages()
        if not len(seats):
            return None
        # The rows are arranged once for all passes until a response comes or goes.
        if self._arranged is None or not np.array_equal(self._arranged[0], seats):
            self._arranged = seats, *self._running.arranged(seats)
        _, arrangement, draws = self._arranged
        plan = self._send(seats, arrangement, draws)
        attention = PagedAttention(self._pages, plan, self._options.attend)
        # Recorded passes read the numbers of a pass at fixed addresses.
        if self._num_allocations != self._staging.num_allocations:
            self._num_allocations = self._staging.num_allocations
            self._passes.clear()
        results = self._staging.drawn(len(plan.places))
        ways = list(dict.fromkeys(way for _, way in draws))
        # A recorded pass draws in one way. Where rows are drawn in several ways, it ends with the logits.
        key = len(plan.places), ways[0] if len(ways) == 1 else None
        self._passes.run(key, lambda: self._compute(attention, results, key[1]))
        if key[1] is None:
            logits = self._staging.logits(len(plan.places), self._vocabulary)
            for way in ways:
                rows = [row for (_, own), some in draws.items() if own == way for row in some]
                self._draw(logits, plan, results, way, placed(torch.tensor(rows), self.device))
        # Counted before it is read: noise and places of the next pass follow from the number of tokens alone.
        self._running.started[seats] += 1
        return self._fly(seats, results)

    def _in_order(self) -> Ints:
        """The seats of all active responses."""
        if self._order is None:
            self._order = np.array([sequence.seat for sequence in self._active.values()], dtype=np.int64)
        return self._order

    def _response(self, seat: int) -> Response:
        return cast("Response", self._running.responses[seat])

    def _with_pages(self) -> Ints:
        """The seats of responses that may go on, each with a page for its next token."""
        running, has_collected = self._running, False
        while True:
            order = self._in_order()
            seats: Ints = order[running.started[order] < running.limits[order]]
            lengths = running.lengths(seats)
            is_full = lengths % self._pages.page_size == 0
            try:
                for seat, length in zip(seats[is_full].tolist(), lengths[is_full].tolist(), strict=True):
                    self._pages.extend(_segment(self._response(seat)), length + 1)
            except OutOfPagesError:
                # What costs least first: a conversation that may never go on, then a wait for the device, then a
                # response that has to be read again.
                if len(self._kept):
                    self._kept.shrink(len(self._kept) - 1)
                elif not has_collected:
                    self._collect()  # responses may have ended
                    has_collected = True
                elif len(self._active) > 1 or self._read:
                    self._preempt()
                else:
                    raise self._too_small(int(running.begins(seats)[0]) + 1) from None
            else:
                return seats

    def _preempt(self) -> None:
        """Free the pages of the youngest response, which is read again, with its tokens, before anything else is."""
        sequence = next(reversed(self._active.values()))
        self._report(self._running.held(np.array([sequence.seat])))
        prompt, own = sequence.prompt, sequence.completion.tokens
        # Nothing is in flight: all that was drawn is read before a response loses its pages.
        new = own[len(own) + len(prompt.tokens) - sequence.num_tokens :]
        again = CachedPrompt((*prompt.tokens, *new), prompt.images, prompt.num_both)
        self._release(sequence)
        sequence.segment, sequence.prompt = None, again
        again.waiting.append(sequence)
        again.num_left = 1
        # At the head of the line, so that it is not overtaken by responses that have not begun.
        self._continuing.appendleft(again)

    def _too_small(self, tokens: int) -> RuntimeError:
        return RuntimeError(
            f"a sequence of {tokens} tokens does not fit into the engine's memory for keys and values, which is for "
            f"{self._pages.num_pages * self._pages.page_size} tokens: lower data.max_prompt_tokens or "
            "rollout.max_response_tokens, or use a device with more memory"
        )

    def _send(self, seats: Ints, arrangement: Arrangement, draws: Draws) -> PagedPlan:
        """Copy everything that the host knows of a pass."""
        count, running = len(seats), self._running
        begins, lengths = running.begins(seats), running.lengths(seats)
        host = self._staging.host(arrangement, self._pages, lengths + 1)
        ids, drawn = (torch.from_numpy(numbers[seats]) for numbers in (running.sample_ids, running.started))
        noise = host.noise
        for (seed, _), rows in draws.items():
            some = slice(0, count) if len(rows) == count else rows
            noise[some] = uniform_noise(seed, ids[some], drawn[some])
        host.positions.numpy()[:count] = begins - running.saved[seats]
        host.seats.numpy()[:count] = seats
        host.places.numpy()[:count] = self._pages.slots_at(arrangement.own_slots, lengths)
        # Rows that fill up the shape draw something in a seat that nobody has, and write into a page that nobody has.
        for rest, value in ((noise, 0.0), (host.positions, 0), (host.seats, self.max_sequences), (host.places, 0)):
            rest[count:] = value
        return self._staging.send(arrangement, lengths + 1, self._pages)

    def _compute(self, attention: PagedAttention, results: Tensor, way: SamplingConfig | None) -> None:
        """Compute a pass: the logits of its rows, and if all are drawn in one way, the tokens."""
        plan = attention.plan
        tokens = self._seated().index_select(0, plan.seats)
        everywhere = torch.arange(len(tokens), device=self.device)
        if self._routers is not None:
            self._routers.begin()
        logits = self._pass(tokens, plan.positions, attention, everywhere)
        if self._routers is not None:
            choices = self._routers.now.choices()
            padded = torch.nn.functional.pad(choices, (0, -choices.shape[1] % 8))
            results[self._choices_at :].copy_(padded.view(torch.int64).t())
        if way is None:
            self._staging.logits(*logits.shape).copy_(logits)
        else:
            self._draw(logits, plan, results, way)

    def _draw(
        self, logits: Tensor, plan: PagedPlan, results: Tensor, way: SamplingConfig, rows: Tensor | None = None
    ) -> None:
        """Draw tokens for all or some rows; each becomes the last token of its seat."""
        noise, seats, drawn = plan.noise, plan.seats, results[: self._choices_at]
        if rows is not None:
            logits, noise, seats = (tensor.index_select(0, rows) for tensor in (logits, noise, seats))
            drawn = results.new_empty(len(drawn), len(rows))
        if self._records_support:
            write_recorded(logits, noise, way, drawn)
        else:
            self._options.draw(logits, noise, way, drawn)
        self._seated().index_copy_(0, seats, drawn[0])
        if rows is not None:
            results[: self._choices_at].index_copy_(1, rows, drawn)

    def _seated(self) -> Tensor:
        if not len(self._last):
            self._last = torch.zeros(self.max_sequences + 1, dtype=torch.int64, device=self.device)
        return self._last

    def _fly(self, seats: Ints, results: Tensor) -> _Flight:
        """Have the results of responses, [2 or more, n or more], copied to the host behind all that was started."""
        # To pinned memory, or the copy would block the host; the event lets the host wait for this copy alone.
        there = pinned(tuple(results.shape), torch.int64, self.device)
        there.copy_(results, non_blocking=True)
        event = None if self.device.type == "cpu" else mark(self.device)
        flight = _Flight(seats, self._running.departures[seats], there[:, : len(seats)], event)
        self._flights.append(flight)
        return flight

    # --- admission ---------------------------------------------------------------------------------------------------

    @override
    def _has_room(self, prompts: Sequence[CachedPrompt]) -> bool:
        """Whether pages for prompts remain once each active response has got one, so that no prompt is read in vain."""
        pages, is_idle = self._pages, not self._active
        needed = sum(pages.pages_for(len(prompt.tokens) + 1) + 1 for prompt in prompts)
        left = pages.num_free + pages.num_kept - len(self._active)
        if left < needed or (left == needed and not is_idle):
            if is_idle and len(prompts) == 1 and not (self._read or self._flights):
                raise self._too_small(len(prompts[0].tokens) + 1)
            return False
        # Kept conversations only use pages that no response needs.
        while pages.num_free < needed and len(self._kept):
            self._kept.shrink(len(self._kept) - 1)
        return True

    def _extend(
        self, sequences: Sequence[Response], logits: Tensor, draws: Draws, news: Sequence[Sequence[bytes]]
    ) -> None:
        """Draw the first tokens of new responses; the host reads them later."""
        count, running = len(sequences), self._running
        seats = np.array([running.take(sequence, experts) for sequence, experts in zip(sequences, news, strict=True)])
        self._order = self._arranged = None
        numbers = pinned((2, count), torch.int64, self.device)
        numbers[0], noise = torch.from_numpy(seats), numbers[1].view(torch.float64)
        ids, drawn = torch.from_numpy(running.sample_ids[seats]), torch.from_numpy(running.started[seats] - 1)
        for (seed, _), rows in draws.items():
            noise[rows] = uniform_noise(seed, ids[rows], drawn[rows])
        there = numbers.to(self.device, non_blocking=True)
        results = there.new_empty(self._choices_at, count)
        for (_, way), rows in draws.items():
            places = slice(None) if len(rows) == count else placed(torch.tensor(rows), self.device)
            own = results.new_empty(self._choices_at, len(rows))
            write = write_recorded if self._records_support else write_drawn
            write(logits[places], there[1].view(torch.float64)[places], way, own)
            self._seated().index_copy_(0, there[0][places], own[0])
            results[:, places] = own
        self._fly(seats, results)

    @override
    def _keep(self, conversation: int, sequence: Response, own: Segment) -> None:
        """Keep a conversation; what would need more pages than there are is read again by the next turn."""
        try:
            super()._keep(conversation, sequence, own)
        except OutOfPagesError:
            own.home.remove(own)

    def _release(self, sequence: Response, *, has_ended: bool = False) -> None:
        if sequence.segment is not None:
            # Passes do not count the lengths of segments; what keeps or frees pages needs them now.
            sequence.segment.length = int(self._running.lengths(np.array([sequence.seat]))[0])
            self._running.leave(sequence.seat)
            self._order = self._arranged = None
        super()._release(sequence, has_ended=has_ended)


def _segment(sequence: Response) -> Segment:
    return cast("Segment", sequence.segment)
