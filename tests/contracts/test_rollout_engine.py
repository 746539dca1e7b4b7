"""The contract of every rollout engine. An engine joins by a name in `ENGINES` and a case in `Engines`."""

from __future__ import annotations

import copy
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, Literal, cast

import numpy as np
import psutil
import pytest
import tests.tiny
import torch
from tests.engines import (
    CACHE_BYTES,
    change_weights,
    colocated,
    expected_log_probs,
    fake_sglang_python,
    make_external,
    make_trainer,
    server_of,
    settings_of,
)
from tests.pictures import prompt_with, vision_model
from torch import Tensor

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import RolloutConfig, SamplingConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.remote.child_server import ChildServer
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.attention.packed import Attention, PackedAttention
from leaderless.models.causal_lm import CausalLM, empty_causal_lm, load_causal_lm
from leaderless.models.loading.tokenizer import end_tokens, load_tokenizer
from leaderless.models.routers import Routers
from leaderless.models.vision.vision_models import VisionLM
from leaderless.planner import Layout
from leaderless.planner.engines import RolloutEngineSpec, engine_of
from leaderless.rollout.engine import Completion, Delta, Request, RolloutEngine, SamplingParams, generate
from leaderless.rollout.external.engine import Driver, ExternalEngine
from leaderless.rollout.external.sglang_engine import SglangServer
from leaderless.rollout.external.vllm_engine import InProcessVllm, VllmServer
from leaderless.rollout.make_engine import RolloutSetup
from leaderless.rollout.make_engine import make_engine as engine_by_name
from leaderless.rollout.native import engine as native
from leaderless.rollout.native import later_parts
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.paged_attention import attend_with_torch
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions
from leaderless.rollout.native.segment_attention import DecodeAttention, PrefillAttention
from leaderless.rollout.wrapped_engine import ALONE
from leaderless.stages.rollout import support_columns
from leaderless.training.fsdp import FsdpEngine

PROMPT_LENGTHS = (5, 9, 3, 17, 16, 1)


def make_native(path: str, max_sequences: int) -> RolloutEngine:
    return native_of(load_causal_lm(ModelConfig(path=path), "policy"), path, max_sequences)


def native_of(
    model: CausalLM, path: str, max_sequences: int, routers: Routers | None = None, *, support: bool = False
) -> NativeEngine:
    config = ModelConfig(path=path)
    tokenizer = load_tokenizer(config, "policy")
    ends, device = end_tokens(config, tokenizer), torch.device("cpu")
    return NativeEngine(model, tokenizer, ends, max_sequences, device, routers, records_support=support)


def make_paged(path: str, max_sequences: int) -> RolloutEngine:
    return paged_of(load_causal_lm(ModelConfig(path=path), "policy"), path, max_sequences)


def paged_of(
    model: CausalLM, path: str, max_sequences: int, routers: Routers | None = None, *, support: bool = False
) -> NativeEngine:
    """The engine of CUDA devices, by torch alone."""
    config = ModelConfig(path=path)
    tokenizer, options = load_tokenizer(config, "policy"), PagedOptions(attend_with_torch, 4096, 64, page_tokens=8)
    ends, device = end_tokens(config, tokenizer), torch.device("cpu")
    return PagedEngine(model, tokenizer, ends, max_sequences, device, options, routers, records_support=support)


def own_engine(path: str, max_sequences: int) -> RolloutEngine:
    """The engine of a user, made as for a recipe that names it."""
    config = ModelConfig(path=path)
    setup = RolloutSetup(
        role="policy",
        rollout=RolloutConfig(max_sequences=max_sequences),
        model=config,
        max_tokens=64,
        tokenizer=load_tokenizer(config, "policy"),
        layout=Layout((0,), 1),
        shard=ALONE,
        world_size=1,
        device=torch.device("cpu"),
        logs=Path(),
        report=print,
    )
    return engine_by_name(OWN, setup)


