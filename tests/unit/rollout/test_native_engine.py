"""Details of the native engine: where keys and values are stored, how prompts are read, and which path passes take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.tiny import tiny_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    LlamaConfig,
    NanoChatConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.models import compiled_layers
from leaderless.models.attention.packed import ATTENTION_NAME, PackedAttention
from leaderless.models.causal_lm import CausalLM, load_causal_lm
from leaderless.models.loading.support import check_supported
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.rollout.engine import Completion, Request, SamplingParams, generate
from leaderless.rollout.native import engine as native
from leaderless.rollout.native import kv_cache, later_parts, lean_forward, segment_attention
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.kv_cache import SegmentStore
from leaderless.rollout.native.lean_forward import LeanForward, forward_of

SIZES = {
    "vocab_size": 83,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
}
LENGTHS = (5, 21, 1, 70, 9)
PROMPTS = [torch.randint(1, 60, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def model_of(family: str) -> CausalLM:
    """A decoder whose norms are not all ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation=ATTENTION_NAME)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return CausalLM(model.eval())


def engine_of(model: CausalLM, max_sequences: int = 64) -> NativeEngine:
    tokenizer = load_tokenizer(ModelConfig(path=tiny_model()), "policy")
    return NativeEngine(model, tokenizer, frozenset({0}), max_sequences, torch.device("cpu"))


def tiny_engine(max_sequences: int = 64) -> NativeEngine:
    return engine_of(load_causal_lm(ModelConfig(path=tiny_model()), "policy").eval(), max_sequences)


def requests(num_siblings: int = 3) -> list[Request]:
    """Every other prompt has only one response, which continues in the segment of its prompt."""
    counts = [num_siblings if i % 2 == 0 else 1 for i in range(len(PROMPTS))]
    return [Request(p, [100 * i + j for j in range(counts[i])]) for i, p in enumerate(PROMPTS)]


def sample(engine: NativeEngine, max_tokens: int = 12, temperature: float = 1.2) -> list[Completion]:
    params = SamplingParams(SamplingConfig(temperature=temperature), max_tokens)
    return [completion for group in generate(engine, requests(), params) for completion in group]


