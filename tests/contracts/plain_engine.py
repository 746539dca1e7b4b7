"""A rollout engine as a user might write one: `transformers` without a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from leaderless import RolloutSetup, rollout_engine
from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.engine import Completion, Delta, FinishReason, Request, SamplingParams, has_stopped
from leaderless.rollout.native.sampling import sample_tokens, uniform_noise


class PlainEngine:
    """See `RolloutEngine`. It keeps its weights while it sleeps."""

    def __init__(self, setup: RolloutSetup) -> None:
        self.setup, self.policy_version = setup, None
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(setup.model.path))
        self.open: dict[tuple[int, int], tuple[Request, SamplingParams, Completion]] = {}
        self.deltas: list[Delta] = []
        self.num_requests = 0

    def wake(self, reload: Callable[[], None]) -> None:
        """It needs nothing."""

    @torch.no_grad()
    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:  # noqa: ARG002
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            own.pop(name).copy_(tensor)
        if own:
            raise RuntimeError(f"weights are missing, such as {min(own)}")
        self.policy_version = weights.policy_version

    def sleep(self, *, keep_weights: bool) -> None:  # noqa: ARG002
        self.close()

    def close(self) -> None:
        self.open.clear()
        self.deltas.clear()

    def submit(self, request: Request, params: SamplingParams) -> int:
        self.num_requests += 1
        for sibling, completion in enumerate(request.begin()):
            if len(completion.tokens) >= params.max_tokens:
                self.deltas.append(Delta(self.num_requests, sibling, (), (), "length"))
            else:
                self.open[self.num_requests, sibling] = request, params, completion
        return self.num_requests

    def forget(self, conversation: int) -> None:
        """See `RolloutEngine`."""

    def abort(self, request: int) -> None:
        for key in [key for key in self.open if key[0] == request]:
            del self.open[key]
            self.deltas.append(Delta(*key, (), (), "aborted"))

    @torch.no_grad()
    def step(self) -> list[Delta]:
        keys = list(self.open)[: self.setup.rollout.max_sequences]
        if keys:
            texts = [[*self.open[key][0].prompt, *self.open[key][2].tokens] for key in keys]
            longest = max(map(len, texts))  # what comes after the end of a text changes nothing before it
            logits = self.logits(torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts]))
            for row, (key, text) in enumerate(zip(keys, texts, strict=True)):
                self.draw(*key, logits[row, len(text) - 1][None])
        deltas, self.deltas = self.deltas, []
        return deltas

    def logits(self, texts: Tensor) -> Tensor:
        """[n, longest, vocabulary], from [n, longest] tokens."""
        return self.model(texts).logits

    def draw(self, number: int, sibling: int, logits: Tensor) -> None:
        request, params, completion = self.open[number, sibling]
        sample_id, place = torch.tensor([request.sample_ids[sibling]]), torch.tensor([len(completion.tokens)])
        token, log_prob = sample_tokens(logits, uniform_noise(params.seed, sample_id, place), params.distribution)
        completion.tokens.append(int(token))
        reason: FinishReason | None = None
        if int(token) in self.setup.end_tokens or has_stopped(completion.tokens, params.stop, self.setup.tokenizer):
            reason = "stop"
        elif len(completion.tokens) >= params.max_tokens:
            reason = "length"
        if reason:
            del self.open[number, sibling]
        self.deltas.append(Delta(number, sibling, (int(token),), (float(log_prob),), reason, self.policy_version))


@rollout_engine(updates=["recompute"])
def make(setup: RolloutSetup) -> PlainEngine:
    """Make the engine of a rank."""
    return PlainEngine(setup)
