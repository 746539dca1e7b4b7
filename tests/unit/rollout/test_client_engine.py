"""What clients of a served model may ask, compared with a pass of the model over the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.models.loading.tokenizer import end_tokens, load_tokenizer
from leaderless.rollout.engine import Completion, Delta, Request, SamplingParams
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.native import client_engine
from leaderless.rollout.native.client_engine import ClientEngine
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.paged_engine import PagedEngine
from leaderless.rollout.shaping import Shaping, refuse_shaping

PROMPT = list(range(3, 17))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "0123456789+=ab :\nu", hidden_size=32)


def engine_of(folder: Path, kind: type[NativeEngine] = ClientEngine, max_sequences: int = 8) -> NativeEngine:
    config = ModelConfig(path=str(folder))
    tokenizer = load_tokenizer(config, "policy")
    model = load_causal_lm(config, "policy")
    return kind(model, tokenizer, end_tokens(config, tokenizer), max_sequences, torch.device("cpu"))


def log_probs_of(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary] log-probabilities of what follows each token, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)


def run(engine: NativeEngine, asked: Sequence[tuple[Request, SamplingParams]]) -> dict[int, list[Delta]]:
    """All deltas of each request, in their order."""
    numbers = [engine.submit(*one) for one in asked]
    deltas: dict[int, list[Delta]] = {number: [] for number in numbers}
    num_left = sum(len(request.sample_ids) for request, _ in asked)
    while num_left:
        for delta in engine.step():
            deltas[delta.request].append(delta)
            num_left -= delta.finish_reason is not None
    return deltas


def params(shaping: Shaping | None = None, max_tokens: int = 12, **sampling: float) -> SamplingParams:
    return SamplingParams(SamplingConfig(**sampling), max_tokens, shaping=shaping)  # type: ignore[arg-type]


def completion_of(deltas: Sequence[Delta]) -> Completion:
    completion = Completion()
    for delta in deltas:
        completion.add(delta)
    return completion


def siblings_of(deltas: Sequence[Delta]) -> list[Completion]:
    count = 1 + max(delta.sibling for delta in deltas)
    return [completion_of([delta for delta in deltas if delta.sibling == sibling]) for sibling in range(count)]


@pytest.mark.parametrize("at_once", [3, 256])
def test_log_probs_of_a_prompt_are_those_of_a_pass_over_it(
    folder: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_engine, "SCORED_AT_ONCE", at_once)
    expected = log_probs_of(folder, PROMPT)
    asked = [
        (Request(PROMPT, [1, 2]), params(Shaping(scores_prompt=True, num_likely=3))),
        (Request(PROMPT[:5], [3]), params(Shaping(scores_prompt=True), max_tokens=0)),
        (Request(PROMPT[:1], [4]), params(Shaping(scores_prompt=True), max_tokens=1)),
    ]
    first, second, third = run(engine_of(folder), asked).values()
    for deltas in (first, second, third):
        assert [delta.prompt is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    scores = first[0].prompt
    assert scores is not None
    own = [float(expected[place, token]) for place, token in enumerate(PROMPT[1:])]
    assert scores.log_probs == pytest.approx(own, abs=1e-4)
    for place, ranked in enumerate(scores.likely):
        values, tokens = expected[place].topk(3)
        assert [token for token, _ in ranked] == tokens.tolist()
        assert [score for _, score in ranked] == pytest.approx(values.tolist(), abs=1e-4)
    assert second[0].prompt is not None
    assert second[0].prompt.log_probs == pytest.approx(own[:4], abs=1e-4)
    assert [delta.finish_reason for delta in second] == [None, "length"]
    assert third[0].prompt is not None
    assert third[0].prompt.log_probs == []


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.5}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 4}, {"top_p": 0.5}]
)
def test_likely_tokens_are_those_of_the_distribution_that_is_drawn_from(
    folder: Path, sampling: dict[str, float]
) -> None:
    shaping = Shaping(num_likely=6)
    (deltas,) = run(engine_of(folder), [(Request(PROMPT, [1]), params(shaping, **sampling))]).values()
    completion = completion_of(deltas)
    likely = [ranked for delta in deltas for ranked in delta.likely]
    expected = log_probs_of(folder, [*PROMPT, *completion.tokens])[len(PROMPT) - 1 :]
    temperature = sampling.get("temperature", 1.0) or 1.0
    most = 4 if "top_k" in sampling else 6
    for row, ranked, token, log_prob in zip(expected, likely, completion.tokens, completion.log_probs, strict=False):
        scaled = (row / temperature).log_softmax(-1)
        if "top_k" in sampling:
            scaled = scaled.masked_fill(scaled < scaled.topk(4).values[-1], -torch.inf).log_softmax(-1)
        if "top_p" in sampling:
            order = scaled.argsort(descending=True)
            before = scaled[order].exp().cumsum(0) - scaled[order].exp()
            scaled = scaled.index_fill(0, order[before >= 0.5], -torch.inf).log_softmax(-1)
        values, tokens = scaled.topk(6)
        is_there = values > -torch.inf
        assert [one for one, _ in ranked] == tokens[is_there].tolist()
        assert len(ranked) <= most
        assert [score for _, score in ranked] == pytest.approx(values[is_there].tolist(), abs=1e-3)
        assert dict(ranked).get(token, log_prob) == pytest.approx(log_prob, abs=1e-4)
    assert len(likely) == len(completion.tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_and_biases_change_the_logits_as_the_api_says(folder: Path, temperature: float) -> None:
    shaping = Shaping(1.5, 0.25, ((5, 2.0), (6, -100.0)))
    shaped, plain = params(shaping, 20, temperature=temperature), params(None, 20, temperature=temperature)
    engine = engine_of(folder)
    ids = range(1, 7)
    asked = [(Request(PROMPT, ids), plain), (Request(PROMPT, ids), shaped), (Request(PROMPT[:9], [2]), plain)]
    together = [said for deltas in run(engine, asked).values() for said in siblings_of(deltas)]
    alone = [said for one in asked for deltas in run(engine_of(folder), [one]).values() for said in siblings_of(deltas)]
    assert [one.tokens for one in together] == [one.tokens for one in alone], "others are not changed"
    assert [one.tokens for one in together[:6]] != [one.tokens for one in together[6:12]]
    for completion in together[6:12]:
        expected = log_probs_of(folder, [*PROMPT, *completion.tokens])[len(PROMPT) - 1 :]
        for place, token in enumerate(completion.tokens):
            logits = expected[place].clone()
            logits[5] += 2.0
            logits[6] -= 100.0
            said = completion.tokens[:place]
            for one in set(said):
                logits[one] -= 1.5 * said.count(one) + 0.25
            if temperature:
                logits = logits / temperature
            else:
                assert token == int(logits.argmax())
            assert completion.log_probs[place] == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-3)


class OneOf:
    """A grammar of some sequences of tokens, which counts its states."""

    def __init__(self, *texts: list[int], end: int, width: int) -> None:
        self.texts, self.end, self.width = texts, end, width

    def begin(self) -> OneOfState:
        return OneOfState(self)


class OneOfState:
    def __init__(self, grammar: OneOf) -> None:
        self.grammar = grammar
        self.said: list[int] = []

    def allowed(self) -> torch.Tensor:
        mask = torch.zeros(self.grammar.width, dtype=torch.bool)
        for text in self.grammar.texts:
            if text[: len(self.said)] == self.said:
                mask[text[len(self.said)] if len(text) > len(self.said) else self.grammar.end] = True
        return mask

    def take(self, token: int) -> None:
        self.said.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_a_grammar_is_followed_by_its_responses_alone(folder: Path, temperature: float) -> None:
    engine = engine_of(folder)
    (end,) = engine.end_tokens
    texts = [[4, 5, 6], [4, 7], [8]]
    width = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    shaping = Shaping(grammar=OneOf(*texts, end=end, width=width))
    asked = [
        (Request(PROMPT, range(20)), params(shaping, temperature=temperature)),
        (Request(PROMPT, [7]), params(temperature=temperature)),
    ]
    forced, free = run(engine, asked).values()
    said = {sibling: [] for sibling in range(20)}  # type: ignore[var-annotated]
    for delta in forced:
        said[delta.sibling] += delta.tokens
        assert delta.finish_reason in {None, "stop"}
    assert {tuple(tokens) for tokens in said.values()} <= {(*text, end) for text in texts}
    if temperature == 3.0:
        assert len({tuple(tokens) for tokens in said.values()}) == 3
    (expected,) = run(engine_of(folder, NativeEngine), [asked[1]]).values()
    assert completion_of(free).tokens == completion_of(expected).tokens


def test_responses_without_wishes_are_those_of_the_native_engine_bit_for_bit(folder: Path) -> None:
    asked = [(Request(PROMPT, range(6)), params()), (Request(PROMPT[:3], [9]), params(temperature=0.5, top_k=5))]
    own, native = (run(engine_of(folder, kind, 4), asked) for kind in (ClientEngine, NativeEngine))
    assert own == native


def test_a_request_that_is_aborted_is_not_scored(folder: Path) -> None:
    engine = engine_of(folder)
    number = engine.submit(Request(PROMPT, [1]), params(Shaping(scores_prompt=True)))
    engine.abort(number)
    (delta,) = engine.step()
    assert (delta.finish_reason, delta.prompt) == ("aborted", None)


@pytest.mark.parametrize("kind", [PagedEngine, ExternalEngine])
def test_other_engines_refuse_what_they_cannot_do(kind: type[PagedEngine | ExternalEngine]) -> None:
    refuse_shaping(None, "vLLM")
    with pytest.raises(ValueError, match=r"returns no log-probabilities of prompts .* serve with --full"):
        kind.submit(Mock(_name="vLLM"), Request(PROMPT, [1]), params(Shaping(num_likely=1)))