class Engines:
    """Engines for tests. Those that take long to start are kept for all tests of this file, one test at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[tuple[str, str], tuple[ExternalEngine, ChildServer | None]] = {}
        self.messages: list[str] = []
        self.stack = ExitStack()

    def make(self, name: str, path: str, max_sequences: int) -> RolloutEngine:
        """An engine that serves the weights of a folder."""
        self.stack.close()
        if name in EMBEDDED:
            return EMBEDDED[name](path, max_sequences)
        engine = own_engine(path, max_sequences) if name == OWN else self.external(name, path)
        self.stack.enter_context(colocated(engine, make_trainer(path)).phase())
        return engine

    def external(self, name: str, path: str) -> ExternalEngine:
        """An engine that does not serve yet."""
        if (name, path) not in self.kept:
            if name == "vllm-in-process":
                self.end(name)  # a process holds one vLLM
            driver, server = self.driver(name, path)
            self.kept[name, path] = make_external(driver, path, self.messages), server
            self.kept[name, path][0].experts_per_token = 4 if path == mixture() else 0
            self.kept[name, path][0].most_support = spec_of(name).most_support or 0
        return self.kept[name, path][0]

    def driver(self, name: str, path: str) -> tuple[Driver, ChildServer | None]:
        """The driver of an engine, and its server in another process."""
        settings, device = replace(settings_of(path), most_support=256), torch.device("cpu")
        if path == mixture():
            settings = replace(settings, expert_layers=(0, 1), experts_per_token=2)
        match name:
            case "sglang":
                server = server_of(name, self.folder)
                return SglangServer(fake_sglang_python(self.folder), settings, device, server), server
            case "vllm":
                if VLLM_PYTHON is None:
                    pytest.skip("`make test-vllm` runs this with vLLM")
                server = server_of(name, self.folder)
                return VllmServer(VLLM_PYTHON, settings, device, server), server
            case _:
                if find_spec("vllm") is None:
                    pytest.skip("`make test-vllm` runs this with vLLM")
                return InProcessVllm(settings, device), None

    def end(self, *names: str) -> None:
        """End the engines of some names."""
        self.stack.close()
        for key in [key for key in self.kept if key[0] in names]:
            self.kept.pop(key)[0].close()
        assert not any("aux-output" in thread.name for thread in threading.enumerate()), "vLLM keeps choices of experts"


OWN = "tests.contracts.plain_engine:make"
EMBEDDED = {"native": make_native, "native-in-pages": make_paged}
"""Engines in the process of the tests, which have weights from the beginning."""
ENGINES = (*EMBEDDED, OWN, "sglang", "vllm", "vllm-in-process")
"""Engines to test; `sglang` talks to a fake server."""
VLLM_PYTHON = os.environ.get("LEADERLESS_VLLM_PYTHON")
"""Python of an environment with vLLM."""


def spec_of(name: str) -> RolloutEngineSpec:
    """The contract of an engine to test."""
    return engine_of(name.removesuffix("-in-process").removesuffix("-in-pages"))


untied_model, mixture_model = tests.tiny.untied_model, tests.tiny.mixture_model
tiny_model = partial(tests.tiny.tiny_model, head_dim=32)
"""A tiny model with heads as wide as vLLM requires on the CPU."""
RECORDING = [name for name in ENGINES if spec_of(name).records_experts]


@functools.cache
def mixture() -> str:
    """The folder of a model with experts, of whose choices all engines that can keep records."""
    return mixture_model(tiny_model("qwen3"))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.end(*ENGINES)


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Callable[[str, int], RolloutEngine]]:
    yield partial(engines.make, request.param)
    engines.stack.close()


def requests(num_siblings: int = 3) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 60, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    return [Request(prompt, [i * 100 + j for j in range(num_siblings)]) for i, prompt in enumerate(prompts)]


def params(max_tokens: int = 12, stop: tuple[str, ...] = (), seed: int = 0, **sampling: float) -> SamplingParams:
    return SamplingParams(SamplingConfig(**sampling), max_tokens, stop, seed)  # type: ignore[arg-type]


def tokens_of(results: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens for completion in group] for group in results]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_greedy_tokens_are_those_of_transformers(make_engine: Callable[[str, int], RolloutEngine], family: str) -> None:
    path = tiny_model(family)  # type: ignore[arg-type]
    if family != "qwen2" and make_engine.args == ("sglang",):  # type: ignore[attr-defined]
        pytest.skip("the fake of SGLang has no architectures of its own")
    results = generate(make_engine(path, 4), requests(2), params(temperature=0))
    reference = load_causal_lm(ModelConfig(path=path), "policy").model
    reference.set_attn_implementation("eager")
    for request, group in zip(requests(2), results, strict=True):
        expected = reference.generate(
            torch.tensor([request.prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )[0, len(request.prompt) :].tolist()
        assert [completion.tokens for completion in group] == [expected, expected]


@pytest.mark.parametrize("name", EMBEDDED)
@torch.no_grad()
def test_greedy_tokens_after_images_are_those_of_transformers(name: str) -> None:
    path, sizes = vision_model("qwen2_5_vl"), ([(32, 32)], [], [(40, 16), (16, 24)])
    prompts = [prompt_with(one, "qwen2_5_vl", seed) for seed, one in enumerate(sizes)]
    asked = [Request(tokens, [number], images=images) for number, (tokens, images) in enumerate(prompts)]
    results = generate(EMBEDDED[name](path, 4), asked, params(temperature=0))
    reference = load_causal_lm(ModelConfig(path=path), "policy")
    assert isinstance(reference, VisionLM)
    reference.model.set_attn_implementation("eager")
    never = [[token] for token in sorted(reference.reader.reserved)]
    for (tokens, images), (completion,) in zip(prompts, results, strict=True):
        seen: dict[str, Tensor] = {}
        if images:
            pixels, kinds = reference.reader.pixels(images), torch.tensor([tokens]) == reference.reader.token
            seen = {"pixel_values": pixels.values, "image_grid_thw": pixels.grids, "mm_token_type_ids": kinds.int()}
        found = reference.model.generate(
            torch.tensor([tokens]), **seen, max_new_tokens=12, do_sample=False, pad_token_id=0, bad_words_ids=never
        )
        assert completion.tokens == found[0, len(tokens) :].tolist()


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_log_probs_are_those_of_the_trainer(
    make_engine: Callable[[str, int], RolloutEngine], temperature: float
) -> None:
    path = tiny_model()
    results = generate(make_engine(path, 8), requests(), params(temperature=temperature))
    reference = load_causal_lm(ModelConfig(path=path), "policy").model
    reference.set_attn_implementation("eager")
    for request, group in zip(requests(), results, strict=True):
        for completion in group:
            sequence = torch.tensor([[*request.prompt, *completion.tokens]])
            logits = reference(sequence).logits[0, len(request.prompt) - 1 : -1] / temperature
            expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def test_tokens_depend_on_seed_and_sample_alone(make_engine: Callable[[str, int], RolloutEngine]) -> None:
    path = tiny_model()
    asked, short = requests(2), params(max_tokens=6)
    expected = tokens_of(generate(make_engine(path, 64), asked, short))
    assert tokens_of(generate(make_engine(path, 1), asked, short)) == expected, "one at a time"
    assert tokens_of(generate(make_engine(path, 5), asked, short)) == expected, "admitted as others end"
    backwards = generate(make_engine(path, 7), asked[::-1], short)
    assert tokens_of(backwards)[::-1] == expected, "in another order"
    halves = [generate(make_engine(path, 7), part, short) for part in (asked[:2], asked[2:])]
    assert tokens_of(halves[0] + halves[1]) == expected, "on two ranks"
    assert tokens_of(generate(make_engine(path, 64), asked, params(max_tokens=6, seed=1))) != expected
    assert all(len({tuple(tokens) for tokens in group}) > 1 for group in expected), "siblings differ"


def test_a_response_ends_with_its_end_token_or_is_marked_truncated(
    make_engine: Callable[[str, int], RolloutEngine],
) -> None:
    results = generate(make_engine(tiny_model(), 16), requests(3), params(max_tokens=24, temperature=1.5))
    completions = [completion for group in results for completion in group]
    assert {completion.is_truncated for completion in completions} == {True, False}
    for completion in completions:
        assert len(completion.tokens) == len(completion.log_probs)
        assert (completion.tokens[-1] == 0) != completion.is_truncated
        assert 0 not in completion.tokens[:-1]
        assert len(completion.tokens) == 24 or not completion.is_truncated


def test_a_response_ends_behind_the_first_stop_text(make_engine: Callable[[str, int], RolloutEngine]) -> None:
    path = tiny_model()
    tokenizer = load_tokenizer(ModelConfig(path=path), "policy")
    free = generate(make_engine(path, 16), requests(2), params(max_tokens=16, temperature=1.5))
    long = tokenizer.decode(max((c.tokens for group in free for c in group), key=len), skip_special_tokens=True)
    stops = (long[4:6], "no text has this in it")
    stopped = generate(make_engine(path, 16), requests(2), params(max_tokens=16, temperature=1.5, stop=stops))
    count = 0
    for before, after in zip(tokens_of(free), tokens_of(stopped), strict=True):
        for whole, cut in zip(before, after, strict=True):
            assert whole[: len(cut)] == cut
            text = tokenizer.decode(cut)
            assert text.find(stops[0]) in {-1, len(text) - 2}, "nothing follows the stop text"
            assert len(cut) == len(whole) or text.endswith(stops[0])
            count += len(cut) < len(whole)
    assert count > 0


def test_truncated_sampling_draws_only_what_is_left(make_engine: Callable[[str, int], RolloutEngine]) -> None:
    path = tiny_model()
    greedy = tokens_of(generate(make_engine(path, 16), requests(1), params(6, temperature=0)))
    assert tokens_of(generate(make_engine(path, 16), requests(1), params(6, top_k=1))) == greedy
    assert tokens_of(generate(make_engine(path, 16), requests(1), params(6, min_p=1.0))) == greedy
    assert tokens_of(generate(make_engine(path, 16), requests(1), params(6, top_p=1e-6))) == greedy
    assert tokens_of(generate(make_engine(path, 16), requests(1), params(6, top_k=3))) != greedy


def test_an_aborted_response_is_resumed_where_it_was(make_engine: Callable[[str, int], RolloutEngine]) -> None:
    engine, wanted = make_engine(tiny_model(), 4), requests()[:3]
    expected = generate(engine, wanted, params())
    begun = [request.begin() for request in wanted]
    numbers = {engine.submit(request, params()): index for index, request in enumerate(wanted)}
    while max(len(completion.tokens) for group in begun for completion in group) < 5:
        take(engine, numbers, begun)
    for number in numbers:
        engine.abort(number)
    take(engine, numbers, begun)
    reasons = {completion.finish_reason for group in begun for completion in group}
    assert "aborted" in reasons
    assert reasons <= {"aborted", "stop"}
    assert engine.step() == [], "nothing is left under way"
    aborted = [(i, j) for i, group in enumerate(begun) for j, c in enumerate(group) if c.finish_reason == "aborted"]
    assert len({len(begun[i][j].tokens) for i, j in aborted}) > 1, "some had not begun, some had"
    resumed = [Request(wanted[i].prompt, [wanted[i].sample_ids[j]], [begun[i][j]]) for i, j in aborted]
    for (i, j), (completion,) in zip(aborted, generate(engine, resumed, params()), strict=True):
        begun_tokens = begun[i][j].tokens
        assert completion.tokens[: len(begun_tokens)] == begun_tokens
        assert completion.finish_reason in {"stop", "length"}
        if not isinstance(engine, NativeEngine):
            continue  # other engines continue a response with different noise
        assert completion.tokens == expected[i][j].tokens
        assert completion.log_probs == pytest.approx(expected[i][j].log_probs, abs=1e-4)
        assert completion.finish_reason == expected[i][j].finish_reason


def test_a_response_that_is_given_up_takes_no_other_with_it(make_engine: Callable[[str, int], RolloutEngine]) -> None:
    # Twelve, since the name of the first may be a prefix of others.
    wanted = [Request([3 + i, 2], [i]) for i in range(12)]
    engine, results = make_engine(tiny_model(), 16), [request.begin() for request in wanted]
    numbers = {engine.submit(request, params(max_tokens=40)): index for index, request in enumerate(wanted)}
    take(engine, numbers, results)
    engine.abort(min(numbers))
    while not all(completion.finish_reason for group in results for completion in group):
        take(engine, numbers, results)
    reasons = [group[0].finish_reason for group in results]
    assert reasons[0] in {"aborted", "stop"}
    assert set(reasons[1:]) <= {"stop", "length"}


def take(engine: RolloutEngine, numbers: dict[int, int], completions: list[list[Completion]]) -> None:
    """One recorded step."""
    for delta in engine.step():
        completions[numbers[delta.request]][delta.sibling].add(delta)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "tied") for name in ENGINES),
        ("vllm", "untied"),
        *((name, "experts") for name in RECORDING),
    ],
)
def test_new_weights_are_used_from_the_next_token_on(engines: Engines, name: str, kind: str) -> None:
    engines.stack.close()
    paths = {
        "tied": tiny_model,
        "untied": lambda: untied_model(tiny_model()),
        "experts": mixture,
    }
    path = paths[kind]()
    trainer = make_trainer(path)
    is_native = name == "native"
    engine = (
        native_of(empty_causal_lm(ModelConfig(path=path), "policy"), path, 4)
        if is_native
        else engines.external(name, path)
    )
    serving = colocated(engine, trainer)
    first: Completion | None = None
    for seed in (1, 2):
        change_weights(trainer, seed)
        with serving.phase():
            results = generate(engine, requests(1), params())
            if first is not None:  # three tokens by the earlier weights, and the rest by these
                begun = Completion(first.tokens[:3], first.log_probs[:3], None, first.policy_versions[:3])
                ((resumed,),) = generate(engine, [Request(requests(1)[0].prompt, [0], [begun])], params())
                assert resumed.policy_versions == [1] * len(begun.tokens) + [2] * (len(resumed.tokens) - 3)
        for request, (completion,) in zip(requests(1), results, strict=True):
            expected = expected_log_probs(trainer, request, completion)
            assert completion.log_probs == pytest.approx(expected, abs=1e-4)
            assert completion.policy_versions == [seed] * len(completion.tokens)
        first = results[0][0]


@pytest.mark.parametrize("name", RECORDING)
def test_experts_of_all_tokens_are_recorded(engines: Engines, name: str) -> None:
    engines.stack.close()
    trainer, text = make_trainer(mixture()), torch.randint(1, 60, (150,), generator=torch.Generator().manual_seed(0))
    if name in EMBEDDED:
        model = empty_causal_lm(ModelConfig(path=mixture()), "policy")
        make = native_of if name == "native" else paged_of
        engine: RolloutEngine = make(model, mixture(), 4, Routers.required(model, "policy"))
    else:
        engine = engines.external(name, mixture())
    serving, models = colocated(engine, trainer), list[Any]()
    shared, short, begun = Request(text.tolist(), [1, 2]), requests(1), Completion()
    for version in (1, 2):
        change_weights(trainer, version)
        models.append(copy.deepcopy(trainer.model))
        with serving.phase():
            asked = [*short, shared, Request(text.tolist(), [3])]  # whose tokens are all known by then
            results = [*generate(engine, asked[:-1], params()), *generate(engine, asked[-1:], params())]
            if version == 2:
                ((resumed,),) = generate(engine, [Request(shared.prompt, [7], [begun])], params())
                several = interrupted(engine, name, short[:2])
        for request, group in zip(asked, results, strict=True):
            for one in group:
                assert one.experts == choices_of([*request.prompt, *one.tokens[:-1]], models[-1])
        if version == 1:
            first, known = results[-1][0], len(text) + 2
            begun = Completion(
                first.tokens[:3], first.log_probs[:3], None, first.policy_versions[:3], first.experts[:known]
            )
    assert resumed.experts[:known] == begun.experts != choices_of([*text.tolist(), *begun.tokens], models[1])[:known]
    later = choices_of([*text.tolist(), *resumed.tokens[:-1]], models[1])
    assert len(resumed.experts) == len(later)
    assert resumed.experts[known:] == later[known:]
    for request, (one,) in zip(short[:2], several, strict=True):
        assert one.experts == choices_of([*request.prompt, *one.tokens[:-1]], models[1])


def interrupted(engine: RolloutEngine, name: str, asked: list[Request]) -> list[list[Completion]]:
    """Responses that vLLM stops after some tokens, to read them again later, as where its memory is short."""
    found = [request.begin() for request in asked]
    numbers = {engine.submit(request, params()): index for index, request in enumerate(asked)}
    while not all(one.finish_reason for group in found for one in group):
        take(engine, numbers, found)
        if name == "vllm-in-process":
            cast("Any", engine)._driver._engine.reset_prefix_cache(reset_running_requests=True)
    return found


@torch.no_grad()
def scored_by(
    trainer: FsdpEngine, asked: Sequence[Request], results: list[list[Completion]], temperature: float
) -> Jagged:
    """The trainer's log-probabilities of responses, over what could be drawn."""
    rows = [(request.prompt, one) for request, group in zip(asked, results, strict=True) for one in group]
    tokens = Jagged.from_lists([one.tokens for _, one in rows], torch.int64, "tokens")
    mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
    columns = {
        "prompt_tokens": Jagged.from_lists([list(prompt) for prompt, _ in rows], torch.int64, "prompt_tokens"),
        "tokens": tokens,
        "response_mask": mask,
        "temperatures": Jagged(torch.full((len(tokens.values),), temperature), tokens.lengths, "response_tokens"),
    }
    batch = Batch(torch.arange(len(rows)), columns | support_columns([one.support for _, one in rows], tokens.lengths))
    return trainer.log_probs(batch)


