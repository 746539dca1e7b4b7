"""A conversation whose keys and values are kept between turns gives what requests without a conversation give."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from tests.tiny import tiny_model
from tests.tiny_families import tiny_config
from tests.unit.recipes import plan_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.weights.stream import WeightStream
from leaderless.environments.engine_scheduler import SharedEngineScheduler
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.planner.memory.attention_kinds import FULL, AttentionKind
from leaderless.rollout.engine import Completion, Request, SamplingParams
from leaderless.rollout.native import engine as native
from leaderless.rollout.native import kv_cache, later_parts
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.kv_cache import PromptPart, Segment, Slots
from leaderless.rollout.native.segment_attention import PrefillAttention

PARAMS = SamplingParams(SamplingConfig(temperature=1.2), max_tokens=6)
NUM_TURNS = 4


KINDS = (FULL, AttentionKind(window=8)), (AttentionKind(chunk=6), AttentionKind(window=20))
"""Kinds of attention of the layers of a model."""


def engine_of(
    max_sequences: int = 64, kinds: tuple[AttentionKind, ...] | None = None, path: str | None = None
) -> NativeEngine:
    config = ModelConfig(path=path or tiny_model())
    model, tokenizer = load_causal_lm(config, "policy").eval(), load_tokenizer(config, "policy")
    if kinds is not None:
        assert len(model.attention_kinds) == len(kinds)
        model.attention_kinds = kinds
    return NativeEngine(model, tokenizer, frozenset({0}), max_sequences, torch.device("cpu"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens that passes over prompts read."""
    counts: list[int] = []
    plan = PrefillAttention.__init__

    def watched(self: PrefillAttention, parts: list[PromptPart], device: torch.device) -> None:
        counts.append(sum(part.count for part in parts))
        plan(self, parts, device)

    monkeypatch.setattr(PrefillAttention, "__init__", watched)
    return counts


def bytes_of(engine: NativeEngine) -> int:
    stores = (engine._prompts, engine._responses)
    tensors = [t for store in stores for slots in store._sizes.values() for kv in slots._layers.values() for t in kv]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@dataclass
class Talk:
    """A conversation: an answer of the engine in each turn, and then tokens that a tool or a user adds."""

    number: int
    text: list[int]
    random: Random
    answers: list[Completion] = field(default_factory=list)


class Play:
    """Conversations next to other requests, in an order that a seed determines."""

    def __init__(self, engine: NativeEngine, seed: int, *, is_kept: bool) -> None:
        self.engine, self.is_kept = engine, is_kept
        self.may_diverge, self.may_abort, self.order = seed == 1, seed == 2, Random(seed)
        prompts = [[self.order.randrange(1, 60) for _ in range(length)] for length in (1, 5, 30)]
        self.talks = [Talk(n, list(prompts[n % 3]), Random(100 * seed + n)) for n in range(7)]
        self.running: dict[int, tuple[Talk | None, Request, list[Completion]]] = {}
        self.num_prompt_tokens = self.num_cached = 0

    def run(self) -> Play:
        idle, num_others = list(self.talks), 0
        while idle or self.running:
            for talk in self.order.sample(idle, self.order.randrange(len(idle) + 1)):
                idle.remove(talk)
                conversation = talk.number if self.is_kept else None
                self.submit(talk, Request(list(talk.text), [100 * talk.number + len(talk.answers)], (), conversation))
            if self.order.random() < 0.3 and num_others < 5:
                num_others += 1
                self.submit(None, Request(self.talks[2].text[:30], [10_000 + num_others, 20_000 + num_others]))
            if self.may_abort and self.running and self.order.random() < 0.2:
                self.engine.abort(self.order.choice(list(self.running)))
            idle += self.step()
        return self

    def submit(self, talk: Talk | None, request: Request) -> None:
        self.running[self.engine.submit(request, PARAMS)] = talk, request, request.begin()

    def step(self) -> list[Talk]:
        """Take the new tokens; return the conversations that continue."""
        idle: list[Talk] = []
        for delta in self.engine.step():
            talk, request, completions = self.running[delta.request]
            completion = completions[delta.sibling]
            self.num_prompt_tokens += len(request.prompt) * (not completion.tokens and bool(delta.tokens))
            self.num_cached += delta.cached_tokens
            completion.tokens += delta.tokens
            completion.log_probs += delta.log_probs
            completion.finish_reason = delta.finish_reason
            if all(one.finish_reason for one in completions):
                del self.running[delta.request]
                if talk is not None and self.does_continue(talk, completion):
                    idle.append(talk)
        return idle

    def does_continue(self, talk: Talk, completion: Completion) -> bool:
        """Add an answer; one that was aborted is asked for again."""
        if completion.finish_reason == "aborted":
            return True
        talk.answers.append(completion)
        length = talk.random.choice([0, 1, 2, 9, 40])
        talk.text += [*completion.tokens, *(talk.random.randrange(1, 60) for _ in range(length))]
        if self.may_diverge and talk.random.random() < 0.4:
            del talk.text[talk.random.randrange(1, len(talk.text)) :]
        if len(talk.answers) == NUM_TURNS:
            self.engine.forget(talk.number)
        return len(talk.answers) < NUM_TURNS


