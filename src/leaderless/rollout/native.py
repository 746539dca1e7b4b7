"""The native engine: the trainer's own module, with continuous batching and one prefill for each prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.config.rollout import SamplingConfig
from leaderless.data.encode import Tokenizer
from leaderless.models.causal_lm import CausalLM
from leaderless.rollout.engine import Completion, Delta, FinishReason, Request, SamplingParams
from leaderless.rollout.kv_cache import DecodeAttention, LayerKeysValues, PrefillAttention, SlotCache
from leaderless.rollout.sampling import sample_tokens, uniform_noise
from leaderless.training.engine import TrainEngine

PREFILL_TOKENS = 8192
"""Prompts are read in passes of at most about this many tokens."""


@dataclass
class _Sequence:
    """A response that is being decoded, or waits for it.

    Attributes:
        request: What `submit` returned.
        sibling: Which response of the request.
        sample_id: Fixes the noise.
        prompt_tokens: Of the request's prompt.
        completion: Has what a resumed response began with, too.
        params: How it is sampled.
    """

    request: int
    sibling: int
    sample_id: int
    prompt_tokens: int
    completion: Completion
    params: SamplingParams

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + len(self.completion.tokens)


@dataclass
class _Prompt:
    """Tokens to be read once, and the responses that go on from them.

    Attributes:
        tokens: Of a prompt; behind it what a resumed response began with.
        waiting: Responses without a slot.
        keys_values: By layer; empty until the prompt has been read.
        logits: [vocabulary] float32, of the first token.
    """

    tokens: Sequence[int]
    waiting: deque[_Sequence]
    keys_values: list[LayerKeysValues]
    logits: Tensor


class NativeEngine:
    """Samples with the weights that are being trained; there is no second copy of them.

    The same seed and sample id give the same tokens, on any number of ranks, with any batching, aborted and resumed, as
    far as float32 sums in another order agree.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer,
        end_tokens: frozenset[int],
        max_sequences: int,
        device: torch.device,
    ) -> None:
        """Use a module that holds its whole weights while responses are sampled.

        Args:
            model: The trainer's.
            tokenizer: For stop texts.
            end_tokens: Tokens that end a response.
            max_sequences: Decoded at the same time.
            device: Of the module.
        """
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.end_tokens, self.max_sequences = end_tokens, max_sequences
        self._cache = SlotCache(max_sequences)
        self._unread: deque[_Prompt] = deque()
        self._read: deque[_Prompt] = deque()
        self._active: list[_Sequence] = []
        self._deltas: list[Delta] = []
        self._num_requests = 0

    @contextmanager
    def serving(self, trainer: TrainEngine) -> Iterator[None]:
        """See `RolloutEngine`. The module is the trainer's own; here it is made whole."""
        with trainer.unsharded() as module:
            assert module is self.model
            was_training = module.training
            module.eval()
            try:
                yield
            finally:
                module.train(was_training)
                self.close()

    def submit(self, request: Request, params: SamplingParams) -> int:
        """See `RolloutEngine`."""
        self._num_requests += 1
        number, prompt = self._num_requests, list(request.prompt)
        fresh: deque[_Sequence] = deque()
        for sibling, (sample_id, completion) in enumerate(zip(request.sample_ids, request.begin(), strict=True)):
            sequence = _Sequence(number, sibling, sample_id, len(prompt), completion, params)
            if _num_wanted(sequence) < 1:
                self._deltas.append(_ended(sequence, "length"))
            elif completion.tokens:
                self._unread.append(_Prompt([*prompt, *completion.tokens], deque([sequence]), [], torch.empty(0)))
            else:
                fresh.append(sequence)
        if fresh:
            self._unread.append(_Prompt(prompt, fresh, [], torch.empty(0)))
        return number

    def abort(self, request: int) -> None:
        """See `RolloutEngine`."""
        for prompts in (self._unread, self._read):
            for prompt in [p for p in prompts if p.waiting[0].request == request]:
                prompts.remove(prompt)
                self._deltas += [_ended(sequence, "aborted") for sequence in prompt.waiting]
        slots = [slot for slot, sequence in enumerate(self._active) if sequence.request == request]
        self._deltas += [_ended(self._active[slot], "aborted") for slot in slots]
        self._remove(slots)

    def close(self) -> None:
        """See `RolloutEngine`."""
        self._unread.clear()
        self._read.clear()
        self._active.clear()
        self._deltas.clear()
        self._cache = SlotCache(self.max_sequences)

    @torch.no_grad()
    def step(self) -> list[Delta]:
        """See `RolloutEngine`."""
        self._decode()
        self._admit()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _admit(self) -> None:
        """Fill free slots, and draw the first token of each response that gets one."""
        while len(self._active) < self.max_sequences and (self._read or self._unread):
            if not self._read:
                self._prefill()
            first = len(self._active)
            logits: list[Tensor] = []
            while self._read and len(self._active) < self.max_sequences:
                prompt = self._read[0]
                sequence = prompt.waiting.popleft()
                self._cache.fill(len(self._active), prompt.keys_values, len(prompt.tokens) + _num_wanted(sequence))
                self._active.append(sequence)
                logits.append(prompt.logits)
                if not prompt.waiting:
                    self._read.popleft()
            self._extend(first, torch.stack(logits))

    def _prefill(self) -> None:
        """Read as many waiting prompts as free slots and one pass can take."""
        free = self.max_sequences - len(self._active)
        taken: list[_Prompt] = []
        num_tokens = num_responses = 0
        while self._unread and num_responses < free:
            num_tokens += len(self._unread[0].tokens)
            if taken and num_tokens > PREFILL_TOKENS:
                break
            taken.append(self._unread.popleft())
            num_responses += len(taken[-1].waiting)
        lengths = torch.tensor([len(prompt.tokens) for prompt in taken])
        tokens = torch.tensor([token for prompt in taken for token in prompt.tokens])
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        attention = PrefillAttention(lengths.tolist(), self.device)
        last = lengths.cumsum(0) - 1
        logits = self.model(tokens.to(self.device), positions.to(self.device), attention, last.to(self.device))
        for prompt, keys_values, row in zip(taken, attention.prompts(), logits, strict=True):
            prompt.keys_values, prompt.logits = keys_values, row
        self._read += taken

    def _decode(self) -> None:
        """One more token for each active response."""
        if not self._active:
            return
        tokens = torch.tensor([sequence.completion.tokens[-1] for sequence in self._active], device=self.device)
        positions = torch.tensor([sequence.num_tokens - 1 for sequence in self._active], device=self.device)
        everywhere = torch.arange(len(tokens), device=self.device)
        self._extend(0, self.model(tokens, positions, DecodeAttention(self._cache, positions), everywhere))

    def _extend(self, first: int, logits: Tensor) -> None:
        """Draw a token for each active response from `first` on, and let go of those that end with it."""
        sequences = self._active[first:]
        tokens, log_probs = self._sample(sequences, logits)
        ended: list[int] = []
        for slot, (sequence, token, log_prob) in enumerate(zip(sequences, tokens, log_probs, strict=True), first):
            completion = sequence.completion
            completion.tokens.append(token)
            completion.log_probs.append(log_prob)
            reason = self._finish_reason(completion, sequence.params)
            self._deltas.append(Delta(sequence.request, sequence.sibling, (token,), (log_prob,), reason))
            if reason:
                ended.append(slot)
        self._remove(ended)

    def _sample(self, sequences: Sequence[_Sequence], logits: Tensor) -> tuple[list[int], list[float]]:
        """A token for each response, and its log-probability; those that are sampled alike are drawn together."""
        alike: dict[tuple[int, SamplingConfig], list[int]] = {}
        for row, sequence in enumerate(sequences):
            alike.setdefault((sequence.params.seed, sequence.params.distribution), []).append(row)
        tokens, log_probs = [0] * len(sequences), [0.0] * len(sequences)
        for (seed, distribution), rows in alike.items():
            sample_ids = torch.tensor([sequences[row].sample_id for row in rows], device=self.device)
            places = torch.tensor([len(sequences[row].completion.tokens) for row in rows], device=self.device)
            chosen = logits if len(alike) == 1 else logits[rows]
            drawn, scores = sample_tokens(chosen, uniform_noise(seed, sample_ids, places), distribution)
            for row, token, score in zip(rows, drawn.tolist(), scores.tolist(), strict=True):
                tokens[row], log_probs[row] = token, score
        return tokens, log_probs

    def _finish_reason(self, completion: Completion, params: SamplingParams) -> FinishReason | None:
        if completion.tokens[-1] in self.end_tokens or self._has_stopped(completion, params):
            return "stop"
        return "length" if len(completion.tokens) >= params.max_tokens else None

    def _has_stopped(self, completion: Completion, params: SamplingParams) -> bool:
        """Whether a stop text is complete; it began at most as many tokens ago as it has bytes."""
        if not params.stop:
            return False
        reach = max(len(text.encode()) for text in params.stop)
        text = self.tokenizer.decode(completion.tokens[-reach - 1 :])
        return any(stop in text for stop in params.stop)

    def _remove(self, ended: Sequence[int]) -> None:
        """Free slots, moving the last active sequences into the gaps."""
        for slot in reversed(ended):
            last = self._active.pop()
            if slot < len(self._active):
                self._cache.move(len(self._active), slot, last.num_tokens - 1)
                self._active[slot] = last


def _num_wanted(sequence: _Sequence) -> int:
    """Tokens that a response may still get."""
    return sequence.params.max_tokens - len(sequence.completion.tokens)


def _ended(sequence: _Sequence, reason: FinishReason) -> Delta:
    return Delta(sequence.request, sequence.sibling, (), (), reason)
