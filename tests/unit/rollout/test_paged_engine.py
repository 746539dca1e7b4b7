"""The engine with pages and a host that reads tokens a pass later gives what the engine with slots gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.fake_cuda import FakeCuda
from tests.paged import CASES, errors
from tests.tiny import tiny_model
from tests.unit.rollout.test_native_engine import PROMPTS, assert_same, requests, sample, tiny_engine

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.attention.packed import PackedAttention
from leaderless.models.causal_lm import CausalLM, load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.planner.memory.limits import bucket_of
from leaderless.rollout.engine import Completion, Request, RolloutEngine, SamplingParams, generate
from leaderless.rollout.native import paged_check, paged_plan
from leaderless.rollout.native.cuda_graph import EAGER_PASSES, BucketGraphs
from leaderless.rollout.native.decode_state import Running
from leaderless.rollout.native.paged_attention import attend_with_torch
from leaderless.rollout.native.paged_check import draw_error, heads_of, largest_error, paged_attention, token_drawing
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions
from leaderless.rollout.native.paged_plan import Ints
from leaderless.rollout.native.pages import OutOfPagesError, PagePool
from leaderless.rollout.native.sampling import sample_tokens, uniform_noise, write_drawn
from leaderless.rollout.wrapped_engine import ALONE

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def tiny_lm() -> CausalLM:
    return load_causal_lm(ModelConfig(path=tiny_model()), "policy").eval()


def paged_engine(
    max_sequences: int = 64,
    pool_tokens: int = 4096,
    *,
    ends: frozenset[int] = frozenset({0}),
    keeps: bool = False,
    longest: int = 32,
) -> PagedEngine:
    tokenizer = load_tokenizer(ModelConfig(path=tiny_model()), "policy")
    options = PagedOptions(attend_with_torch, pool_tokens, longest, keeps_memory=keeps, page_tokens=8)
    return PagedEngine(tiny_lm(), tokenizer, ends, max_sequences, CPU, options)


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens of responses when they gave up their pages."""
    found = list[int]()
    preempt = PagedEngine._preempt

    def watched(self: PagedEngine) -> None:
        found.append(len(next(reversed(self._active.values())).completion.tokens))
        preempt(self)

    monkeypatch.setattr(PagedEngine, "_preempt", watched)
    return found


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_over_pages_is_that_of_a_loop_in_float64() -> None:
    for dtype, limit in ((torch.float64, 1e-5), (torch.float32, 1e-5), (torch.bfloat16, 0.04)):
        found = errors(attend_with_torch, CPU, dtype)
        assert found.keys() == CASES.keys()
        assert max(found.values()) < limit, found