def assert_same(results: list[Completion], expected: list[Completion]) -> None:
    assert [c.tokens for c in results] == [c.tokens for c in expected]
    for completion, other in zip(results, expected, strict=True):
        assert completion.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_each_family_are_those_of_transformers(family: str) -> None:
    model = model_of(family)
    check_supported(model.model, "models.policy")
    model = model if family == "qwen3_moe" else model.double()  # torch multiplies by experts in float32 at most
    engine = engine_of(model, max_sequences=4)
    assert isinstance(forward_of(model, enable_compile=False), LeanForward)
    results = sample(engine, temperature=0)
    reference = model.model
    reference.set_attn_implementation("eager")
    asked = [request.prompt for request in requests() for _ in request.sample_ids]
    for prompt, completion in zip(asked, results, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        until = expected[0, len(prompt) :].tolist()
        assert completion.tokens == until[: until.index(0) + 1 if 0 in until else None]


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(logit_scale=0.4, **SIZES),
        GraniteConfig(logits_scaling=0.4, **SIZES),
        NanoChatConfig(final_logit_softcapping=1.5, **SIZES),
    ],
    ids=lambda config: config.model_type,
)
@torch.no_grad()
def test_tokens_are_drawn_from_logits_as_a_family_scales_and_caps_them(config: PretrainedConfig) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CausalLM(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval())
    results = sample(engine_of(model))
    model.model.set_attn_implementation("eager")
    asked = [request.prompt for request in requests() for _ in request.sample_ids]
    for prompt, completion in zip(asked, results, strict=True):
        logits = model.model(torch.tensor([prompt + completion.tokens]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
        expected = (logits / 1.2).log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", *FAMILIES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_lean_way_gives_the_logits_of_the_modules(family: str, dtype: torch.dtype) -> None:
    known = family in FAMILIES
    model = model_of(family) if known else load_causal_lm(ModelConfig(path=tiny_model(family)), "policy").eval()
    model = model.to(dtype)
    tokens, positions = torch.arange(1, 15), torch.cat([torch.arange(5), torch.arange(9)])
    attention, select = PackedAttention([5, 9], torch.device("cpu")), torch.tensor([4, 13])
    expected = model(tokens, positions, attention, select)
    result = forward_of(model, enable_compile=False)(tokens, positions, attention, select)
    # In bfloat16, where rounding is coarse, each step is exactly the same.
    tolerance = 1e-5 * float(expected.std()) if dtype == torch.float32 else 0.0
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=0)


def test_an_unknown_family_goes_through_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sample(tiny_engine())
    monkeypatch.setattr(lean_forward, "FAMILIES", ())
    engine = tiny_engine()
    assert forward_of(engine.model, enable_compile=False) is engine.model
    assert_same(sample(engine), expected)


def test_a_long_prompt_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sample(tiny_engine())
    sizes: list[int] = []
    plan = segment_attention.PrefillAttention.__init__

    def watched(
        self: segment_attention.PrefillAttention, parts: list[kv_cache.PromptPart], device: torch.device
    ) -> None:
        sizes.append(sum(part.count for part in parts))
        plan(self, parts, device)

    monkeypatch.setattr(segment_attention.PrefillAttention, "__init__", watched)
    monkeypatch.setattr(native, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(later_parts, "QUERY_BLOCK", 7)
    assert_same(sample(tiny_engine()), expected)
    assert max(sizes) == 16
    assert sum(sizes) == sum(LENGTHS)


@pytest.mark.parametrize("max_sequences", [2, 64])
def test_segments_that_outgrow_their_slots_move_on(monkeypatch: pytest.MonkeyPatch, max_sequences: int) -> None:
    expected = sample(tiny_engine(max_sequences))
    monkeypatch.setattr(kv_cache, "SMALLEST_SLOT", 2)
    assert_same(sample(tiny_engine(max_sequences)), expected)


def test_a_prompt_is_held_once_for_its_group_and_memory_is_let_go() -> None:
    engine = tiny_engine()
    params = SamplingParams(SamplingConfig(), 100)
    numbers = [engine.submit(request, params) for request in requests(num_siblings=8)]
    engine.step()
    engine.step()
    shared, own = (
        sorted(segment.length for s in store for segment in s.segments)
        for store in (engine._prompts, engine._responses)
    )
    assert shared == [1, 5, 9], "the prompts with eight responses"
    assert set(own) <= {1, 22, 71}, "one token that was sampled, behind the prompt where there is no group"
    assert bytes_of(engine._prompts) > 0
    engine.abort(numbers[1])
    engine.abort(numbers[0])
    assert sorted(segment.length for slots in engine._prompts for segment in slots.segments) == [1, 9]
    while engine.step():
        pass
    assert bytes_of(engine._prompts) == bytes_of(engine._responses) == 0


def test_requests_that_ask_the_same_share_the_prompt() -> None:
    engine, params = tiny_engine(), SamplingParams(SamplingConfig(), 6)
    whole, single = Request(PROMPTS[1], [1, 2, 3]), [Request(PROMPTS[1], [sample_id]) for sample_id in (1, 2, 3)]
    (expected,) = generate(engine, [whole], params)
    numbers = [engine.submit(request, params) for request in single]
    engine.step()
    assert [segment.length for slots in engine._prompts for segment in slots.segments] == [len(PROMPTS[1])]
    for number in numbers:
        engine.abort(number)
    engine.step()
    assert_same([completion for (completion,) in generate(engine, single, params)], expected)
    for request in single[:2]:
        number = engine.submit(request, params)
    engine.abort(number)
    assert [delta.finish_reason for delta in engine.step()] == ["aborted", None], "the other goes on"


@pytest.mark.parametrize("place", ["_read_parts", "_decode"])
def test_an_engine_whose_pass_fails_is_as_good_as_new(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    engine, expected = tiny_engine(), sample(tiny_engine())

    def fail(*_: object) -> None:
        raise MemoryError

    for request in requests():
        engine.submit(request, SamplingParams(SamplingConfig(), 12))
    if place == "_decode":
        engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine, place, fail)
        with pytest.raises(MemoryError):
            engine.step()
    assert bytes_of(engine._prompts) == bytes_of(engine._responses) == 0
    assert_same(sample(engine), expected)


def test_logits_of_prompts_are_not_kept_behind_their_first_tokens() -> None:
    engine = tiny_engine(max_sequences=4)
    for request in requests():
        engine.submit(request, SamplingParams(SamplingConfig(), 12))
    engine.step()
    assert {sequence.prompt.logits for sequence in engine._active.values() if not sequence.prompt.waiting} == {None}
    assert all(prompt.logits is not None and prompt.logits.ndim == 1 for prompt in engine._read)


def bytes_of(store: SegmentStore) -> int:
    tensors = [t for slots in store._sizes.values() for layer in slots._layers.values() for t in layer]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_a_compiler_that_fails_is_said_and_decoding_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sample(tiny_engine())

    def broken(function: Callable[..., object], **_: object) -> Callable[..., object]:
        def call(*args: object) -> object:
            raise OSError("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    engine = tiny_engine()
    engine._pass = LeanForward(engine.model, enable_compile=True)
    with pytest.warns(RuntimeWarning, match="torch.compile failed: no compiler"):
        assert_same(sample(engine), expected)


@torch.no_grad()
def test_a_prompt_of_one_token_needs_no_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler takes the number of rows for a constant where it is 1."""
    expected, rows = tiny_engine(), list[int]()

    def counted(function: Callable[..., object], **_: object) -> Callable[..., object]:
        def call(layer: nn.Module, *values: Tensor) -> object:
            rows.extend(map(len, values))
            return function(layer, *values)

        return call

    monkeypatch.setattr(torch, "compile", counted)
    engine = tiny_engine()
    engine._pass = LeanForward(engine.model, enable_compile=True)
    params = SamplingParams(SamplingConfig(temperature=0), 4, (), seed=1)
    for prompts in ([[7]], [[7], [5, 6, 7]]):
        asked = [Request(prompt, [number]) for number, prompt in enumerate(prompts)]
        for (one,), (other,) in zip(generate(engine, asked, params), generate(expected, asked, params), strict=True):
            assert_same([one], [other])
    assert min(rows) == 2


def test_engines_of_several_models_may_all_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[int | None]()

    def compile_(
        function: Callable[..., object], recompile_limit: int | None = None, **_: object
    ) -> Callable[..., object]:
        limits.append(recompile_limit)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    model = tiny_engine().model
    LeanForward(model, enable_compile=False)
    assert not limits
    LeanForward(model, enable_compile=True)
    assert limits == [compiled_layers.MAX_VARIANTS] * 2


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_compiler_is_not_blamed_for_what_the_function_itself_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, refuses = [], [False, True, False]

    def compile_(function: Callable[..., int], **_: object) -> Callable[..., int]:
        return lambda value: (compiled.append(value), function(value))[1]

    def double(value: int) -> int:
        if refuses[value]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return 2 * value

    monkeypatch.setattr(torch, "compile", compile_)
    call = lean_forward._compiled(double)
    assert call(0) == 0
    with pytest.raises(RuntimeError, match="synchronizing"):
        call(1)
    assert call(2) == 4
    assert compiled == [0, 1, 2]
