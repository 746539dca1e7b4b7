"""The native engine: the trainer's own module, with continuous batching and one prefill for each prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leaderless.data.encode import Tokenizer
from leaderless.models.causal_lm import CausalLM
from leaderless.rollout.engine import Completion, Request, SamplingParams
from leaderless.rollout.kv_cache import DecodeAttention, LayerKeysValues, PrefillAttention, SlotCache
from leaderless.rollout.sampling import sample_tokens, uniform_noise

PREFILL_TOKENS = 8192
"""Prompts are read in passes of at most about this many tokens."""


@dataclass
class _Prompt:
    """A prompt that has been read, and those of its responses that wait for a slot."""

    request: Request
    keys_values: list[LayerKeysValues]
    logits: Tensor
    completions: list[Completion]
    next_sibling: int = 0


@dataclass
class _Sequence:
    """A response that is being decoded."""

    prompt_tokens: int
    completion: Completion
    sample_id: int

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + len(self.completion.tokens)


@dataclass
class _State:
    """One call of `generate`."""

    params: SamplingParams
    waiting: deque[tuple[Request, list[Completion]]]
    cache: SlotCache
    ready: deque[_Prompt] = field(default_factory=deque)
    active: list[_Sequence] = field(default_factory=list)
    num_ended: int = 0


class NativeEngine:
    """Samples with the weights that are being trained; there is no second copy of them.

    The same seed and sample id give the same tokens, on any number of ranks and with any batching, as far as float32
    sums in another order agree.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        end_tokens: frozenset[int],
        max_sequences: int,
        device: torch.device,
    ) -> None:
        """Use a module that holds its whole weights while `generate` runs.

        Args:
            model: The trainer's.
            tokenizer: For stop texts.
            end_tokens: Tokens that end a response.
            max_sequences: Decoded at the same time.
            device: Of the module.
        """
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.end_tokens, self.max_sequences = end_tokens, max_sequences

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        """See `RolloutEngine`."""
        results = [[Completion() for _ in request.sample_ids] for request in requests]
        longest = max((len(request.prompt) for request in requests), default=0) + params.max_tokens
        slots = min(self.max_sequences, sum(len(request.sample_ids) for request in requests))
        state = _State(params, deque(zip(requests, results, strict=True)), SlotCache(slots, longest))
        was_training = self.model.training
        self.model.eval()
        while state.waiting or state.ready or state.active:
            self._admit(state)
            self._decode(state)
            if progress is not None:
                progress(state.num_ended)
                state.num_ended = 0
        self.model.train(was_training)
        return results

    def _admit(self, state: _State) -> None:
        """Fill free slots, and draw the first token of each response that gets one."""
        while len(state.active) < state.cache.num_slots and (state.ready or state.waiting):
            if not state.ready:
                self._prefill(state)
            first = len(state.active)
            logits: list[Tensor] = []
            while state.ready and len(state.active) < state.cache.num_slots:
                prompt = state.ready[0]
                state.cache.fill(len(state.active), prompt.keys_values)
                sibling = prompt.next_sibling
                sample_id, completion = prompt.request.sample_ids[sibling], prompt.completions[sibling]
                state.active.append(_Sequence(len(prompt.request.prompt), completion, sample_id))
                logits.append(prompt.logits)
                prompt.next_sibling += 1
                if prompt.next_sibling == len(prompt.request.sample_ids):
                    state.ready.popleft()
            self._extend(state, first, torch.stack(logits))

    def _prefill(self, state: _State) -> None:
        """Read as many waiting prompts as free slots and one pass can take."""
        free = state.cache.num_slots - len(state.active)
        taken: list[tuple[Request, list[Completion]]] = []
        num_tokens = num_responses = 0
        while state.waiting and num_responses < free:
            num_tokens += len(state.waiting[0][0].prompt)
            if taken and num_tokens > PREFILL_TOKENS:
                break
            taken.append(state.waiting.popleft())
            num_responses += len(taken[-1][1])
        lengths = torch.tensor([len(request.prompt) for request, _ in taken])
        tokens = torch.tensor([token for request, _ in taken for token in request.prompt])
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        attention = PrefillAttention(lengths.tolist(), self.device)
        last = lengths.cumsum(0) - 1
        logits = self.model(tokens.to(self.device), positions.to(self.device), attention, last.to(self.device))
        for (request, completions), keys_values, row in zip(taken, attention.prompts(), logits, strict=True):
            state.ready.append(_Prompt(request, keys_values, row, completions))

    def _decode(self, state: _State) -> None:
        """One more token for each active response."""
        if not state.active:
            return
        tokens = torch.tensor([sequence.completion.tokens[-1] for sequence in state.active], device=self.device)
        positions = torch.tensor([sequence.num_tokens - 1 for sequence in state.active], device=self.device)
        everywhere = torch.arange(len(tokens), device=self.device)
        logits = self.model(tokens, positions, DecodeAttention(state.cache, positions), everywhere)
        self._extend(state, 0, logits)

    def _extend(self, state: _State, first: int, logits: Tensor) -> None:
        """Draw a token for each active response from `first` on, and let go of those that end with it."""
        sequences = state.active[first:]
        sample_ids = torch.tensor([sequence.sample_id for sequence in sequences], device=self.device)
        places = torch.tensor([len(sequence.completion.tokens) for sequence in sequences], device=self.device)
        noise = uniform_noise(state.params.seed, sample_ids, places)
        tokens, log_probs = sample_tokens(logits, noise, state.params.distribution)
        ended: list[int] = []
        for offset, (sequence, token, log_prob) in enumerate(
            zip(sequences, tokens.tolist(), log_probs.tolist(), strict=True)
        ):
            completion = sequence.completion
            completion.tokens.append(token)
            completion.log_probs.append(log_prob)
            if self._has_ended(completion, state.params):
                ended.append(first + offset)
        self._remove(state, ended)

    def _has_ended(self, completion: Completion, params: SamplingParams) -> bool:
        if completion.tokens[-1] in self.end_tokens or self._has_stopped(completion, params):
            return True
        completion.is_truncated = len(completion.tokens) >= params.max_tokens
        return completion.is_truncated

    def _has_stopped(self, completion: Completion, params: SamplingParams) -> bool:
        """Whether a stop text is complete; it began at most as many tokens ago as it has bytes."""
        if not params.stop:
            return False
        reach = max(len(text.encode()) for text in params.stop)
        text = self.tokenizer.decode(completion.tokens[-reach - 1 :])
        return any(stop in text for stop in params.stop)

    def _remove(self, state: _State, ended: Sequence[int]) -> None:
        """Free slots, moving the last active sequences into the gaps."""
        state.num_ended += len(ended)
        for slot in reversed(ended):
            last = state.active.pop()
            if slot < len(state.active):
                state.cache.move(len(state.active), slot, last.num_tokens - 1)
                state.active[slot] = last
