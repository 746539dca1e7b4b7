"""The native engine: this package's own modules, with continuous batching and one prefill for each prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from leaderless.config.rollout import SamplingConfig
from leaderless.data.encode import Tokenizer
from leaderless.models.attention import Attention
from leaderless.models.causal_lm import CausalLM
from leaderless.rollout.cuda_graphs import DecodeGraphs
from leaderless.rollout.engine import Completion, Delta, FinishReason, Request, SamplingParams, has_stopped
from leaderless.rollout.kv_cache import Segment, SegmentStore
from leaderless.rollout.lean_forward import forward_of
from leaderless.rollout.sampling import sample_tokens, uniform_noise
from leaderless.rollout.segment_attention import (
    DecodeAttention,
    PrefillAttention,
    PromptPart,
    Rounding,
    SharedPrompts,
    round_up,
)
from leaderless.weights.stream import WeightStream

PREFILL_TOKENS = 8192
"""Most tokens of a pass that reads prompts; a longer prompt is read in parts."""
EXACT = Rounding(rows=1, tokens=1)
COARSE = Rounding(rows=16, tokens=64)
"""Accelerators spend more time on starting passes than on padding, and shapes that recur can be recorded."""


@dataclass(eq=False)
class _Prompt:
    """A prompt with the tokens from which a response is resumed, and the responses that continue it."""

    tokens: tuple[int, ...]
    waiting: deque[_Sequence] = field(default_factory=deque)
    num_left: int = 0  # responses that have not ended
    is_shared: bool = False  # several responses attend to its segment; a single response extends the segment itself
    segment: Segment | None = None  # None until the prompt has been read
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # [vocabulary] float32, for the first token


@dataclass(eq=False)
class _Sequence:
    """A response that is waiting, or is being decoded and has a segment; `num_tokens` counts its prompt, too."""

    request: int
    sibling: int
    sample_id: int
    completion: Completion
    params: SamplingParams
    prompt: _Prompt
    segment: Segment | None = None
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt.tokens)


_Draws = dict[tuple[int, SamplingConfig], list[int]]
"""Rows of the logits by their seed and distribution; those with the same are drawn together."""


class _Rows(NamedTuple):
    """Everything that stays the same from pass to pass until responses come, go or move."""

    sequences: list[_Sequence | None]  # in the order of the segments; None for rows that only fill up a shape
    real: Tensor  # [n] int64, rows with responses
    shared: SharedPrompts | None
    draws: _Draws


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
        rounding: Rounding | None = None,
    ) -> None:
        """Decode at most `max_sequences` responses at a time; the shapes of passes are rounded as suits the device.

        A model without weights, as of `empty_causal_lm`, gets them by `load_weights`.
        """
        self._weights = {name: parameter.shape for name, parameter in model.model.named_parameters()}
        is_empty = any(parameter.is_meta for parameter in model.parameters())
        self.policy_version: int | None = None if is_empty else 0
        self._parameters = _with_memory(model)
        model.to(device)
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.end_tokens, self.max_sequences = end_tokens, max_sequences
        self._pass = forward_of(model, enable_compile=device.type == "cuda")
        self._rounding = rounding or (EXACT if device.type == "cpu" else COARSE)
        self._num_requests = 0
        self._forget()

    def _forget(self) -> None:
        self._unread: dict[tuple[int, ...], _Prompt] = {}
        self._read: deque[_Prompt] = deque()
        self._deltas: list[Delta] = []
        self._prompts, self._responses = (SegmentStore(self._rounding.rows) for _ in range(2))
        self._graphs = DecodeGraphs(self._pass) if self.device.type == "cuda" else None
        self._active: dict[Segment, _Sequence] = {}
        self._rows: _Rows | None = None

    def wake(self, reload: Callable[[], None]) -> None:
        """See `RolloutEngine`. Memory is taken as it is needed."""

    def load_weights(self, weights: WeightStream) -> None:
        """See `RolloutEngine`. Keys and values of tokens that were read stay as they are."""
        self.policy_version, missing = None, set(self._weights)
        for name, tensor in weights:
            if name not in self._weights:
                raise RuntimeError(f"weight '{name}' was sent, which the model does not have")
            self._parameters[name].data = tensor.to(self.device).view(self._weights[name])
            missing.discard(name)
        if missing:
            raise RuntimeError(f"{len(missing)} of the model's weights have not been sent, such as {min(missing)}")
        if self._graphs is not None:
            self._graphs = DecodeGraphs(self._pass)  # a graph reads from the memory of earlier weights
        self.policy_version = weights.policy_version

    def sleep(self, *, keep_weights: bool) -> None:
        """See `RolloutEngine`."""
        self._forget()
        if not keep_weights:
            self.policy_version = None
            for parameter in self._parameters.values():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)

    def submit(self, request: Request, params: SamplingParams) -> int:
        """See `RolloutEngine`."""
        self._num_requests += 1
        number = self._num_requests
        for sibling, (sample_id, completion) in enumerate(zip(request.sample_ids, request.begin(), strict=True)):
            if len(completion.tokens) >= params.max_tokens:
                self._deltas.append(Delta(number, sibling, (), (), "length"))
                continue
            tokens = (*request.prompt, *completion.tokens)
            prompt = self._unread.setdefault(tokens, _Prompt(tokens))  # other requests may have the same prompt
            prompt.waiting.append(_Sequence(number, sibling, sample_id, completion, params, prompt))
            prompt.num_left += 1
        return number

    def abort(self, request: int) -> None:
        """See `RolloutEngine`."""
        waiting = [sequence for prompt in (*self._unread.values(), *self._read) for sequence in prompt.waiting]
        for sequence in [s for s in (*waiting, *self._active.values()) if s.request == request]:
            if sequence.segment is None:
                sequence.prompt.waiting.remove(sequence)
            self._deltas.append(Delta(request, sequence.sibling, (), (), "aborted"))
            self._release(sequence)
        self._unread = {tokens: prompt for tokens, prompt in self._unread.items() if prompt.waiting}
        self._read = deque(prompt for prompt in self._read if prompt.waiting)

    def _release(self, sequence: _Sequence) -> None:
        """Release keys and values that are no longer needed."""
        if sequence.segment is not None:
            sequence.segment.home.remove(sequence.segment)
            del self._active[sequence.segment]
            self._rows = None
        prompt = sequence.prompt
        prompt.num_left -= 1
        if prompt.num_left == 0 and prompt.is_shared and prompt.segment is not None:
            prompt.segment.home.remove(prompt.segment)

    def forget(self, conversation: int) -> None:
        """See `RolloutEngine`. Nothing is kept."""

    def close(self) -> None:
        """See `RolloutEngine`."""
        self.sleep(keep_weights=False)

    @torch.no_grad()
    def step(self) -> list[Delta]:
        """See `RolloutEngine`."""
        try:
            if self._active:
                self._decode()
            self._admit()
        except BaseException:
            self._forget()  # a pass that was interrupted cannot be continued
            raise
        deltas, self._deltas = self._deltas, []
        return deltas

    def _admit(self) -> None:
        """Fill free places, and draw the first token of each new response."""
        while len(self._active) < self.max_sequences and (self._read or self._unread):
            if not self._read:
                self._prefill()
            admitted: list[_Sequence] = []
            while self._read and len(self._active) < self.max_sequences:
                prompt = self._read[0]
                sequence = prompt.waiting.popleft()
                sequence.segment = self._responses.add(0) if prompt.is_shared else prompt.segment
                assert sequence.segment is not None
                self._active[sequence.segment] = sequence
                admitted.append(sequence)
                if not prompt.waiting:
                    self._read.popleft()
            self._rows = None
            logits = torch.stack([sequence.prompt.logits for sequence in admitted])
            for prompt in {sequence.prompt for sequence in admitted}:
                if not prompt.waiting:
                    prompt.logits = torch.empty(0)  # a view would keep the logits of all prompts of the pass
            self._extend(admitted, logits, _draws(admitted))

    def _prefill(self) -> None:
        """Read as many waiting prompts as free places and one pass can take, or a single longer one."""
        free = self.max_sequences - len(self._active)
        taken: list[_Prompt] = []
        num_tokens = num_responses = 0
        while self._unread and num_responses < free:
            tokens = next(iter(self._unread))
            num_tokens += len(tokens)
            if taken and num_tokens > PREFILL_TOKENS:
                break
            taken.append(self._unread.pop(tokens))
            num_responses += len(taken[-1].waiting)
        for prompt in taken:
            prompt.is_shared = prompt.num_left > 1
            store, room = (self._prompts, 0) if prompt.is_shared else (self._responses, 1)
            prompt.segment = store.add(len(prompt.tokens), room)
        for begin in range(0, max(len(prompt.tokens) for prompt in taken), PREFILL_TOKENS):
            logits = self._read_parts(taken, begin)
        for prompt, row in zip(taken, logits, strict=True):
            prompt.logits = row
        self._read += taken

    def _read_parts(self, prompts: Sequence[_Prompt], begin: int) -> Tensor:
        """Read prompts from a token on in one pass; return the logits of their last tokens, [n, vocabulary] float32."""
        read = [prompt.tokens[begin : begin + PREFILL_TOKENS] for prompt in prompts]
        segments = [prompt.segment for prompt in prompts if prompt.segment is not None]
        parts = [PromptPart(segment, begin, len(tokens)) for segment, tokens in zip(segments, read, strict=True)]
        positions = torch.cat([torch.arange(begin, begin + part.count) for part in parts])
        last = torch.tensor([part.count for part in parts]).cumsum(0) - 1
        flat = torch.tensor([token for tokens in read for token in tokens])
        return self._forward(flat, positions, PrefillAttention(parts, self.device), last)

    def _decode(self) -> None:
        """Decode one more token of each active response."""
        if self._responses.grow() or self._rows is None:
            self._rows = self._arrange()
        rows = self._rows
        places = [0 if sequence is None else sequence.num_tokens - 1 for sequence in rows.sequences]
        tokens = [0 if sequence is None else sequence.completion.tokens[-1] for sequence in rows.sequences]
        attention = DecodeAttention(self._responses, rows.shared, max(places) + 1, self._rounding, self.device)
        logits = self._forward(torch.tensor(tokens), torch.tensor(places), attention, rows.real)
        for segment in self._active:
            segment.length += 1
        self._extend([s for s in rows.sequences if s is not None], logits, rows.draws)

    def _arrange(self) -> _Rows:
        """Arrange rows in the order of their segments."""
        sequences: list[_Sequence | None] = []
        for slots in self._responses:
            sequences += [self._active[segment] for segment in slots.segments]
            sequences += [None] * (round_up(len(slots.segments), self._rounding.rows) - len(slots.segments))
        real = [row for row, sequence in enumerate(sequences) if sequence is not None]
        prompts = [s.prompt.segment if s is not None and s.prompt.is_shared else None for s in sequences]
        shared = SharedPrompts(self._prompts, prompts, self._rounding, self.device) if any(prompts) else None
        draws = _draws([sequence for sequence in sequences if sequence is not None])
        return _Rows(sequences, torch.tensor(real, device=self.device), shared, draws)

    def _forward(self, tokens: Tensor, positions: Tensor, attention: Attention, select: Tensor) -> Tensor:
        """Compute [n, vocabulary] float32 logits at the selected tokens."""
        tokens, positions, select = (tensor.to(self.device) for tensor in (tokens, positions, select))
        if self._graphs is not None and isinstance(attention, DecodeAttention):
            return self._graphs(tokens, positions, attention).index_select(0, select)
        return self._pass(tokens, positions, attention, select)

    def _extend(self, sequences: Sequence[_Sequence], logits: Tensor, draws: _Draws) -> None:
        """Draw a token for each response, and release those that end with it."""
        tokens, log_probs = [0] * len(sequences), [0.0] * len(sequences)
        for (seed, distribution), rows in draws.items():
            sample_ids = torch.tensor([sequences[row].sample_id for row in rows])
            places = torch.tensor([len(sequences[row].completion.tokens) for row in rows])
            noise = uniform_noise(seed, sample_ids, places).to(self.device)
            drawn, scores = sample_tokens(logits if len(draws) == 1 else logits[rows], noise, distribution)
            for row, token, score in zip(rows, drawn.tolist(), scores.tolist(), strict=True):
                tokens[row], log_probs[row] = token, score
        for sequence, token, log_prob in zip(sequences, tokens, log_probs, strict=True):
            completion = sequence.completion
            completion.tokens.append(token)
            completion.log_probs.append(log_prob)
            sequence.num_tokens += 1
            reason = self._finish_reason(completion, sequence.params)
            self._deltas.append(
                Delta(sequence.request, sequence.sibling, (token,), (log_prob,), reason, self.policy_version)
            )
            if reason:
                self._release(sequence)

    def _finish_reason(self, completion: Completion, params: SamplingParams) -> FinishReason | None:
        tokens = completion.tokens
        if tokens[-1] in self.end_tokens or has_stopped(tokens, params.stop, self.tokenizer):
            return "stop"
        return "length" if len(tokens) >= params.max_tokens else None


def _with_memory(model: CausalLM) -> dict[str, nn.Parameter]:
    """The parameters by name, where they have none of the device `meta`; those that modules share stay shared."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                own = replaced.setdefault(parameter, nn.Parameter(torch.empty(0), requires_grad=False))
                setattr(module, name, own)
    return dict(model.model.named_parameters())


def _draws(sequences: Sequence[_Sequence]) -> _Draws:
    draws: _Draws = {}
    for row, sequence in enumerate(sequences):
        draws.setdefault((sequence.params.seed, sequence.params.distribution), []).append(row)
    return draws