@cache
def expected_of(seed: int, kinds: tuple[AttentionKind, ...]) -> Play:
    return Play(engine_of(kinds=kinds), seed, is_kept=False).run()


@pytest.mark.parametrize(
    ("max_sequences", "kinds"), [*((most, (FULL, FULL)) for most in (2, 3, 5, 64)), *((5, kinds) for kinds in KINDS)]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_conversations_that_are_kept_say_the_same(
    monkeypatch: pytest.MonkeyPatch,
    reads: list[int],
    max_sequences: int,
    seed: int,
    kinds: tuple[AttentionKind, ...],
) -> None:
    """Windows are shorter than texts, and some texts are cut within what their layers have kept."""
    expected = expected_of(seed, kinds)
    if seed:
        monkeypatch.setattr(kv_cache, "SMALLEST_SLOT", 2)
    else:
        monkeypatch.setattr(native, "PREFILL_TOKENS", 24)
        monkeypatch.setattr(later_parts, "QUERY_BLOCK", 7)
        monkeypatch.setattr(later_parts, "KEY_BLOCK", 64)
    reads.clear()
    engine, add = engine_of(max_sequences, kinds), Slots.add

    def watched(self: Slots, length: int) -> Segment:
        segment = add(self, length)
        num_segments = sum(len(slots._segments) for slots in engine._responses._sizes.values())
        assert num_segments <= max_sequences + 1, "one that is being copied to another slot"
        return segment

    monkeypatch.setattr(Slots, "add", watched)
    play = Play(engine, seed, is_kept=True).run()
    for talk, other in zip(play.talks, expected.talks, strict=True):
        assert talk.text == other.text
        for answer, wanted in zip(talk.answers, other.answers, strict=True):
            assert answer.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)
    assert play.num_prompt_tokens - play.num_cached == sum(reads), "what is not known is read, and nothing else"
    assert bytes_of(engine) == 0, "all conversations are forgotten"


Answer = tuple[Completion, int]
"""An answer, and how many tokens of its prompt were known."""


def turn(engine: NativeEngine, prompt: list[int], conversation: int | None, sample_id: int = 0) -> Answer:
    (answer,) = turns(engine, [Request(prompt, [sample_id], conversation=conversation)])
    return answer


def turns(engine: NativeEngine, requests: list[Request]) -> list[Answer]:
    numbers = [engine.submit(request, PARAMS) for request in requests]
    completions, known = {number: Completion() for number in numbers}, dict.fromkeys(numbers, 0)
    while not all(completion.finish_reason for completion in completions.values()):
        for delta in engine.step():
            completions[delta.request].tokens += delta.tokens
            completions[delta.request].log_probs += delta.log_probs
            completions[delta.request].finish_reason = delta.finish_reason
            known[delta.request] += delta.cached_tokens
    return [(completions[number], known[number]) for number in numbers]


