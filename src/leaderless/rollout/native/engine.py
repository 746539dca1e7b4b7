"""The native engine: this package's own modules, with continuous batching and one prefill for each prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.images import PromptImage
from leaderless.distributed.weights.stream import Probe, WeightStream
from leaderless.models.attention.packed import Attention
from leaderless.models.causal_lm import CausalLM, parameters_with_memory
from leaderless.models.routers import Routers
from leaderless.models.uploads import one_copy, placed
from leaderless.models.vision.mrope import ImagePositions
from leaderless.planner.memory.limits import PREFILL_TOKENS
from leaderless.rollout.engine import (
    PROBE_TOLERANCE,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    check_probe,
    has_stopped,
)
from leaderless.rollout.native.kv_cache import LayerKeysValues, PromptPart, Segment, SegmentStore, Store
from leaderless.rollout.native.lean_forward import forward_of
from leaderless.rollout.native.prompts import (
    CachedPrompt,
    DecodeRows,
    Draws,
    KeptConversations,
    Key,
    PrefillPart,
    Response,
    draws_of,
    passes_of,
)
from leaderless.rollout.native.sampling import read_support, sample_recorded, sample_tokens, uniform_noise
from leaderless.rollout.native.segment_attention import DecodeAttention, PrefillAttention, SharedPrompts

REMEDY = "give models.ROLE.path the revision that the trainer has loaded, and report this if it has"
"""Remedy if the engine adds the trainer's adapters to other weights than the trainer."""


