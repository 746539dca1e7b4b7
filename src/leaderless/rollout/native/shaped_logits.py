"""Logits as clients of a served model want them, and what else they are told about tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leaderless.config.rollout import SamplingConfig
from leaderless.rollout.native.prompts import Response
from leaderless.rollout.native.sampling import truncate
from leaderless.rollout.shaping import PromptScores, Ranked, Shaping


def shaped(logits: Tensor, sequences: Sequence[Response]) -> Tensor:
    """Change the logits, [n, vocabulary], of the responses that want it; others stay the same, bit for bit."""
    is_copied = False
    for row, sequence in enumerate(sequences):
        shaping = sequence.params.shaping
        if shaping is None or not shaping.changes_logits:
            continue
        if not is_copied:
            logits, is_copied = logits.clone(), True
        _shape(logits[row], shaping, sequence)
    return logits


def _shape(row: Tensor, shaping: Shaping, sequence: Response) -> None:
    for token, bias in shaping.logit_bias:
        row[token] += bias
    tokens = sequence.completion.tokens
    if tokens and shaping.has_penalties:
        found, counts = torch.unique(torch.tensor(tokens, device=row.device), return_counts=True)
        row[found] -= shaping.frequency_penalty * counts + shaping.presence_penalty
    if shaping.grammar is not None:
        if sequence.grammar is None:
            sequence.grammar = shaping.grammar.begin()
            for token in tokens:
                sequence.grammar.take(token)
        row.masked_fill_(~sequence.grammar.allowed()[: len(row)].to(row.device), -torch.inf)


def likely(logits: Tensor, distribution: SamplingConfig, count: int) -> Ranked:
    """The likeliest tokens of [vocabulary] logits, under the distribution that tokens are drawn from.

    At temperature 0 it is the model's own, as for log-probabilities of sampled tokens. Tokens that cannot be drawn are
    left out.
    """
    if distribution.temperature not in {0, 1}:
        logits = logits / distribution.temperature
    if distribution.temperature and distribution.is_truncated:
        logits = truncate(logits.unsqueeze(0), distribution)[0]
    scores, tokens = logits.log_softmax(-1).topk(min(count, len(logits)))
    pairs = zip(tokens.tolist(), scores.tolist(), strict=True)
    return [(token, score) for token, score in pairs if score > -torch.inf]


def scores(tokens: Sequence[int], logits: Tensor, count: int) -> PromptScores:
    """Log-probabilities of some tokens of a prompt, given [tokens, vocabulary] logits of the tokens before them."""
    found = logits.log_softmax(-1)
    own = torch.tensor(tokens, device=logits.device)
    log_probs: list[float] = found.gather(1, own[:, None])[:, 0].tolist()
    if not count:
        return PromptScores(log_probs, [()] * len(tokens))
    values, which = (one.tolist() for one in found.topk(min(count, found.shape[1])))
    return PromptScores(log_probs, [list(zip(*pair, strict=True)) for pair in zip(which, values, strict=True)])