def windowed_model(folder: Path) -> str:
    """A model of which every second layer has a window."""
    config = tiny_config("gpt_oss", vocab_size=83, max_position_embeddings=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("has_windows", [False, True])
def test_the_plan_counts_the_memory_of_conversations_of_all_lengths(tmp_path: Path, has_windows: bool) -> None:
    path = windowed_model(tmp_path) if has_windows else tiny_model()
    plan = plan_of(
        "grpo",
        models={"policy": path},
        environment={"type": "tests.unit.environments.scripted:Count", "max_episode_tokens": 100},
        data={"train": {"path": "a"}, "max_prompt_tokens": 156},
        batch={"prompts_per_step": 2, "responses_per_prompt": 4},
        rollout={"max_sequences": 8},
    )
    assert plan.memory is not None
    planned = plan.memory.cpu.phases["policy generates"]["kv cache"]
    engine, peak, texts = engine_of(8, path=path), 0, [[1] * (28 * number + 30) for number in range(8)]
    for round_number in range(12):
        answers = turns(engine, [Request(text, [round_number], (), number) for number, text in enumerate(texts)])
        peak = max(peak, bytes_of(engine))
        for number, (answer, _) in enumerate(answers):
            texts[number] += [*answer.tokens, *[2] * 20]
            if len(texts[number]) + PARAMS.max_tokens > 256:
                texts[number] = [1] * 30
                engine.forget(number)
    assert 0.6 * planned < peak <= planned


def test_no_more_is_counted_as_known_than_a_conversation_has_said() -> None:
    async def play() -> SharedEngineScheduler:
        pump = SharedEngineScheduler(engine_of())
        running, prompt = asyncio.create_task(pump.run()), list(range(1, 31))
        first = await asyncio.gather(*(pump.ask(Request(prompt, [number], (), number), PARAMS) for number in range(4)))
        assert (pump.known_tokens, pump.cached_tokens) == (0, 0), "what siblings share is not a later turn's"
        for number, completion in enumerate(first):
            text = [*prompt, *completion.tokens, 7, 8]
            await pump.ask(Request(text, [10 + number], (), number), PARAMS, len(text) - 2)
        running.cancel()
        return pump

    pump = asyncio.run(play())
    assert pump.cached_tokens == pump.known_tokens - 4, "all but the last token that was sampled"


def test_a_turn_reads_what_it_adds(reads: list[int]) -> None:
    engine, text = engine_of(), list(range(1, 41))
    answer, known = turn(engine, text, 7)
    assert (known, reads) == (0, [40])
    for number in range(1, 21):
        text += [*answer.tokens, 5, 6, 7]
        answer, known = turn(engine, text, 7, number)
        assert known >= len(text) - 5, "the last token of the answer, the three new ones, and one of a full slot"
        assert reads[-1] == len(text) - known
    engine.forget(7)
    engine.forget(8)
    assert bytes_of(engine) == 0


def test_answers_to_a_shared_prompt_continue_in_segments_of_their_own(reads: list[int]) -> None:
    engine, prompt = engine_of(), list(range(1, 31))
    first = turns(engine, [Request(prompt, [number], conversation=number) for number in range(4)])
    assert [known for _, known in first] == [0, 30, 30, 30], "it is read once"
    texts = [[*prompt, *answer.tokens, 9] for answer, _ in first]
    second = turns(engine, [Request(text, [10 + n], conversation=n) for n, text in enumerate(texts)])
    assert [known for _, known in second] == [len(text) - 2 for text in texts]
    assert reads == [30, 8], "all in one pass"
    fresh = turns(engine_of(), [Request(text, [10 + n]) for n, text in enumerate(texts)])
    for (answer, _), (expected, _) in zip(second, fresh, strict=True):
        assert answer.tokens == expected.tokens
        assert answer.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def test_the_conversation_that_has_been_kept_for_longest_is_dropped() -> None:
    engine, prompts = engine_of(max_sequences=3), [[number + 1] * 9 for number in range(4)]
    for number in (0, 1, 2, 0):
        turn(engine, prompts[number], number)
    turn(engine, prompts[3], None)
    known = [turn(engine, prompts[number], number)[1] for number in (0, 2, 1)]
    assert known == [8, 8, 0]


def test_turns_that_wait_are_answered_before_their_places_are_needed() -> None:
    engine, text = engine_of(max_sequences=3), list(range(1, 21))
    turns(engine, [Request(text, [n], conversation=n) for n in range(2)])
    others = [Request([7], [n]) for n in range(4)]
    results = turns(engine, [*others, *(Request([*text, n], [n], conversation=n) for n in range(2))])
    assert [known for _, known in results] == [0, 1, 1, 1, 20, 20]


def test_the_first_of_two_turns_at_once_takes_what_is_kept() -> None:
    engine, text = engine_of(), list(range(1, 21))
    turn(engine, text, 3)
    texts = [[*text, 1, 2], [*text, 1, 2], [*text, 3]]
    results = turns(engine, [Request(text, [n], conversation=3) for n, text in enumerate(texts)])
    assert [known for _, known in results] == [20, 0, 0]
    expected = turns(engine_of(), [Request(text, [n]) for n, text in enumerate(texts)])
    assert [answer.tokens for answer, _ in results] == [answer.tokens for answer, _ in expected]
    engine.forget(3)
    assert bytes_of(engine) == 0


@pytest.mark.parametrize("num_steps", [1, 100])
def test_keys_and_values_of_other_weights_are_not_kept(num_steps: int) -> None:
    engine, text = engine_of(), list(range(1, 21))
    weights = {name: 1.1 * parameter.detach() for name, parameter in engine.model.model.named_parameters()}
    engine.submit(Request(text, [0], conversation=3), PARAMS)
    for _ in range(num_steps):
        engine.step()
    engine.load_weights(WeightStream(iter(weights.items()), 1))
    while engine.step():
        pass
    assert bytes_of(engine) == 0
    assert turn(engine, text, 3)[1] == 0


def test_an_engine_that_sleeps_or_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, text = engine_of(), list(range(1, 21))
    turn(engine, text, 3)
    engine.sleep(keep_weights=True)
    assert bytes_of(engine) == 0
    assert turn(engine, text, 3)[1] == 0
    with monkeypatch.context() as broken:
        broken.setattr(engine, "_read_parts", None)
        with pytest.raises(TypeError):
            turn(engine, [*text, 4], 3)
    assert bytes_of(engine) == 0
    assert turn(engine, text, 3)[1] == 0


def test_a_turn_of_a_conversation_has_one_response() -> None:
    with pytest.raises(ValueError, match="a turn of a conversation has one response, but 2 are asked for"):
        Request([1], [1, 2], conversation=0)


def test_layers_with_windows_keep_the_last_tokens_alone() -> None:
    """Memory does not grow with a text, and a turn that goes back further than what is kept is read again."""
    engine, start = engine_of(kinds=(FULL, AttentionKind(window=20))), [*range(1, 60)] * 4
    (answer, _), *_ = turns(engine, [Request(start, [0], (), 0)])
    (slots,) = engine._responses._sizes.values()
    assert [slots.layer(layer)[0].shape[2] for layer in range(2)] == [256, kv_cache.SMALLEST_SLOT]
    text = [*start, *answer.tokens]
    length = len(text) - 1  # the last token has not been read
    nearest = length - kv_cache.SMALLEST_SLOT + 20 - 1
    for place, expected in ((nearest, nearest), (nearest - 1, 0)):
        changed = [*text]
        changed[place] = 61
        assert engine._kept.num_known(0, tuple(changed)) == expected