WAYS = [{"top_k": 9}, {"top_k": 30, "top_p": 0.8}, {"top_k": 20, "min_p": 0.3}, {"top_p": 0.6}, {"min_p": 0.3}, {}]
"""Distributions; engines that need `top_k` record nothing without."""


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", [name for name in ENGINES if spec_of(name).most_support != 0])
def test_training_over_what_could_be_drawn_has_the_log_probs_of_the_engine(
    engines: Engines, name: str, way: dict[str, float]
) -> None:
    path, sampling = tiny_model(), params(temperature=1.4, **way)
    if name in EMBEDDED:
        make = {"native": native_of, "native-in-pages": paged_of}[name]
        engine: RolloutEngine = make(load_causal_lm(ModelConfig(path=path), "policy"), path, 5, support=True)
    else:
        engine = engines.make(name, path, 5)
    # An aborted response goes on with what it had; greedy ones come in between.
    ((begun,),) = generate(engine, [requests(1)[0]], replace(sampling, max_tokens=4))
    greedy = generate(engine, requests(1)[:2], params(3, temperature=0))
    assert all(not any(one.support) for group in greedy for one in group), "all tokens are compared"
    asked = requests()
    again = replace(asked[0], sample_ids=[0], begun=[replace(begun, finish_reason=None)])
    results = [*generate(engine, asked[1:], sampling), *generate(engine, [again], sampling)]
    asked = [*asked[1:], again]
    vocabulary = load_causal_lm(ModelConfig(path=path), "policy").vocab_size
    records = bool(way) and ("top_k" in way or spec_of(name).most_support is None)
    for one in [one for group in results for one in group]:
        assert len(one.support) == len(one.tokens)
        for token, words in zip(one.tokens, one.support, strict=True):
            found = np.frombuffer(words, np.int32)
            assert len(found) <= way.get("top_k", vocabulary)
            assert token in found if records else not len(found)
            assert [*found] == sorted(set(found))
    if not records and way:
        return
    scores = scored_by(make_trainer(path), asked, results, 1.4).values
    sampled = torch.tensor([value for group in results for one in group for value in one.log_probs])
    torch.testing.assert_close(scores, sampled, atol=1e-5, rtol=0)