class NativeEngine:
    """Samples with weights that it is given: it keeps the tensors themselves, and makes no second copy of them.

    In float32 the same seed and sample id give the same tokens on any number of ranks, with any batching, aborted and
    resumed, as far as sums in another order agree. In bfloat16 products of other shapes round differently, and tokens
    may differ.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        end_tokens: frozenset[int],
        max_sequences: int,
        device: torch.device,
        routers: Routers | None = None,
        *,
        records_support: bool = False,
    ) -> None:
        """Decode at most `max_sequences` responses at a time.

        A model without weights, as of `empty_causal_lm`, gets them by `load_weights`; one with adapters gets these.
        The choices of its routers are recorded if given: then passes are not compiled. On request, the tokens that
        could be drawn are recorded, too.
        """
        self._weights = {name: parameter.shape for name, parameter in model.trained_weights()}
        is_empty = any(parameter.is_meta for parameter in model.parameters())
        self.policy_version: int | None = None if is_empty else 0
        known = parameters_with_memory(model)
        self._parameters = {name: known[name] for name in self._weights}
        model.to(device)
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.end_tokens, self.max_sequences = end_tokens, max_sequences
        self._routers, self._records_support = routers, records_support
        self._pass = forward_of(model, enable_compile=device.type == "cuda" and routers is None)
        self._num_requests = self._num_loads = 0
        self._reset()

    def _reset(self) -> None:
        # Next turns of conversations that are kept; they are read first.
        self._continuing: deque[CachedPrompt] = deque()
        self._unread: dict[Key, CachedPrompt] = {}
        self._read: deque[CachedPrompt] = deque()
        self._deltas: list[Delta] = []
        self._prompts, self._responses = self._make_stores()
        self._kept = KeptConversations(self._responses)
        self._experts: list[bytes] = []  # of each token of the last pass
        self._active: dict[Segment, Response] = {}
        self._rows: DecodeRows | None = None
        self._is_stale = False  # keys and values of active responses are to be computed again

    def _make_stores(self) -> tuple[Store, Store]:
        """Stores for prompts that responses share, and for what responses have of their own."""
        shapes: dict[int, LayerKeysValues] = {}
        kinds = self.model.attention_kinds
        return SegmentStore(shapes, kinds), SegmentStore(shapes, kinds)

    def wake(self, reload: Callable[[], None]) -> None:
        """Do nothing: memory is taken as it is needed."""

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:
        """Replace the parameters, and compare the probe; only responses in progress keep keys and values."""
        self._kept.shrink(0)
        self._num_loads += 1
        self._unread_waiting()
        self._is_stale = self._is_stale or not keep_cache
        self.policy_version, missing = None, set(self._weights)
        for name, tensor in weights:
            if name not in self._weights:
                raise RuntimeError(f"weight '{name}' was sent, which the model does not have")
            self._set_weight(name, tensor)
            missing.discard(name)
        if missing:
            raise RuntimeError(f"{len(missing)} of the model's weights have not been sent, such as {min(missing)}")
        if weights.probe is not None:
            self._check(weights.probe, weights.policy_version)
        self.policy_version = weights.policy_version

    def _set_weight(self, name: str, tensor: Tensor) -> None:
        """Use a tensor as a weight; it may be a trainer's own."""
        self._parameters[name].data = tensor.to(self.device).view(self._weights[name])

    @torch.no_grad()
    def _check(self, probe: Probe, policy_version: int) -> None:
        """Compare what the model computes now with the trainer's log-probabilities of a text."""
        segment = SegmentStore({}).add(len(probe.tokens), 0)
        attention = PrefillAttention([PromptPart(segment, 0, len(probe.tokens))], self.device)
        tokens, places = (
            torch.tensor(list(one), device=self.device) for one in (probe.tokens, range(len(probe.tokens)))
        )
        scores = self._pass(tokens, places, attention, places[:-1]).log_softmax(1)
        dtype = next(self.model.parameters()).dtype
        tolerance = PROBE_TOLERANCE[str(dtype).removeprefix("torch.")]
        found = scores.gather(1, tokens[1:, None])[:, 0]
        check_probe("the native engine", found, probe, policy_version, tolerance, REMEDY)

    def _unread_waiting(self) -> None:
        """Have prompts read again for the responses that have not drawn their first token yet."""
        again: dict[Key, CachedPrompt] = {}
        for prompt in self._read:
            fresh = again.setdefault(prompt.key, CachedPrompt(*prompt.key))
            for sequence in prompt.waiting:
                sequence.prompt = fresh
            fresh.waiting += prompt.waiting
            fresh.num_left += len(prompt.waiting)
            self._leave(prompt, len(prompt.waiting))
            prompt.waiting, prompt.logits = deque(), None
        self._read.clear()
        for key, prompt in self._unread.items():
            fresh = again.setdefault(key, prompt)
            if fresh is not prompt:
                for sequence in prompt.waiting:
                    sequence.prompt = fresh
                fresh.waiting += prompt.waiting
                fresh.num_left += prompt.num_left
        self._unread = again

    def sleep(self, *, keep_weights: bool) -> None:
        """Drop all requests with their keys and values, and the weights unless they are kept."""
        self._reset()
        if not keep_weights:
            self.policy_version = None
            for parameter in self._parameters.values():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)

    def submit(self, request: Request, params: SamplingParams) -> int:
        """Queue responses; equal prompts that have not been read yet are read once."""
        self.model.check_images(request.prompt, request.images)
        num_both = len(request.prompt) if self.model.reads_both_ways else 0
        if num_both and request.conversation is not None:
            raise ValueError(
                "a conversation has several turns, but the model reads a prompt in both directions, and what follows "
                "in one: choose a model that reads in one direction"
            )
        self._num_requests += 1
        number = self._num_requests
        for sibling, (sample_id, completion) in enumerate(zip(request.sample_ids, request.begin(), strict=True)):
            if len(completion.tokens) >= params.max_tokens:
                self._deltas.append(Delta(number, sibling, (), (), "length"))
                continue
            fresh = CachedPrompt((*request.prompt, *completion.tokens), request.images, num_both)
            if request.conversation is not None and request.conversation in self._kept:
                prompt = fresh
                self._continuing.append(prompt)
            else:
                prompt = self._unread.setdefault(fresh.key, fresh)  # other requests may have the same prompt
            sequence = Response(
                number, sibling, sample_id, completion, params, prompt, len(prompt.tokens), request.conversation
            )
            prompt.waiting.append(sequence)
            prompt.num_left += 1
        return number

    def abort(self, request: int) -> None:
        """Drop responses with the keys and values that no other response needs."""
        prompts = (*self._continuing, *self._unread.values(), *self._read)
        waiting = [sequence for prompt in prompts for sequence in prompt.waiting]
        for sequence in [s for s in (*waiting, *self._active.values()) if s.request == request]:
            if sequence.segment is None:
                sequence.prompt.waiting.remove(sequence)
            self._deltas.append(Delta(request, sequence.sibling, (), (), "aborted"))
            self._release(sequence)
        self._unread = {key: prompt for key, prompt in self._unread.items() if prompt.waiting}
        self._continuing, self._read = (
            deque(prompt for prompt in prompts if prompt.waiting) for prompts in (self._continuing, self._read)
        )

    def _release(self, sequence: Response, *, has_ended: bool = False) -> None:
        """Release keys and values that are no longer needed, unless they belong to a conversation to be kept."""
        prompt, segment = sequence.prompt, sequence.segment
        if segment is not None:
            del self._active[segment]
            self._rows = None
            if has_ended and sequence.conversation is not None and prompt.num_loads == self._num_loads:
                self._keep(sequence.conversation, sequence, segment)
            else:
                segment.home.remove(segment)
        self._leave(prompt, 1)

    def _leave(self, prompt: CachedPrompt, num_responses: int) -> None:
        """Release the keys and values of a prompt if no other responses need it."""
        prompt.num_left -= num_responses
        if prompt.num_left == 0 and prompt.is_shared and prompt.segment is not None:
            prompt.segment.home.remove(prompt.segment)
            self._rows = None

    def _keep(self, conversation: int, sequence: Response, own: Segment) -> None:
        """Keep what has been read of a conversation: everything but the last token."""
        prompt, segment = sequence.prompt, own
        if prompt.is_shared and prompt.segment is not None:
            segment = self._responses.join(prompt.segment, own)
            own.home.remove(own)
        num_new = sequence.num_tokens - len(prompt.tokens)
        tokens = (*prompt.tokens, *sequence.completion.tokens[-num_new:])
        self._kept.keep(conversation, tokens, segment, sequence.completion.experts, prompt.images)

    def forget(self, conversation: int) -> None:
        """Release the keys and values of a conversation."""
        self._kept.forget(conversation)

    def close(self) -> None:
        """Release the memory of weights, keys and values."""
        self.sleep(keep_weights=False)

    @torch.no_grad()
    def step(self) -> list[Delta]:
        """Draw a token for each active response, then read prompts into free places."""
        try:
            if self._is_stale:
                self._read_again()
            if self._active:
                self._decode()
            self._admit()
        except BaseException:
            self._reset()  # a pass that was interrupted cannot be continued
            raise
        deltas, self._deltas = self._deltas, []
        return deltas

    def _admit(self) -> None:
        """Fill free places, and draw the first token of each new response."""
        while len(self._active) < self.max_sequences and (self._read or self._continuing or self._unread):
            if not self._read:
                self._prefill()
            admitted: list[Response] = []
            while self._read and len(self._active) < self.max_sequences and self._has_room([]):
                prompt = self._read[0]
                sequence = prompt.waiting.popleft()
                self._kept.shrink(self.max_sequences - len(self._active) - 1)
                sequence.segment = self._responses.add(0) if prompt.is_shared else prompt.segment
                assert sequence.segment is not None
                sequence.num_known, prompt.num_known = prompt.num_known, len(prompt.tokens)
                self._active[sequence.segment] = sequence
                admitted.append(sequence)
                if not prompt.waiting:
                    self._read.popleft()
            if not admitted:
                return
            self._rows = None
            logits = torch.stack([cast("Tensor", sequence.prompt.logits) for sequence in admitted])
            for prompt in {sequence.prompt for sequence in admitted}:
                if not prompt.waiting:
                    prompt.logits = None  # a view would keep the logits of all prompts of the pass
            news = [s.prompt.experts[len(s.completion.experts) :] for s in admitted]
            self._extend(admitted, logits, draws_of(admitted), news)

    def _has_room(self, prompts: Sequence[CachedPrompt]) -> bool:  # noqa: ARG002
        """Check whether there is memory to read prompts, and for one more response."""
        return True

    def _prefill(self) -> None:
        """Read waiting prompts, kept conversations first."""
        free = self.max_sequences - len(self._active)
        taken = self._take_unread(free)
        if not taken:
            return
        # Forget conversations, so that there are places for the responses.
        self._kept.shrink(free - min(free, sum(len(prompt.waiting) for prompt in taken)))
        for prompt in taken:
            prompt.num_loads = self._num_loads
            if prompt.segment is None:
                prompt.is_shared = prompt.num_left > 1
                store, room = (self._prompts, 0) if prompt.is_shared else (self._responses, 1)
                prompt.segment = store.add(len(prompt.tokens), room)
        in_order = [*(one for one in taken if not one.num_known), *(one for one in taken if one.num_known)]
        # What is read in both directions is read at once.
        size = max(PREFILL_TOKENS, *(prompt.num_both for prompt in taken))
        for begin in range(0, max(len(prompt.tokens) - prompt.num_known for prompt in taken), size):
            logits = self._read_parts(in_order, begin, size)
        for prompt, row in zip(in_order, logits, strict=True):
            prompt.logits = row
        self._read += taken

    def _take_unread(self, free: int) -> list[CachedPrompt]:
        """Take as many waiting prompts as free places and one pass can take, or a single longer one.

        Those that continue a kept conversation get its segment.
        """
        taken: list[CachedPrompt] = []
        num_tokens = num_responses = 0
        while num_responses < free and (self._continuing or self._unread):
            prompt = self._continuing[0] if self._continuing else next(iter(self._unread.values()))
            if not self._has_room([*taken, prompt]):
                break
            conversation = prompt.waiting[0].conversation if prompt.num_left == 1 else None
            num_known = 0
            if conversation is not None:
                num_known = self._kept.num_known(conversation, prompt.tokens, prompt.images)
            num_tokens += len(prompt.tokens) - num_known
            if taken and num_tokens > PREFILL_TOKENS:
                break
            if self._continuing:
                self._continuing.popleft()
            else:
                del self._unread[prompt.key]
            if num_known and conversation is not None:
                prompt.num_known = num_known
                prompt.experts = self._kept.experts(conversation, num_known)
                prompt.segment = self._kept.resume(conversation, num_known, prompt.tokens)
            taken.append(prompt)
            num_responses += len(prompt.waiting)
        return taken

    def _read_parts(self, prompts: Sequence[CachedPrompt], begin: int, size: int) -> Tensor:
        """Read at most `size` tokens of prompts in one pass, from the token `begin` of those that are not known on.

        Returns:
            [n, vocabulary] float32 logits of the last tokens that were read.
        """
        parts: list[PrefillPart] = []
        for prompt in prompts:
            first = prompt.num_known + begin
            tokens = prompt.tokens[first : first + size]
            assert prompt.segment is not None
            part = PromptPart(prompt.segment, first, len(tokens), num_both=0 if first else prompt.num_both)
            parts.append(PrefillPart(part, tokens, prompt))
        logits, begin = self._read_pass(parts), 0
        for one in parts:
            one.prompt.experts += self._experts[begin : begin + len(one.tokens)]
            begin += len(one.tokens)
        return logits

    def _read_pass(self, texts: Sequence[PrefillPart]) -> Tensor:
        """Read the tokens of parts, of which those that begin a text are the first; see `_read_parts`."""
        parts, tokens = [text.part for text in texts], [token for text in texts for token in text.tokens]
        each = [
            text.prompt.positions(text.part.position, text.part.count, has_grid=self.model.has_grid) for text in texts
        ]
        if any(one.ndim > 1 for one in each):
            each = [one.expand(3, -1) for one in each]
        last = torch.tensor([part.count for part in parts]).cumsum(0) - 1
        seen = self._seen(texts) if any(text.prompt.images for text in texts) else None
        with one_copy(self.device):
            numbers = torch.tensor(tokens), torch.cat(each, -1), last
            inputs, positions, select = (placed(one, self.device) for one in numbers)
            attention = PrefillAttention(parts, self.device)
        return self._forward(inputs, positions, attention, select, seen)

    def _seen(self, texts: Sequence[PrefillPart]) -> ImagePositions | None:
        """Features of images for the tokens of a pass that stand for their parts."""
        images: list[PromptImage] = []
        is_read: list[bool] = []
        begin = 0
        for part, tokens, prompt in texts:
            for image in prompt.images:
                places = range(image.place - part.position, image.place - part.position + image.num_tokens)
                own = [0 <= place < len(tokens) for place in places]
                if any(own):
                    images.append(image.moved(begin - part.position))
                    is_read += own
            begin += len(tokens)
        return self.model.seen(images, self.device).only(torch.tensor(is_read)) if images else None

    def _read_again(self) -> None:
        """Compute the keys and values of all active responses, and of their prompts, with the weights of now."""
        texts: dict[Segment, tuple[Segment | None, Sequence[int], CachedPrompt]] = {}
        for segment, sequence in self._active.items():
            prompt, tokens = sequence.prompt, sequence.completion.tokens
            prompt.num_loads, new = self._num_loads, tokens[len(tokens) + len(prompt.tokens) - sequence.num_tokens : -1]
            if prompt.is_shared and prompt.segment is not None:
                texts[prompt.segment] = None, prompt.tokens, prompt
            shared, own = (prompt.segment, new) if prompt.is_shared else (None, (*prompt.tokens, *new))
            segment.states.clear()
            texts[segment] = shared, own, prompt
        # A prompt is read in the pass of the responses that share it, or in an earlier one.
        for parts in passes_of(texts, PREFILL_TOKENS):
            self._read_pass(sorted(parts, key=lambda one: one.part.position > 0))
        self._is_stale = False

    def _decode(self) -> None:
        """Decode one more token of each active response."""
        assert isinstance(self._responses, SegmentStore)
        if self._responses.grow() or self._rows is None:
            # Rows are in the order of their segments.
            assert isinstance(self._prompts, SegmentStore)
            sequences = [self._active[segment] for slots in self._responses for segment in slots.segments]
            prompts = [s.prompt.segment if s.prompt.is_shared else None for s in sequences]
            shared = SharedPrompts(self._prompts, prompts, self.device) if any(prompts) else None
            self._rows = DecodeRows(sequences, shared, draws_of(sequences), {})
        rows = self._rows
        positions = [sequence.num_tokens - 1 - sequence.prompt.saved for sequence in rows.sequences]
        tokens = [sequence.completion.tokens[-1] for sequence in rows.sequences]
        attention = DecodeAttention(self._responses, rows.shared, rows.batches, self.device)
        inputs, at = (torch.tensor(one).to(self.device) for one in (tokens, positions))
        everywhere = torch.arange(len(tokens), device=self.device)
        logits = self._forward(inputs, at, attention, everywhere)
        for segment in self._active:
            segment.length += 1
        news = [self._experts[row : row + 1] for row in range(len(tokens))]
        self._extend(rows.sequences, logits, rows.draws, news)

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        select: Tensor,
        images: ImagePositions | None = None,
    ) -> Tensor:
        """Compute [n, vocabulary] float32 logits at the selected tokens."""
        if self._routers is None:
            return self._pass(tokens, positions, attention, select, images=images)
        self._routers.begin()
        logits = self._pass(tokens, positions, attention, select, images=images)
        self._experts = [row.tobytes() for row in self._routers.now.choices().cpu().numpy()]
        return logits

    def _extend(
        self, sequences: Sequence[Response], logits: Tensor, draws: Draws, news: Sequence[Sequence[bytes]]
    ) -> None:
        """Draw a token for each response, which has new choices of experts, and release those that end with it."""
        tokens, log_probs = [0] * len(sequences), [0.0] * len(sequences)
        support: list[Sequence[bytes]] = [()] * len(sequences)
        for (seed, distribution), rows in draws.items():
            sample_ids = torch.tensor([sequences[row].sample_id for row in rows])
            places = torch.tensor([len(sequences[row].completion.tokens) for row in rows])
            noise = uniform_noise(seed, sample_ids, places).to(self.device)
            own = logits if len(draws) == 1 else logits[rows]
            if self._records_support:
                drawn, scores, mask = sample_recorded(own, noise, distribution)
                for row, words in zip(rows, read_support(mask.cpu().numpy()), strict=True):
                    support[row] = (words,)
            else:
                drawn, scores = sample_tokens(own, noise, distribution)
            for row, token, score in zip(rows, drawn.tolist(), scores.tolist(), strict=True):
                tokens[row], log_probs[row] = token, score
        for sequence, token, log_prob, *recorded in zip(sequences, tokens, log_probs, news, support, strict=True):
            self._add(sequence, token, log_prob, *recorded)

    def _add(
        self, sequence: Response, token: int, log_prob: float, experts: Sequence[bytes], support: Sequence[bytes]
    ) -> None:
        """Add what was drawn to a response, and release the response if it ends."""
        completion = sequence.completion
        completion.tokens.append(token)
        completion.log_probs.append(log_prob)
        completion.experts += experts
        completion.support += support
        sequence.num_tokens += 1
        reason: FinishReason | None = None
        if token in self.end_tokens or has_stopped(completion.tokens, sequence.params.stop, self.tokenizer):
            reason = "stop"
        elif len(completion.tokens) >= sequence.params.max_tokens:
            reason = "length"
        known, sequence.num_known = sequence.num_known, 0
        version = self.policy_version
        self._deltas.append(
            Delta(sequence.request, sequence.sibling, (token,), (log_prob,), reason, version, known, experts, support)
        )
        if reason:
            self._release(sequence, has_ended=True)