def interpreted(*module: str) -> str:
    """What a module prints that runs kernels in Triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("Triton, which interprets its kernels on a CPU, is not installed")
    # It has to know before it is imported that it is to interpret.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *module]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted" in answer.stderr:
        pytest.skip("the interpreter of this Triton needs an older NumPy")
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_kernels_give_what_a_loop_in_float64_gives() -> None:
    found = json.loads(interpreted("tests.paged", "kernels"))["kernels"]
    assert found["float32"].keys() == CASES.keys()
    assert max(found["float32"].values()) < 1e-5, found
    assert max(found["bfloat16"].values()) < 0.06, found


def test_kernels_draw_the_tokens_of_a_loop_in_float64() -> None:
    num_draws, num_near = map(int, interpreted("tests.drawn").split())
    assert num_near < num_draws / 4, "most tokens are the same whatever rounding does"


@pytest.mark.thorough
def test_kernels_are_launched_with_tensor_cores_and_within_the_memory_of_small_gpus() -> None:
    """Triton takes the arguments as on a GPU, and compiles, for GPUs that are not there."""
    if find_spec("triton") is None:
        pytest.skip("Triton, which compiles its kernels, is not installed")
    command = [sys.executable, "-m", "tests.paged", "compile"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert len(found) == 2 * (6 * 4 + 3 * 2 * 2)
    for name, kernel in found.items():
        assert kernel["shared"] <= 99 << 10, name
        assert (kernel["products"] > 0) == (name.startswith("attend") and "bfloat16" in name), name
        assert kernel["stack"] <= (512 if name.startswith("attend") else 0), name
        assert kernel["registers"] <= (255 if name.startswith("attend") else 128), name


def test_items_cover_each_token_of_each_row_once() -> None:
    random = Random(0)
    for _ in range(12):
        page_size, count = random.choice([8, 16, 64]), random.choice([1, 3, 17, 100])
        pages = PagePool(60_000, page_size)
        groups = [(random.choice([1, 30, 2000]), random.choice([1, 8, 20])) for _ in range(4)]
        shared = [one for tokens, size in groups for one in [pages.add(tokens)] * size]
        prompts = shared[:count]
        owns = [pages.add(min(3000, int(random.lognormvariate(4, 1.5))), 1) for _ in range(count)]
        arrangement = paged_plan.Arrangement.of(owns, [*prompts, *[None] * (count - len(prompts))])
        bucket = bucket_of(count)
        lengths = torch.tensor([segment.length + 1 for segment in owns]).numpy()
        size = paged_plan.num_bytes(bucket, arrangement.num_listed(lengths, page_size))
        host = paged_plan.fields_of(torch.randint(0, 255, (size,), dtype=torch.uint8), bucket)
        arrangement.write(host, lengths, pages)
        found = [dict[int, int]() for _ in range(count)]
        for kind, items in enumerate((host.own, host.shared)):
            for table, tokens, first_row, rows, first in items[items[:, 1] > 0].tolist():
                members = [first_row] if kind == 0 else host.rows[first_row : first_row + rows].tolist()
                assert len(members) == rows <= paged_plan.TILE_ROWS
                listed = host.pages[table : table - (-tokens // page_size)].tolist()
                for member, row in enumerate(members):
                    begin, parts, distance = host.runs[row, kind].tolist()
                    assert first + member in range(begin, begin + parts * distance, distance)
                    assert first + member < paged_plan.num_results(bucket)
                    for place in range(tokens):
                        slot = listed[place // page_size] * page_size + place % page_size
                        found[row][slot] = found[row].get(slot, 0) + 1
        for row, (own, length) in enumerate(zip(owns, lengths.tolist(), strict=True)):
            slots = pages.places(own, 0, length).tolist()
            slots += pages.places(prompts[row], 0, prompts[row].length).tolist() if row < len(prompts) else []
            assert found[row] == dict.fromkeys(slots, 1)
        for segment in {*shared, *owns}:
            pages.remove(segment)
        assert pages.num_free == pages.num_pages


def test_pages_are_freed_and_never_shared_by_accident() -> None:
    pages, random = PagePool(50, 4), Random(0)
    held = {}
    for number in range(500):
        if held and random.random() < 0.4:
            pages.remove(held.pop(random.choice(list(held))))
        elif random.random() < 0.5 and held:
            segment = held[random.choice(list(held))]
            tokens = segment.length + random.randrange(9)
            try:
                pages.extend(segment, tokens)
            except OutOfPagesError:
                assert -(-tokens // 4) > -(-segment.length // 4)
            else:
                segment.length = max(segment.length, tokens)
        elif pages.num_free >= 5:
            held[number] = pages.add(random.randrange(16), 1)
        places = [int(place) for segment in held.values() for place in pages.places(segment, 0, segment.length)]
        assert len({*places}) == len(places)
        assert all(4 <= place < 51 * 4 for place in places), "the first page is nobody's"


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_sequences", [2, 64])
def test_pages_change_no_token(max_sequences: int) -> None:
    expected = sample(tiny_engine(max_sequences), 40)
    assert_same(sample(paged_engine(max_sequences), 40), expected)


def test_a_response_that_gives_up_its_pages_gets_the_same_tokens(
    preempted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, read = sample(tiny_engine(), 60), list[int]()
    engine, add = paged_engine(pool_tokens=240), Running.add

    def counted(self: Running, *drawn: Any) -> Ints:
        read.append(len(drawn[0]))
        return add(self, *drawn)

    monkeypatch.setattr(Running, "add", counted)
    assert_same(sample(engine, 60), expected)
    assert sum(read) == sum(len(one.tokens) for one in expected), "none is drawn twice"
    assert len(preempted) > 1
    assert max(preempted) > 8
    assert engine._pages.num_free == engine._pages.num_pages
    assert engine._running.num_free == 64


def test_a_response_that_is_back_in_its_row_at_once_has_other_pages() -> None:
    request, params = Request(PROMPTS[1], [5]), SamplingParams(SamplingConfig(temperature=1.2), 30)
    engine, answer = paged_engine(ends=frozenset()), request.begin()[0]
    engine.submit(request, params)
    while answer.finish_reason is None:
        for delta in engine.step():
            answer.add(delta)
        if len(answer.tokens) == 11:
            engine._collect()
            engine._preempt()
            engine._pages.add(1)  # takes the page that was freed last
    expected = tiny_engine()
    expected.end_tokens = frozenset()
    assert_same([answer], generate(expected, [request], params)[0])


def test_each_request_is_drawn_in_its_own_way() -> None:
    ways = [
        SamplingConfig(),
        SamplingConfig(temperature=0),
        SamplingConfig(temperature=0.7, top_p=0.8),
        SamplingConfig(),
    ]

    def answers(engine: RolloutEngine) -> list[Completion]:
        numbers = {}
        for seed, (request, way) in enumerate(zip(requests(), ways, strict=False)):
            numbers[engine.submit(request, SamplingParams(way, 15, (), seed // 2))] = request.begin()
        while deltas := engine.step():
            for delta in deltas:
                numbers[delta.request][delta.sibling].add(delta)
        return [one for group in numbers.values() for one in group]

    assert_same(answers(paged_engine()), answers(tiny_engine()))


def test_tokens_come_together_where_nobody_waits_for_them() -> None:
    for at_once in (1, 5, 16, 99):
        engine, most = paged_engine(ends=frozenset()), min(at_once, 16)
        params = SamplingParams(SamplingConfig(temperature=1.2), 37, (), tokens_at_once=at_once)
        answers = {engine.submit(request, params): request.begin() for request in requests()}
        counts = list[int]()
        while deltas := engine.step():
            counts += [len(delta.tokens) for delta in deltas]
            for delta in deltas:
                answers[delta.request][delta.sibling].add(delta)
        assert max(counts) == most
        assert len(counts) == 11 * -(-37 // most)
        expected = tiny_engine()
        expected.end_tokens = frozenset()
        assert_same([one for group in answers.values() for one in group], sample(expected, 37))


def test_a_response_with_a_stop_text_gets_no_token_behind_it() -> None:
    params = SamplingParams(SamplingConfig(temperature=1.2), 40, ("1",), tokens_at_once=16)
    found, expected = (generate(engine, requests(), params) for engine in (paged_engine(), tiny_engine()))
    for group, others in zip(found, expected, strict=True):
        assert_same(group, others)
        assert [one.finish_reason for one in group] == [one.finish_reason for one in others]
    assert sum(one.finish_reason == "stop" for group in found for one in group) > 5


def test_tokens_that_were_not_reported_are_not_lost() -> None:
    """Not by an abort, and not by weights: those that earlier ones have drawn are reported with their version."""
    engine, weights = paged_engine(ends=frozenset()), dict(tiny_lm().model.named_parameters())
    params = SamplingParams(SamplingConfig(), 40, tokens_at_once=16)
    answers = {engine.submit(Request(PROMPTS[n], [n]), params): Completion() for n in range(2)}
    engine.submit(Request(PROMPTS[2], [2]), replace(params, max_tokens=5))

    def step() -> None:
        for delta in engine.step():
            if delta.request in answers:
                answers[delta.request].add(delta)

    first, second = answers.values()
    step()
    assert not first.tokens
    engine.abort(1)
    engine.load_weights(WeightStream(((name, tensor.detach()) for name, tensor in weights.items()), 7))
    step()
    assert (len(first.tokens), first.finish_reason) == (5, "aborted")
    while second.finish_reason is None:
        step()
    assert second.policy_versions == [0] * 6 + [7] * 34


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 20))])
def test_whatever_happens_tokens_and_versions_are_right(preempted: list[int], seed: int, at_once: int) -> None:
    """Requests come and go, pages run out and weights change; each token is the one its weights draw."""
    random, model = Random(seed), tiny_lm()
    engine = paged_engine(5, 200)
    weights, version = dict(model.model.named_parameters()), 0
    versions = [{name: tensor.detach().clone() for name, tensor in weights.items()}]
    asked, found = list[Request](), dict[int, list[Completion]]()
    params = SamplingParams(SamplingConfig(temperature=1.2), 40, (), 3, at_once)
    while len(asked) < 9 or not all(one.finish_reason for group in found.values() for one in group):
        match random.choice(["submit", "update", "abort", *["step"] * 12]):
            case "submit" if len(asked) < 9:
                ids = [100 * len(asked) + i for i in range(random.choice([1, 2, 4]))]
                asked.append(Request(random.choice(PROMPTS), ids))
                found[engine.submit(asked[-1], params)] = asked[-1].begin()
            case "update" if version < 4:
                version += 1
                generator = torch.Generator().manual_seed(version)
                news = {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in versions[-1].items()}
                versions.append(news)
                engine.load_weights(WeightStream(iter(news.items()), version), keep_cache=False)
            case "abort" if random.random() < 0.3 and found:
                engine.abort(random.choice(list(found)))
            case _:
                for delta in engine.step():
                    found[delta.request][delta.sibling].add(delta)
    assert engine.step() == []
    assert engine._pages.num_free == engine._pages.num_pages
    models = [tiny_lm() for _ in versions]
    for one, weights_then in zip(models, versions, strict=True):
        one.model.load_state_dict(weights_then, strict=False)
    for request, group in zip(asked, found.values(), strict=True):
        for sample_id, answer in zip(request.sample_ids, group, strict=True):
            assert answer.policy_versions == sorted(answer.policy_versions)
            for mine in {*answer.policy_versions}:
                tokens, scores = drawn_by(models[mine], request, answer, sample_id)
                for place, (token, score) in enumerate(zip(answer.tokens, answer.log_probs, strict=True)):
                    if answer.policy_versions[place] == mine:
                        assert token == tokens[place]
                        assert score == pytest.approx(scores[place], abs=2e-4)
    assert preempted or seed, "pages ran out"
    versions_seen = {version for group in found.values() for one in group for version in one.policy_versions}
    assert len(versions_seen) > (2 if at_once == 1 else 1) or seed


@torch.no_grad()
def drawn_by(model: CausalLM, request: Request, answer: Completion, sample_id: int) -> tuple[list[int], list[float]]:
    """Tokens that a model draws behind each part of an answer, with their log-probabilities."""
    text, count = torch.tensor([*request.prompt, *answer.tokens]), len(answer.tokens)
    places = torch.arange(count)
    logits = model(text, torch.arange(len(text)), PackedAttention([len(text)], CPU), len(request.prompt) - 1 + places)
    noise = uniform_noise(3, torch.full((count,), sample_id), places)
    tokens, scores = sample_tokens(logits, noise, SamplingConfig(temperature=1.2))
    return tokens.tolist(), scores.tolist()


# --- what a pass costs ------------------------------------------------------------------------------------------------


def test_few_kinds_of_passes_do_for_all_lengths() -> None:
    engine, random = paged_engine(512, 300_000, ends=frozenset()), Random(0)
    lengths = [min(60, max(1, int(random.lognormvariate(2, 0.8)))) for _ in range(512)]
    for number, length in enumerate(lengths):
        engine.submit(Request([1 + number // 8, 2, 3], [number]), SamplingParams(SamplingConfig(), length))
    left, longest = 512, 0
    while left:
        deltas = engine.step()
        left -= sum(delta.finish_reason is not None for delta in deltas)
        longest = max(longest, len(deltas))
    assert longest == 512
    assert len(engine._passes.seen) <= 20
    assert {rows for rows, _ in engine._passes.seen} <= {bucket_of(n) for n in range(1, 513)}
    assert len({bucket_of(n) for n in range(1, 513)}) == 14
    assert bucket_of(1) == 2, "the compiler has kernels of their own for a single row"
    assert all(n <= bucket_of(n) <= (1.5 if n >= 16 else 2) * n for n in range(1, 2000))


def test_a_pass_is_started_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, order = paged_engine(), list[str]()
    launch, add = engine._launch, engine._running.add
    monkeypatch.setattr(engine, "_launch", lambda: (order.append("start"), launch())[1])
    monkeypatch.setattr(engine._running, "add", lambda *args: (order.append("read"), add(*args))[1])
    engine.submit(Request([3, 4, 5], [1]), SamplingParams(SamplingConfig(), 4))
    tokens = 0
    while deltas := engine.step():
        tokens += len(deltas)
    assert tokens == 4
    assert "".join(one[0] for one in order) == "ssrsrsrsrs"[: len(order)], "each token is read behind a start"
    assert len(engine._passes.seen) == 1
    assert sum(engine._passes.seen.values()) == 3, "what is known to be the last token starts no pass"


@pytest.mark.parametrize("keeps", [True, False])
def test_cached_memory_is_given_back_before_the_pool_is_allocated(
    monkeypatch: pytest.MonkeyPatch, *, keeps: bool
) -> None:
    engine, released = paged_engine(keeps=keeps), list[bool]()
    monkeypatch.setattr(
        "leaderless.rollout.native.paged_engine.release_memory", lambda _: released.append(engine._pages.is_allocated)
    )
    for _ in range(2):
        engine.load_weights(WeightStream(iter(tiny_lm().model.named_parameters()), 1))
        engine.wake(lambda: None)
        sample(engine, 4)
        engine.sleep(keep_weights=False)
    assert released == ([False] if keeps else [False, False]), "a pool that stays needs no more memory"


def test_weights_and_passes_stay_where_they_are() -> None:
    engine, weights = paged_engine(keeps=True), dict(tiny_lm().model.named_parameters())
    before = sample(tiny_engine(), 12)

    def load(factor: float) -> dict[str, int]:
        news = {name: tensor.detach() * factor for name, tensor in weights.items()}
        engine.load_weights(WeightStream(iter(news.items()), 1))
        return {name: parameter.data_ptr() for name, parameter in engine._parameters.items()}

    places = load(1.0)
    assert_same(sample(engine, 12), before)
    seen, cached = dict(engine._passes.seen), engine._pages.layer(0)[0].data_ptr()
    engine.sleep(keep_weights=False)
    assert engine.policy_version is None
    assert load(0.5) == places
    sample(engine, 12)
    assert load(1.0) == places
    assert engine._passes.seen.keys() >= seen.keys()
    assert_same(sample(engine, 12), before)
    assert engine._pages.layer(0)[0].data_ptr() == cached
    engine.close()
    assert engine._pages._layers == {}
    assert not any(parameter.numel() for parameter in engine._parameters.values())


def test_memory_is_released_where_it_is_not_to_be_kept() -> None:
    engine, expected = paged_engine(), sample(tiny_engine(), 12)
    weights = {name: parameter.detach().clone() for name, parameter in engine._parameters.items()}
    assert_same(sample(engine, 12), expected)
    engine.sleep(keep_weights=False)
    assert engine._pages._layers == {}
    assert engine._passes.seen == {}
    engine.load_weights(WeightStream(iter(weights.items()), 1))
    assert engine._parameters["model.norm.weight"].data_ptr() == weights["model.norm.weight"].data_ptr(), "no copy"
    assert_same(sample(engine, 12), expected)


def test_a_sequence_that_no_pool_holds_is_refused() -> None:
    engine = paged_engine(pool_tokens=40)
    engine.submit(Request([5] * 20, [1]), SamplingParams(SamplingConfig(), 60))
    with pytest.raises(RuntimeError, match=r"a sequence of 4\d tokens does not fit into .* for 40 tokens: lower data"):
        all(engine.step() for _ in range(60))
    engine.submit(Request([5] * 60, [1]), SamplingParams(SamplingConfig(), 60))
    with pytest.raises(RuntimeError, match="a sequence of 61 tokens does not fit"):
        engine.step()
    assert len(sample(paged_engine(pool_tokens=120), 12)) == 11


def test_an_engine_whose_pass_fails_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, expected = paged_engine(), sample(tiny_engine())

    def fail(*_: object) -> None:
        raise MemoryError

    for place in ("_compute", "_read_parts", "_draw"):
        for request in requests():
            engine.submit(request, SamplingParams(SamplingConfig(), 12))
        engine.step()
        with monkeypatch.context() as broken:
            broken.setattr(engine, place, fail)
            if place == "_read_parts":
                engine.submit(Request([9, 8], [1]), SamplingParams(SamplingConfig(), 12))
            with pytest.raises(MemoryError):
                engine.step()
        assert engine._pages._layers == {}
        assert_same(sample(engine), expected)


def test_a_conversation_whose_prompt_is_shared_is_not_kept_where_there_are_no_pages() -> None:
    params, wanted = SamplingParams(SamplingConfig(), 20), [Request(PROMPTS[3], [i], (), i) for i in range(2)]
    expected = generate(tiny_engine(), wanted, params)
    for pool_tokens, num_kept in ((8 * 16, 0), (8 * 64, 2)):
        engine = paged_engine(4, pool_tokens)
        for group, others in zip(generate(engine, wanted, params), expected, strict=True):
            assert_same(group, others)
        assert len(engine._kept) == num_kept
        assert engine._pages.num_free + engine._pages.num_kept == engine._pages.num_pages


def test_conversations_give_way_when_pages_run_out() -> None:
    engine, params = paged_engine(4, 100), SamplingParams(SamplingConfig(), 6)
    answers = {}
    for number in range(5):
        ((one,),) = generate(engine, [Request(PROMPTS[1], [number], (), number)], params)
        answers[number] = one
    assert 0 < len(engine._kept) < 4
    for number, one in answers.items():
        request = Request([*PROMPTS[1], *one.tokens, 5, 6], [100 + number], (), number)
        assert_same(generate(engine, [request], params)[0], generate(tiny_engine(), [request], params)[0])


# --- graphs and the choice of kernels ---------------------------------------------------------------------------------


def test_where_no_graph_can_be_recorded_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch).fails = True
    engine, expected = paged_engine(), sample(tiny_engine())
    engine._passes = BucketGraphs(is_enabled=True)  # as on CUDA
    with pytest.warns(UserWarning, match="no CUDA graph can be recorded"):
        assert_same(sample(engine), expected)
    assert not engine._passes.is_enabled
    assert EAGER_PASSES < 11, "passes of twelve tokens"


class _FakeGraphs(FakeCuda):
    """CUDA graphs that run what they have recorded."""

    replays = 0

    def install(self, monkeypatch: pytest.MonkeyPatch, passes: BucketGraphs) -> None:
        record = passes._record

        def recorded(key: object, compute: Callable[[], None]) -> object:
            def replay() -> None:
                self.replays += 1
                compute()

            graph = record(key, lambda: None)
            graph.replay = replay
            return graph

        monkeypatch.setattr(passes, "_record", recorded)


@pytest.mark.parametrize("longest", [32, 128])
def test_a_pass_that_was_recorded_is_right_for_other_rows_lengths_and_weights(
    monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    """What a recorded pass reads is in the same memory for all passes of its kind: the first one's work is repeated."""
    engine, fakes = paged_engine(8, keeps=True, longest=longest), _FakeGraphs(monkeypatch)
    weights = {name: parameter.detach().clone() for name, parameter in tiny_lm().model.named_parameters()}
    engine._passes.is_enabled = True
    fakes.install(monkeypatch, engine._passes)
    expected = sample(tiny_engine(), 40)
    for _ in range(2):
        engine.load_weights(WeightStream(((name, tensor.clone()) for name, tensor in weights.items()), 1))
        assert_same(sample(engine, 40), expected)
        engine.sleep(keep_weights=False)
    assert fakes.replays > 60
    assert {*fakes.modes} == {"thread_local"}
    # Sequences that are longer than was expected need other memory, and passes are recorded again.
    assert (len(fakes.modes) == len(engine._passes._graphs)) == (longest == 128)
    assert len(fakes.modes) <= 10


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A device that is only named."""
    return torch.device("cuda", 0)


def test_kernels_that_do_not_work_are_not_used(monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    model = tiny_lm()
    assert paged_attention(model, torch.float32, CPU, ALONE) is None, "nothing to say on a CPU"
    monkeypatch.setitem(sys.modules, "leaderless.rollout.native.paged_kernels", None)
    with pytest.warns(UserWarning, match="cannot be used: ModuleNotFoundError.*; install the Triton of torch 2"):
        assert paged_attention(model, torch.float32, cuda, ALONE) is None

    class Kernels:
        attend_with_kernels = staticmethod(attend_with_torch)

    def fail(*_: object) -> float:
        raise RuntimeError(
            "out of resource: shared memory, Required: 98816, Hardware limit: 65536. Reducing block sizes or "
            "`num_stages` may help."
        )

    monkeypatch.setitem(sys.modules, "leaderless.rollout.native.paged_kernels", Kernels)
    monkeypatch.setattr(paged_check, "largest_error", fail)
    with pytest.warns(UserWarning, match=r"Required: 98816, Hardware limit: 65536; install .*\(rollout.engine: vllm\)"):
        assert paged_attention(model, torch.float32, cuda, ALONE) is None
    monkeypatch.setattr(paged_check, "largest_error", lambda *_: 0.0)
    assert paged_attention(model, torch.float32, cuda, ALONE) is attend_with_torch

    class Pair:
        size = 2

        def max(self, values: torch.Tensor, _: str) -> torch.Tensor:
            return values.clamp(min=1)

    with pytest.warns(UserWarning, match="it does not work on another rank"):
        assert paged_attention(model, torch.float32, cuda, Pair()) is None
    monkeypatch.setattr(paged_check, "largest_error", lambda *_: float("nan"))
    with pytest.warns(UserWarning, match="its results are wrong by nan"):
        assert paged_attention(model, torch.float32, cuda, ALONE) is None


def test_kernels_that_draw_wrong_tokens_are_not_used(monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    model = tiny_lm()
    assert token_drawing(model, CPU, ALONE) is write_drawn, "nothing to say on a CPU"
    monkeypatch.setitem(sys.modules, "leaderless.rollout.native.sampling_kernels", None)
    with pytest.warns(UserWarning, match="kernels that draw tokens cannot be used: ModuleNotFoundError"):
        assert token_drawing(model, cuda, ALONE) is write_drawn

    class Kernels:
        draw_with_kernels = staticmethod(lambda *_: None)

    monkeypatch.setitem(sys.modules, "leaderless.rollout.native.sampling_kernels", Kernels)
    monkeypatch.setattr(paged_check, "draw_error", lambda *_: float("nan"))
    with pytest.warns(UserWarning, match="cannot be used: its results are wrong by nan; install the Triton of torch 2"):
        assert token_drawing(model, cuda, ALONE) is write_drawn
    monkeypatch.setattr(paged_check, "draw_error", lambda *_: 0.0)
    assert token_drawing(model, cuda, ALONE) is Kernels.draw_with_kernels


def test_the_trial_of_drawing_finds_what_is_wrong() -> None:
    assert draw_error(write_drawn, 1000, CPU) < paged_check.DRAW_TOLERANCE

    def with_change(change: Callable[[torch.Tensor, SamplingConfig], None]) -> float:
        def draw(logits, noise, way, drawn):
            write_drawn(logits, noise, way, drawn)
            change(drawn, way)

        return draw_error(draw, 1000, CPU)

    for temperature in (1.0, 0.7, 0.0):

        def next_token(drawn: torch.Tensor, way: SamplingConfig, temperature: float = temperature) -> None:
            drawn[0, 3] = (drawn[0, 3] + (way.temperature == temperature)) % 1000

        assert with_change(next_token) > 1e-3
    assert with_change(lambda drawn, _: drawn[1].view(torch.float64)[2].add_(1e-3)) > 9e-4
    assert isnan(with_change(lambda drawn, _: drawn[1].view(torch.float64)[2].fill_(torch.nan)))


def test_tokens_are_drawn_as_the_engine_is_told() -> None:
    ways = list[SamplingConfig]()

    def draw(logits, noise, way, drawn):
        ways.append(way)
        write_drawn(logits, noise, way, drawn)

    engine, expected = paged_engine(), sample(tiny_engine())
    engine._options = engine._options._replace(draw=draw)
    assert_same(sample(engine), expected)
    assert len(ways) >= 11


def test_the_trial_finds_what_is_wrong() -> None:
    sizes = heads_of(tiny_lm())
    assert sizes == (4, 2, 8) or len(sizes) == 3
    assert largest_error(attend_with_torch, sizes, torch.bfloat16, CPU) < 5e-3

    def unrotated(query, key, value, cached, plan, scale, rotation):
        return attend_with_torch(query, key, value, cached, plan, scale)

    assert largest_error(unrotated, sizes, torch.float32, CPU) > 0.1

    def without_prompt(query, key, value, cached, plan, scale, rotation):
        runs = plan.runs.clone()
        runs[:, 1] = 0
        return attend_with_torch(query, key, value, cached, replace(plan, runs=runs), scale, rotation)

    assert largest_error(without_prompt, sizes, torch.float32, CPU) > 0.1


def test_the_trial_is_right_where_products_of_float32_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by environment variables of some images of torch, or by a setting."""
    einsum = torch.einsum

    def rounded(equation, *tensors):
        return einsum(equation, *(t.bfloat16().float() if t.dtype == torch.float32 else t for t in tensors))

    def exact(query, key, value, cached, plan, scale, rotation):
        wide = tuple(one.double() for one in cached)
        inputs = query.double(), key.double(), value.double()
        return attend_with_torch(*inputs, wide, plan, scale, rotation).to(query.dtype)

    monkeypatch.setattr(torch, "einsum", rounded)
    sizes = heads_of(tiny_lm())
    assert largest_error(exact, sizes, torch.float32, CPU) < paged_check.TOLERANCES[torch.float32]
    assert largest_error(attend_with_torch, sizes, torch.float32, CPU) > paged_check.TOLERANCES[torch.float32]
