"""Models that see images: what they compute, learn and sample is what `transformers` computes of a row alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tests.pictures import SIZES, Family, picture, prompt_with, reader_of, samples_with, vision_model
from tests.unit.models.test_shared_prompts import mask_of
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaModel, SiglipVisionConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch
from leaderless.data.prompts.images import ImagePrompts, PromptImage, pack_images, unpack_images
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.shared_prompts import Family as Rows
from leaderless.models.attention.shared_prompts import PrefixAttention, attention_over, sequences_of
from leaderless.models.causal_lm import TokenOutputs, load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.vision import image_readers
from leaderless.models.vision.image_readers import PaliGemmaReader, SquareReader
from leaderless.models.vision.mrope import grid_positions
from leaderless.models.vision.vision_models import VisionLM
from leaderless.rollout.engine import Completion, Request, SamplingParams, generate, make_probe, prompts_of
from leaderless.rollout.native import engine as native
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.kv_cache import SegmentStore
from leaderless.rollout.native.prompts import CachedPrompt, passes_of
from leaderless.rollout.weight_sources import probe_of
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.micro_batches import MicroBatch

FAMILIES = get_args(Family)
CPU = torch.device("cpu")


def model_of(family: Family, **settings: object) -> VisionLM:
    config = ModelConfig(path=vision_model(family), **settings)  # type: ignore[arg-type]
    model = load_causal_lm(config, "policy")
    assert isinstance(model, VisionLM)
    return model


def engine_of(family: Family, micro_batch_tokens: int = 4096, **settings: object) -> FsdpEngine:
    config = ModelConfig(path=vision_model(family), **settings)  # type: ignore[arg-type]
    optimizer = OptimizerConfig(learning_rate=1e-3)
    return FsdpEngine(
        model_of(family, **settings), config, ProcessGroup((0,), 0), CPU, micro_batch_tokens, optimizer=optimizer
    )


def alone_inputs(
    model: VisionLM, prompt: Sequence[int], images: Sequence[PromptImage], response: Sequence[int]
) -> dict[str, Tensor]:
    """What the model's own forward pass takes of a row alone."""
    tokens = torch.tensor([[*prompt, *response]])
    inputs: dict[str, Tensor] = {"input_ids": tokens}
    if model.reads_both_ways:
        inputs["token_type_ids"] = (torch.arange(tokens.shape[1]) >= len(prompt)).long()[None]
    if images:
        pixels = model.reader.pixels(images)
        inputs["pixel_values"] = pixels.values
        if model.has_grid:
            inputs |= {"image_grid_thw": pixels.grids, "mm_token_type_ids": (tokens == model.reader.token).int()}
    return inputs


def alone(model: VisionLM, prompt: Sequence[int], images: Sequence[PromptImage], response: Sequence[int]) -> Tensor:
    """Log-probabilities of a response by the model's own forward pass, without what is never drawn."""
    logits = model.model(**alone_inputs(model, prompt, images, response)).logits[0, len(prompt) - 1 : -1]
    logits[:, sorted(model.reader.reserved)] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)


def rows_of(batch: Batch) -> list[tuple[Sequence[int], Sequence[PromptImage], Sequence[int]]]:
    assert batch.prompts is not None
    assert batch.prompt_index is not None
    prompts, responses = prompts_of(batch.prompts), batch.jagged("tokens").to_lists()
    index = batch.prompt_index.tolist()
    return [(*prompts[place], response) for place, response in zip(index, responses, strict=True)]


@cache
def cached_model() -> VisionLM:
    return model_of("qwen3_vl")