def choices_of(tokens: list[int], model: CausalLM) -> list[bytes]:
    """The experts that a model chooses for each token of a text."""
    routers, count = Routers.required(model, "policy"), len(tokens)
    routers.begin()
    attention = PackedAttention([count], torch.device("cpu"))
    model(torch.tensor(tokens), torch.arange(count), attention, torch.tensor([count - 1]))
    return [row.tobytes() for row in routers.now.choices().numpy()]


Caches = Literal["keep", "recompute"]


@pytest.mark.parametrize("cache", ["keep", "recompute"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
def test_weights_change_between_any_two_tokens(
    make_engine: Callable[[str, int], RolloutEngine], cache: Caches, seed: int
) -> None:
    name, path = make_engine.args[0], tiny_model()  # type: ignore[attr-defined]
    if cache not in spec_of(name).updates:
        pytest.skip(f"{name} does not {cache}")
    engine, trainer, random = make_engine(path, 3), make_trainer(path), Random(seed)
    models = {0: frozen(trainer)}
    asked, answers, numbers = list[Request](), list[list[Completion]](), dict[int, int]()
    texts = [[3, 2], [*range(1, 30)], 3 * [*range(1, 50)]]  # vLLM keeps blocks of 128 tokens
    while len(asked) < 8 or not all(answer.finish_reason for group in answers for answer in group):
        match random.choice(["submit", "step", "step", "step", "update", "abort"]):
            case "submit" if len(asked) < 8:
                text, conversation = random.choice(texts), random.choice([None, 1, 2])
                count = random.choice([1, 2, 4]) if conversation is None else 1
                asked.append(Request(text, [10 * len(asked) + i for i in range(count)], conversation=conversation))
                answers.append(asked[-1].begin())
                numbers[engine.submit(asked[-1], params(max_tokens=10))] = len(asked) - 1
            case "update" if len(models) < 6 and any(not answer.finish_reason for group in answers for answer in group):
                change_weights(trainer, len(models))
                models[len(models)] = frozen(trainer)
                weights = WeightStream(whole_weights(trainer), trainer.policy_version)
                engine.load_weights(weights, keep_cache=cache == "keep")
                assert engine.policy_version == trainer.policy_version
            case "abort" if len(asked) in {3, 6} and not all(answer.finish_reason for answer in answers[-1]):
                engine.abort(max(numbers))
            case _:
                take(engine, numbers, answers)
    assert engine.step() == []
    mixed = 0
    for request, group in zip(asked, answers, strict=True):
        for answer in group:
            assert len(answer.tokens) == len(answer.policy_versions)
            assert answer.policy_versions == sorted(answer.policy_versions)
            assert answer.log_probs == pytest.approx(mixed_log_probs(models, request, answer, cache), abs=2e-4)
            mixed += len({*answer.policy_versions}) > 1
    assert mixed > (0 if name in {"sglang", "vllm"} else 1)  # servers go on while the test does something else


def frozen(trainer: FsdpEngine) -> Any:
    """The trainer's model as it is now, for a plain forward pass of transformers."""
    model = copy.deepcopy(trainer.model.model)
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def mixed_log_probs(models: Mapping[int, Any], request: Request, answer: Completion, cache: Caches) -> list[float]:
    """Log-probabilities under models that take turns, each with its own keys and values, or with those of the others.

    `models` are language models of transformers by policy version.
    """
    text, begin = [*request.prompt, *answer.tokens], len(request.prompt)
    past, known, found = None, 0, list[float]()
    for end, (token, version) in enumerate(zip(answer.tokens, answer.policy_versions, strict=True), begin):
        if cache == "recompute":
            past, known = None, 0
        result = models[version](torch.tensor([text[known:end]]), past_key_values=past, use_cache=True)
        past, known = result.past_key_values, end
        found.append(float(result.logits[0, -1].log_softmax(-1)[token]))
    return found


@pytest.mark.parametrize("name", EMBEDDED)
@pytest.mark.parametrize("keep_cache", [True, False])
def test_the_same_weights_again_change_no_token(name: str, keep_cache: bool) -> None:
    path, wanted = tiny_model(), requests(2)
    weights = dict(whole_weights(make_trainer(path)))
    expected = generate(make_native(path, 4), wanted, params(max_tokens=12))
    engine, found = EMBEDDED[name](path, 4), [request.begin() for request in wanted]
    numbers = {engine.submit(request, params(max_tokens=12)): index for index, request in enumerate(wanted)}
    version = 0
    while not all(answer.finish_reason for group in found for answer in group):
        version += 1
        take(engine, numbers, found)
        engine.load_weights(WeightStream(iter(weights.items()), version), keep_cache=keep_cache)
    assert tokens_of(found) == tokens_of(expected)
    for group, others in zip(found, expected, strict=True):
        for one, other in zip(group, others, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
            versions = one.policy_versions
            assert versions == sorted(versions)
            # A token may be under way when the one before it is taken.
            assert len({*versions}) >= len(versions) - (name == "native-in-pages"), "a version for each token"


@pytest.mark.parametrize("name", EMBEDDED)
@pytest.mark.parametrize("keep_cache", [True, False])
def test_the_same_calls_give_the_same_bits(name: str, keep_cache: bool) -> None:
    path, seen = tiny_model(), list[list[Delta]]()
    for _ in range(2):
        engine, trainer, random = EMBEDDED[name](path, 3), make_trainer(path), Random(0)
        seen.append([])
        for round_ in range(60):
            if round_ < 30 and random.random() < 0.4:
                engine.submit(requests(4)[random.randrange(6)], params(max_tokens=10))
            if random.random() < 0.1:
                change_weights(trainer, round_)
                weights = WeightStream(whole_weights(trainer), trainer.policy_version)
                engine.load_weights(weights, keep_cache=keep_cache)
            if random.random() < 0.05:
                engine.abort(random.randrange(1, 5))
            seen[-1] += engine.step()
    assert seen[0] == seen[1]
    assert len({delta.policy_version for delta in seen[0]}) > 3


@pytest.mark.parametrize("name", EMBEDDED)
def test_keys_and_values_are_computed_again_in_several_passes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path, wanted = tiny_model(), [Request([*range(1, 20)], [0, 1, 2]), Request([*range(2, 9)], [3])]
    trainer = make_trainer(path)
    monkeypatch.setattr(native, "PREFILL_TOKENS", 8)
    monkeypatch.setattr(later_parts, "QUERY_BLOCK", 3)
    engine, found = EMBEDDED[name](path, 4), [request.begin() for request in wanted]
    models = {0: frozen(trainer)}
    numbers = {engine.submit(request, params(max_tokens=30)): index for index, request in enumerate(wanted)}
    for _ in range(15):
        take(engine, numbers, found)
    change_weights(trainer, 1)
    models[1] = frozen(trainer)
    engine.load_weights(WeightStream(whole_weights(trainer), 1), keep_cache=False)
    while not all(answer.finish_reason for group in found for answer in group):
        take(engine, numbers, found)
    assert sum({*answer.policy_versions} == {0, 1} for group in found for answer in group) > 1
    for request, group in zip(wanted, found, strict=True):
        for answer in group:
            assert answer.log_probs == pytest.approx(mixed_log_probs(models, request, answer, "recompute"), abs=2e-4)


def whole_weights(trainer: FsdpEngine) -> Iterator[tuple[str, Tensor]]:
    """Copies of a trainer's weights."""
    return ((name, weight.clone()) for name, weight in trainer.full_weights())


def test_weights_that_are_missing_or_unknown_are_refused() -> None:
    trainer, config = make_trainer(tiny_model()), ModelConfig(path=tiny_model())
    weights = dict(whole_weights(trainer))
    for engine in (native_of(empty_causal_lm(config, "policy"), tiny_model(), 4), own_engine(tiny_model(), 4)):
        name = "model.norm.weight"
        some = {other: weight for other, weight in weights.items() if other != name}
        with pytest.raises(RuntimeError, match=f"such as {name}"):
            engine.load_weights(WeightStream(iter(some.items()), 0))
    native = native_of(empty_causal_lm(config, "policy"), tiny_model(), 4)
    with pytest.raises(RuntimeError, match="weight 'other' was sent, which the model does not have"):
        native.load_weights(WeightStream(iter([("other", torch.zeros(1))]), 0))


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_a_server_that_dies_is_reported_and_started_again(engines: Engines, name: str) -> None:
    engines.stack.close()
    engine, trainer = engines.external(name, tiny_model()), make_trainer(tiny_model())
    engines.messages.clear()
    with colocated(engine, trainer).phase():
        number = engine.submit(requests()[0], replace(params(), tokens_at_once=3))
        completions = requests()[0].begin()
        take(engine, {number: 0}, [completions])
        server = engines.kept[name, tiny_model()][1]
        assert server is not None
        assert server._process is not None
        os.killpg(server._process.pid, signal.SIGKILL)
        while not all(completion.finish_reason for completion in completions):
            take(engine, {number: 0}, [completions])
    (message,) = engines.messages
    assert f"the {name} server" in message
    assert "ended with code -9" in message
    assert message.endswith("is started again")
    for completion in completions:
        expected = expected_log_probs(trainer, requests()[0], completion)
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["vllm", "vllm-in-process"])
def test_memory_is_given_back_while_nothing_is_generated(engines: Engines, name: str) -> None:
    engines.stack.close()
    engine, trainer = engines.external(name, tiny_model()), make_trainer(tiny_model())
    server = engines.kept[name, tiny_model()][1]
    sizes, serving = list[int](), colocated(engine, trainer)
    for _ in range(2):
        with serving.phase():
            process = psutil.Process(server._process.pid if server and server._process else None)
            generate(engine, requests(1), params())
            awake = process.memory_info().rss
        sizes += [awake, process.memory_info().rss]
    assert sizes[0] - sizes[1] > 0.9 * CACHE_BYTES
    assert sizes[2] - sizes[3] > 0.9 * CACHE_BYTES


def test_a_response_that_has_all_its_tokens_already_ends_at_once(
    make_engine: Callable[[str, int], RolloutEngine],
) -> None:
    begun = Completion([5, 6, 7], [-1.0, -1.0, -1.0], "aborted", [0, 0, 1])
    ((completion,),) = generate(make_engine(tiny_model(), 4), [Request([1, 2], [0], [begun])], params(max_tokens=3))
    assert (completion.tokens, completion.finish_reason) == ([5, 6, 7], "length")


def test_each_request_is_sampled_as_it_asks(make_engine: Callable[[str, int], RolloutEngine]) -> None:
    engine = make_engine(tiny_model(), 5)
    asked = [params(temperature=0), params(max_tokens=4), params(temperature=0.7, seed=3), params(top_k=2)]
    expected = [generate(engine, [request], p)[0] for request, p in zip(requests(), asked, strict=False)]
    together = [request.begin() for request, _ in zip(requests(), asked, strict=False)]
    numbers = {engine.submit(request, p): i for i, (request, p) in enumerate(zip(requests(), asked, strict=False))}
    while not all(completion.finish_reason for group in together for completion in group):
        take(engine, numbers, together)
    assert tokens_of(together) == tokens_of(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request([], [1]), "at least one token"),
        (lambda: Request([1], []), "at least one sample id"),
        (lambda: Request([1], [1, 2], [Completion()]), "2 responses resumes 1"),
        (lambda: Request([1], [1], [Completion([2], [-1.0], "stop")]), "cannot be resumed"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(make: Callable[[], Request], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_turns_of_a_conversation_give_what_fresh_requests_give(
    make_engine: Callable[[str, int], RolloutEngine],
) -> None:
    engine, trainer, name = make_engine(tiny_model(), 4), make_trainer(tiny_model()), make_engine.args[0]  # type: ignore[attr-defined]
    text = torch.randint(1, 60, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    for number in range(3):
        request, completion, cached = Request(list(text), [number], conversation=5), Completion(), list[int]()
        engine.submit(request, params())
        while completion.finish_reason is None:
            for delta in engine.step():
                completion.tokens += delta.tokens
                completion.log_probs += delta.log_probs
                completion.finish_reason = delta.finish_reason
                cached.append(delta.cached_tokens)
        assert completion.log_probs == pytest.approx(expected_log_probs(trainer, request, completion), abs=1e-4)
        ((fresh,),) = generate(engine, [Request(list(text), [number])], params())
        assert completion.tokens == fresh.tokens
        assert not any(cached[1:]), "it is reported once"
        # vLLM finds whole blocks of 128 tokens; the fake of SGLang reports one token.
        least = {"native": len(text) - 5, "vllm": 128, "vllm-in-process": 128, "sglang": 1}.get(name, 0)
        assert (least if number else 0) <= cached[0] < len(text)
        text += [*completion.tokens, 7, 8, 9]
    engine.forget(5)
    engine.forget(6)


def test_progress_counts_every_response_once(make_engine: Callable[[str, int], RolloutEngine]) -> None:
    told: list[tuple[int, int]] = []
    generate(make_engine(tiny_model(), 4), requests(), params(), lambda *progress: told.append(progress))
    assert sum(done for done, _ in told) == 18
    assert len(told) > 1


def test_no_request_gives_no_response(make_engine: Callable[[str, int], RolloutEngine]) -> None:
    assert generate(make_engine(tiny_model(), 4), [], params()) == []


def test_the_native_engine_reads_each_prompt_once_and_computes_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[bool, int]] = []
    for kind in (PrefillAttention, DecodeAttention):

        def counted(
            self: Attention,
            layer: int,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            scale: float,
            attend: Callable[..., Tensor] = kind.attend,
        ) -> Tensor:
            if layer == 0:
                passes.append((isinstance(self, PrefillAttention), len(query)))
            return attend(self, layer, query, key, value, scale)

        monkeypatch.setattr(kind, "attend", counted)
    results = generate(make_native(tiny_model(), 5), requests(4), params())
    prompt_tokens = sum(count for is_prefill, count in passes if is_prefill)
    decoded = sum(count for is_prefill, count in passes if not is_prefill)
    assert prompt_tokens == sum(PROMPT_LENGTHS)
    sampled = sum(len(completion.tokens) for group in results for completion in group)
    assert decoded == sampled - 24, "each token but a response's last is read once"
    assert max(count for is_prefill, count in passes if not is_prefill) == 5
