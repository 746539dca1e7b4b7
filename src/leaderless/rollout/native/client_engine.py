"""The native engine for clients of a served model, who ask for more than samples to train on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from leaderless.rollout.engine import Delta, Request, SamplingParams
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.kv_cache import PromptPart, SegmentStore
from leaderless.rollout.native.prompts import Draws, Response
from leaderless.rollout.native.segment_attention import PrefillAttention
from leaderless.rollout.native.shaped_logits import likely, scores, shaped
from leaderless.rollout.shaping import PromptScores

SCORED_AT_ONCE = 256
"""Tokens of a prompt whose logits are in memory at a time, which are as wide as the vocabulary."""


class ClientEngine(NativeEngine):
    """Also penalizes tokens, follows grammars, and reports likely tokens and log-probabilities of prompts.

    Responses without such wishes are sampled as the native engine samples them, next to the others.
    """

    def _reset(self) -> None:
        super()._reset()
        self._unscored: dict[int, tuple[Sequence[int], int]] = {}
        self._rows_of: dict[int, Tensor] = {}  # logits that the newest token of each response was drawn from

    @override
    def submit(self, request: Request, params: SamplingParams) -> int:
        shaping = params.shaping
        if shaping is not None and shaping.scores_prompt and self.model.reads_both_ways:
            raise ValueError(
                "the model reads a prompt in both directions, so that its tokens have no log-probabilities"
            )
        number = super().submit(request, params)
        if shaping is not None and shaping.scores_prompt:
            self._unscored[number] = request.prompt, shaping.num_likely
        return number

    @override
    def abort(self, request: int) -> None:
        self._unscored.pop(request, None)
        super().abort(request)

    @override
    def step(self) -> list[Delta]:
        """Report log-probabilities of new prompts, and do what the native engine does."""
        unscored, self._unscored = self._unscored, {}
        scored = [Delta(number, 0, (), (), None, prompt=self._scores(*asked)) for number, asked in unscored.items()]
        return [*scored, *super().step()]

    @torch.no_grad()
    def _scores(self, tokens: Sequence[int], count: int) -> PromptScores:
        """Read a prompt again, alone, for the logits of all its tokens but the last."""
        store = SegmentStore({}, self.model.attention_kinds)
        segment, found = store.add(len(tokens), 0), PromptScores([], [])
        for begin in range(0, len(tokens) - 1, SCORED_AT_ONCE):
            end = min(begin + SCORED_AT_ONCE, len(tokens) - 1)
            attention = PrefillAttention([PromptPart(segment, begin, end - begin)], self.device)
            inputs = torch.tensor(tokens[begin:end], device=self.device)
            everywhere = torch.arange(end - begin, device=self.device)
            logits = self._pass(inputs, everywhere + begin, attention, everywhere)
            part = scores(tokens[begin + 1 : end + 1], logits, count)
            found = PromptScores([*found.log_probs, *part.log_probs], [*found.likely, *part.likely])
        return found

    @override
    def _extend(
        self, sequences: Sequence[Response], logits: Tensor, draws: Draws, news: Sequence[Sequence[bytes]]
    ) -> None:
        logits = shaped(logits, sequences)
        self._rows_of = {id(sequence): logits[row] for row, sequence in enumerate(sequences)}
        super()._extend(sequences, logits, draws, news)
        self._rows_of = {}

    @override
    def _add(
        self, sequence: Response, token: int, log_prob: float, experts: Sequence[bytes], support: Sequence[bytes]
    ) -> None:
        super()._add(sequence, token, log_prob, experts, support)
        if sequence.grammar is not None:
            sequence.grammar.take(token)
        shaping = sequence.params.shaping
        if shaping is not None and shaping.num_likely:
            row = self._rows_of[id(sequence)]
            found = likely(row, sequence.params.distribution, shaping.num_likely)
            self._deltas[-1] = self._deltas[-1]._replace(likely=(found,))