@given(some.lists(some.tuples(some.integers(0, 4), some.integers(1, 5), some.integers(1, 5)), max_size=4))
def test_positions_are_those_of_transformers(images: list[tuple[int, int, int]]) -> None:
    model, place = cached_model(), 1
    placed: list[PromptImage] = []
    for text, rows, columns in images:
        place += text + bool(placed)  # transformers takes images without a text between them for one
        placed.append(PromptImage(place, rows, columns, b""))
        place += rows * columns
    tokens = torch.full((place + 3,), 5)
    for image in placed:
        tokens[image.place : image.place + image.num_tokens] = model.reader.token
    found = grid_positions(torch.arange(len(tokens)), [Rows(len(tokens), ())], placed)
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for _, rows, columns in images]).view(-1, 3)
    kinds = (tokens == model.reader.token).int()[None]
    expected, _ = model.model.model.get_rope_index(tokens[None], mm_token_type_ids=kinds, image_grid_thw=grids)
    assert torch.equal(found, expected[:, 0])
    places, both = torch.arange(len(tokens)).repeat(2), [*placed, *(image.moved(len(tokens)) for image in placed)]
    assert torch.equal(grid_positions(places, [Rows(len(tokens), ())] * 2, both), torch.cat([found, found], 1))
    packed = pack_images(placed)
    assert unpack_images(packed) == tuple(placed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("micro_batch_tokens", [40, pytest.param(90, marks=pytest.mark.thorough)])
def test_scores_are_those_of_a_row_alone(family: Family, micro_batch_tokens: int) -> None:
    batch, engine = samples_with(family), engine_of(family, micro_batch_tokens)
    found = engine.log_probs(batch).rows()
    with_others = engine_of(family)  # all rows in one pass
    again = with_others.log_probs(batch.select(torch.arange(len(batch)).flip(0))).rows()[::-1]
    reference = model_of(family)
    reference.model.set_attn_implementation("eager")
    with torch.no_grad():
        for row, one, other in zip(rows_of(batch), found, again, strict=True):
            expected = alone(reference, *row)
            torch.testing.assert_close(one, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(other, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_rows_alone(family: Family) -> None:
    batch, engine = samples_with(family), engine_of(family, 90)
    for micro_batch in engine.micro_batches(batch):
        loss_of(engine.forward(micro_batch), micro_batch).backward()
    reference = model_of(family)
    reference.model.set_attn_implementation("eager")
    reference.requires_grad_(True)
    for row in rows_of(batch):
        (gain(torch.tensor(row[2])) * alone(reference, *row)).sum().backward()
    expected = dict(reference.model.named_parameters())
    for name, weight in engine.named_weights():
        other = expected[name].grad
        if other is None:  # llava takes the output of the last layer but one
            assert weight.grad is None, name
            assert ".layers.1." in name or "post_layernorm" in name
            continue
        assert weight.grad is not None, name
        assert float((weight.grad - other).norm()) < 1e-5 * max(1.0, float(other.norm())), name


def gain(targets: Tensor) -> Tensor:
    return (targets % 5 - 2) * 0.1


def loss_of(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
    return (gain(micro_batch.targets) * outputs.log_probs[: len(micro_batch.targets)]).sum()


def test_an_image_is_computed_once_for_all_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, engine = samples_with(siblings=4), engine_of("qwen3_vl")
    (micro_batch,) = engine.micro_batches(batch)
    assert len(micro_batch.images) == sum(map(len, SIZES))
    counted: list[int] = []
    tower = engine.model.model.model.visual
    monkeypatch.setattr(tower.blocks[0], "forward", counting(tower.blocks[0].forward, counted))
    engine.forward(micro_batch)
    assert counted == [4 * sum(image.num_tokens for image in micro_batch.images)]


def counting(function: object, counted: list[int]) -> object:
    def call(hidden: Tensor, **options: object) -> object:
        counted.append(len(hidden))
        return function(hidden, **options)  # type: ignore[operator]

    return call


def test_a_pass_without_images_has_gradients_for_what_sees_of_zero() -> None:
    engine = engine_of("qwen3_vl")
    (micro_batch,) = engine.micro_batches(samples_with(sizes=[[], []]))
    loss_of(engine.forward(micro_batch), micro_batch).backward()
    for name, weight in engine.named_weights():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()) != name.startswith("model.visual"), name


def test_tokens_that_stand_for_images_are_counted_before_a_pass() -> None:
    batch, engine = samples_with(siblings=1), engine_of("qwen3_vl")
    assert batch.prompts is not None
    with pytest.raises(
        RuntimeError,
        match=r"the prompt of sample \d has \d+ tokens that stand for parts of images, but its 0 images have 0, or",
    ):
        engine.log_probs(Batch(batch.ids, batch.columns, batch.prompts.only(["prompt_tokens"]), batch.prompt_index))
    tokens = batch.jagged("tokens")
    row = int(tokens.lengths.argmax())  # what is sampled last is not read
    tokens.values[tokens.offsets[row]] = reader_of().token  # as if a model had sampled it
    ids = torch.arange(len(batch)) + 40
    problem = f"^what follows the prompt in sample {40 + row} has 1 tokens that stand for parts of images, but its 0 im"
    with pytest.raises(RuntimeError, match=problem):
        engine.log_probs(Batch(ids, batch.columns, batch.prompts, batch.prompt_index))


def test_an_image_has_the_tokens_that_the_model_gives_to_it() -> None:
    _, (image,) = prompt_with([(32, 32)])
    with pytest.raises(RuntimeError, match="an image has 20 tokens in its prompt, but the model gives 16"):
        reader_of().pixels([image._replace(rows=5)])


@pytest.mark.parametrize("tower", [CLIPVisionConfig, SiglipVisionConfig])
@pytest.mark.parametrize("strategy", ["full", "default"])
def test_llava_gives_an_image_the_tokens_of_its_tower(
    tower: type[CLIPVisionConfig | SiglipVisionConfig], strategy: str
) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
    described = LlavaConfig(
        text_config=LlamaConfig(vocab_size=8, **sizes),
        vision_config=tower(image_size=16, patch_size=4, **sizes),
        vision_feature_select_strategy=strategy,
    )
    (seen,) = LlavaModel(described).get_image_features(torch.zeros(1, 3, 16, 16), return_dict=True).pooler_output
    assert SquareReader(CLIPImageProcessorPil(), described).grid(16, 16) == (1, len(seen))


@pytest.mark.parametrize(("family", "tower"), [("qwen3_vl", "model.visual."), ("llava", "model.vision_tower.")])
def test_what_sees_may_be_left_as_it_is(family: Family, tower: str) -> None:
    batch, engine = samples_with(family), engine_of(family, freeze_vision=True)
    before = {name: weight.detach().clone() for name, weight in engine.named_weights()}
    for micro_batch in engine.micro_batches(batch):
        loss_of(engine.forward(micro_batch), micro_batch).backward()
    engine.optimizer_step()
    for name, weight in engine.named_weights():
        assert torch.equal(weight, before[name]) == name.startswith(tower), name
    kept = [name for name in engine.state() if name.startswith("optimizer.")]
    assert kept
    assert not any(tower in name for name in kept)


def test_there_is_nothing_to_freeze_in_a_model_of_text(tiny: str) -> None:
    with pytest.raises(RecipeError, match=r"^models.policy.freeze_vision: .* read text alone"):
        load_causal_lm(ModelConfig(path=tiny, freeze_vision=True), "policy")


@pytest.fixture
def tiny() -> str:
    from tests.tiny import tiny_model

    return tiny_model()


def test_adapters_take_part() -> None:
    lora = LoraConfig(rank=4)
    batch, engine = samples_with(), engine_of("qwen3_vl", lora=lora)
    before = engine.log_probs(batch).values
    torch.testing.assert_close(before, engine_of("qwen3_vl").log_probs(batch).values, rtol=0, atol=1e-6)
    for micro_batch in engine.micro_batches(batch):
        loss_of(engine.forward(micro_batch), micro_batch).backward()
    engine.optimizer_step()
    assert float((engine.log_probs(batch).values - before).abs().max()) > 1e-4


def native_of(family: Family, max_sequences: int = 64) -> NativeEngine:
    config = ModelConfig(path=vision_model(family))
    return NativeEngine(
        model_of(family).eval().requires_grad_(False),
        load_tokenizer(config, "policy"),
        frozenset({0}),
        max_sequences,
        CPU,
    )


def requests(family: Family, siblings: Sequence[int] = (3, 1, 2, 4, 1, 2)) -> list[Request]:
    prompts = [prompt_with(one, family, 10 * number) for number, one in enumerate(SIZES)]
    return [
        Request(tokens, [100 * number + place for place in range(count)], images=images)
        for number, ((tokens, images), count) in enumerate(zip(prompts, siblings, strict=True))
    ]


def answered(engine: NativeEngine, asked: Sequence[Request], max_tokens: int = 9) -> list[list[Completion]]:
    return generate(engine, asked, SamplingParams(SamplingConfig(temperature=1.0), max_tokens))


@pytest.mark.parametrize(
    ("family", "prefill"),
    [
        *((family, 11) for family in FAMILIES),
        ("qwen3_vl", 8192),
        ("paligemma", 8192),
        *(
            pytest.param(one, 8192, marks=pytest.mark.thorough)
            for one in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "llava")
        ),
    ],
)
@torch.no_grad()
def test_sampled_tokens_have_the_log_probabilities_of_training(
    monkeypatch: pytest.MonkeyPatch, family: Family, prefill: int
) -> None:
    monkeypatch.setattr(native, "PREFILL_TOKENS", prefill)  # images are read in parts, too
    asked, model = requests(family), model_of(family)
    model.model.set_attn_implementation("eager")
    for request, completions in zip(asked, answered(native_of(family, 5), asked), strict=True):
        for completion in completions:
            expected = alone(model, request.prompt, request.images, completion.tokens)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-5)


def test_the_images_of_a_group_are_computed_once_in_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = native_of("qwen3_vl", 5)
    (asked,) = requests("qwen3_vl", [1, 1, 4, 1, 1, 1])[2:3]
    assert (len(asked.images), len(asked.sample_ids)) == (2, 4)
    counted: list[int] = []
    tower = engine.model.model.model.visual  # type: ignore[attr-defined]
    monkeypatch.setattr(tower.blocks[0], "forward", counting(tower.blocks[0].forward, counted))
    ((*completions,),) = answered(engine, [asked])
    assert len({tuple(one.tokens) for one in completions}) > 1, "siblings go on on their own"
    assert counted == [4 * sum(image.num_tokens for image in asked.images)]


def test_equal_tokens_of_other_images_are_another_prompt() -> None:
    (tokens, images), (others, seen) = (prompt_with([(32, 32)], seed=seed) for seed in (0, 7))
    assert tokens == others
    apart = [answered(native_of("qwen3_vl"), [Request(tokens, [1], images=one)])[0][0] for one in (images, seen)]
    both = answered(native_of("qwen3_vl"), [Request(tokens, [1], images=images), Request(tokens, [1], images=seen)])
    assert apart[0].log_probs[0] != apart[1].log_probs[0]
    for (together,), other in zip(both, apart, strict=True):
        assert together.log_probs == pytest.approx(other.log_probs[: len(together.log_probs)], abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3_vl", "paligemma"])
def test_resumed_responses_and_new_weights_go_on_with_what_is_seen(family: Family) -> None:
    engine, asked = native_of(family), requests(family)
    whole = answered(engine, asked)
    begun = answered(engine, asked, 4)
    for completions in begun:
        for completion in completions:
            completion.finish_reason = None
            completion.policy_versions = [0] * len(completion.tokens)
    left = [
        Request(one.prompt, one.sample_ids, completions, images=one.images)
        for one, completions in zip(asked, begun, strict=True)
        if all(completion.tokens[-1] != 0 for completion in completions)
    ]
    assert len(left) >= 3
    wanted = [
        completions for one, completions in zip(asked, whole, strict=True) if one.prompt in [o.prompt for o in left]
    ]
    for completions, expected in zip(answered(engine, left), wanted, strict=True):
        assert [one.tokens for one in completions] == [one.tokens for one in expected]
    # The same weights again, after three tokens: keys and values are computed anew, from the images.
    params = SamplingParams(SamplingConfig(temperature=1.0), 9)
    numbers = [engine.submit(request, params) for request in asked]
    results: dict[int, list[Completion]] = dict(zip(numbers, (one.begin() for one in asked), strict=True))
    for step in range(12):
        for delta in engine.step():
            results[delta.request][delta.sibling].add(delta)
        if step == 2:
            weights = [(name, weight.detach().clone()) for name, weight in engine.model.trained_weights()]
            engine.load_weights(WeightStream(iter(weights)), keep_cache=False)
            engine.policy_version = 0
    for completions, expected in zip(results.values(), whole, strict=True):
        assert [one.tokens for one in completions] == [one.tokens for one in expected]


def test_tokens_of_images_are_never_drawn() -> None:
    engine = native_of("qwen3_vl")
    reserved = sorted(engine.model.reader.reserved)  # type: ignore[attr-defined]
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    assert reserved == sorted(engine.tokenizer.convert_tokens_to_ids(names))  # type: ignore[attr-defined]
    with torch.no_grad():  # all embeddings but theirs become so small that nothing else would be drawn
        weight = engine.model.head.weight
        weight[: min(reserved)] *= 1e-3
        weight[reserved] *= 50
    for completions in answered(engine, requests("qwen3_vl")):
        for completion in completions:
            assert not set(completion.tokens) & set(reserved)
            assert min(completion.log_probs) > -20


def test_a_prompt_has_no_tokens_of_images_that_are_not_there() -> None:
    tokens, images = prompt_with([(32, 32)])
    engine, params = native_of("qwen3_vl"), SamplingParams(SamplingConfig(), 4)
    problem = r"a prompt has 16 tokens that stand for parts of images, but its \d images"
    for others in ((), (images[0].moved(1),), (*images, *images)):
        with pytest.raises(ValueError, match=problem):
            engine.submit(Request(tokens, [0], images=others), params)


def test_a_text_model_refuses_images(tiny: str) -> None:
    config = ModelConfig(path=tiny)
    engine = NativeEngine(load_causal_lm(config, "policy"), load_tokenizer(config, "policy"), frozenset({0}), 4, CPU)
    with pytest.raises(ValueError, match="a prompt has 1 images, but the model reads text alone"):
        answered(engine, [Request([1, 2, 3], [0], images=(PromptImage(1, 1, 1, picture(8, 8)),))])


def test_pixels_do_not_depend_on_other_images() -> None:
    reader = reader_of()
    _, images = prompt_with([(24, 24), (32, 32), (16, 16)])
    together = reader.pixels(images)
    apart = [reader.pixels([image]) for image in images]
    assert torch.equal(together.values, torch.cat([one.values for one in apart]))
    assert [len(one.values) for one in apart] == [4 * image.num_tokens for image in images]


def test_a_probe_has_no_tokens_that_stand_for_images() -> None:
    engine = engine_of("qwen3_vl")
    for count in (23, 24, 60):
        probe = make_probe(count, 100, engine.model.reader.reserved)
        assert not engine.model.reader.reserved & {*probe}
        assert len({*probe}) > 5
    found = probe_of(engine, make_probe(engine.vocab_size, 100, engine.model.reader.reserved))
    assert found is not None
    assert float(found.log_probs.min()) > -100


def test_pixels_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, images = model_of("qwen3_vl").reader, prompt_with([(32, 32)] * 6)[1]
    size = reader.pixels(images[:1]).values.nbytes
    monkeypatch.setattr(image_readers, "KEPT_BYTES", 3 * size)
    decoded: list[bytes] = []
    read = reader._read
    monkeypatch.setattr(reader, "_read", lambda data: decoded.append(data) or read(data))
    for place in (0, 1, 2, 0, 3, 0, 1):
        reader.pixels([images[place]])
    assert decoded == [images[place].data for place in (1, 2, 3, 1)], "what was needed least recently is forgotten"
    assert len(reader._kept) == 3


def test_attention_over_a_family_sees_its_own_images_alone() -> None:
    model = model_of("qwen3_vl").eval()
    (tokens, images), _ = prompt_with([(32, 32)]), None
    after = [image.moved(len(tokens)) for image in prompt_with([(32, 32)], seed=7)[1]]
    both, rows = torch.tensor([*tokens, *tokens]), [Rows(len(tokens), ()), Rows(len(tokens), ())]
    places = torch.arange(len(tokens)).repeat(2)
    with torch.no_grad():
        pixels = model.pixels([*images, *after], both)
        found = model(
            both,
            model.positions(places, rows, [*images, *after]),
            attention_over(rows, CPU, torch.float32),
            torch.arange(len(both)),
            images=pixels,
        )
        alone_ = model(
            both[: len(tokens)],
            model.positions(places[: len(tokens)], rows[:1], images),
            attention_over(rows[:1], CPU, torch.float32),
            torch.arange(len(tokens)),
            images=model.pixels(images, both[: len(tokens)]),
        )
    torch.testing.assert_close(found[: len(tokens)], alone_, rtol=0, atol=1e-5)
    assert not torch.allclose(found[: len(tokens)], found[len(tokens) :], atol=1e-3)


def test_paligemma_has_images_first_then_the_text_and_a_line_break() -> None:
    reader, tokenizer = reader_of("paligemma"), load_tokenizer(ModelConfig(path=vision_model("paligemma")), "policy")
    assert isinstance(reader, PaliGemmaReader)
    break_, image = [*reader._line_break], reader.token
    assert break_
    prompts = ImagePrompts(reader, "images", Path(), "data.train.images")
    text = prompts.marked("how many red squares? 3", 2, "row 0")
    tokens, images = prompts.expanded(tokenizer.encode(text), [(1, 16, b"a"), (1, 16, b"b")], "row 0")
    assert tokens == [image] * 32 + tokenizer.encode("how many red squares? 3") + break_
    assert [one.place for one in images] == [0, 16]
    reader._first = 5
    assert reader.arranged([5, image, 7, 8]) == [image, 5, 7, 8, *break_]
    assert reader.arranged([image, 7, *break_]) == [image, 5, 7, *break_]
    assert reader.arranged([7]) == [5, 7, *break_]
    reader._first = None
    with pytest.raises(RecipeError, match="row 0: an image stands behind text: models of type paligemma"):
        prompts.expanded([7, image], [(1, 16, b"a")], "row 0")


def test_a_prompt_that_is_read_in_both_directions_has_no_next_turn() -> None:
    request = Request([5, 6, 7], [1], conversation=3)
    with pytest.raises(ValueError, match="choose a model that reads in one direction"):
        native_of("paligemma").submit(request, SamplingParams(SamplingConfig(temperature=1.0), 9))


def test_what_is_read_in_both_directions_is_in_one_pass() -> None:
    store = SegmentStore({})
    texts = {
        store.add(count, 0): (None, tuple(range(count)), CachedPrompt(tuple(range(count)), (), num_both))
        for count, num_both in ((3, 3), (9, 9), (5, 4), (2, 2), (8, 4))
    }
    prompt = next(iter(texts))
    texts[store.add(4, 0)] = (prompt, (1, 2, 3, 4), CachedPrompt((1,), (), 1))  # what continues a prompt is read in one
    found = [[(one.part.begin, one.part.count, one.part.num_both) for one in parts] for parts in passes_of(texts, 6)]
    assert found == [
        [(0, 3, 3)],
        [(0, 9, 9)],
        [(0, 5, 4)],
        [(0, 2, 2), (0, 4, 4)],
        [(4, 4, 0), (0, 2, 0)],
        [(2, 2, 0)],
    ]


def test_paligemma_2_is_refused(tmp_path: Path) -> None:
    shutil.copytree(vision_model("paligemma"), tmp_path / "two")
    file = tmp_path / "two/config.json"
    about = json.loads(file.read_text())
    for text in ("gemma2", "llama"):
        about["text_config"]["model_type"] = text
        file.write_text(json.dumps(about))
        with pytest.raises(RecipeError, match=f"models of type paligemma with {text} are not supported, only gemma"):
            load_causal_lm(ModelConfig(path=str(tmp_path / "two")), "policy")


def test_positions_in_a_tree_are_those_of_each_sequence_alone() -> None:
    """An image moves what continues the part that it is in, and nothing else."""
    families = [Rows(5, (9, 4, 6, 7, 8), (-1, 0, 0, 2, -1)), Rows(4, (5,))]
    places = [1, 7, 20, 25, 33, 40]  # in the prompt, in parts that are continued, in ends, and in another family
    images = [
        PromptImage(place, rows, columns, b"")
        for place, (rows, columns) in zip(places, [(1, 2), (2, 2), (1, 3)] * 2, strict=True)
    ]
    sequences = [*sequences_of(families)]
    positions = torch.zeros(sum(one.num_tokens for one in families), dtype=torch.int64)
    for sequence in sequences:
        positions[sequence] = torch.arange(len(sequence))
    found = grid_positions(positions, families, images)
    for sequence in sequences:
        at = {place: number for number, place in enumerate(sequence.tolist())}
        own = [image._replace(place=at[image.place]) for image in images if image.place in at]
        assert len(own) > 1 or len(sequence) < 10
        alone = grid_positions(torch.arange(len(sequence)), [Rows(len(sequence), ())], own)
        assert torch.equal(found[:, sequence], alone)


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("grouped", [1, 2])
def test_attention_of_prefixes_is_that_of_a_mask(grouped: int, is_tree: bool) -> None:
    families = [Rows(5, (3, 1, 4)), Rows(2, ()), Rows(1, (2,)), Rows(3, (1, 1))]
    families += [Rows(3, (2, 1, 4, 2), (-1, 0, 0, -1))] * is_tree
    total, generator = sum(one.num_tokens for one in families), torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(total, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (2 * grouped, 2, 2)
    )
    found = PrefixAttention(families, CPU).attend(0, query, key, value, AttentionForm(0.3))
    is_seen, begin = mask_of(families), 0
    for family in families:
        is_seen[begin : begin + family.prompt, begin : begin + family.prompt] = True
        begin += family.num_tokens
    keys, values = (one.repeat_interleave(grouped, 1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.3
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values)
    torch.testing.assert_close(found, expected)
    some_gain = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    grads = [torch.autograd.grad((one * some_gain).sum(), (query, key, value)) for one in (found, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
