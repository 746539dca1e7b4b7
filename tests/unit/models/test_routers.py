"""Choices of experts: what the engine records is what the model chose, and what training replays."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from tests.pictures import SIZES, prompt_with, vision_model
from tests.tiny import add_gradients, random_samples, tiny_model
from tests.unit.recipes import make_recipe, plan_of, write_model
from tests.unit.rollout.test_native_engine import PROMPTS, model_of
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.images import pack_images
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.stream import WeightStream
from leaderless.environments.protocol import Environment, Observation, Task, Turn
from leaderless.models.attention.packed import PackedAttention
from leaderless.models.attention.shared_prompts import attention_over
from leaderless.models.causal_lm import CausalLM, load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.routers import Routers
from leaderless.rollout.engine import Completion, Delta, Request, SamplingParams, generate
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.paged_attention import attend_with_torch
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions
from leaderless.stages.episode_rollout import play_tasks
from leaderless.stages.episode_samples import Play
from leaderless.training.fsdp import FsdpEngine

CPU = torch.device("cpu")
OWN = "tests.contracts.plain_engine:make"
ALONE = ProcessGroup((0,), 0)
PARAMS = SamplingParams(SamplingConfig(temperature=1.2), 9)


def recording(model: CausalLM, max_sequences: int = 64, pool_tokens: int | None = None) -> NativeEngine:
    """The engine with slots or, with a pool of some tokens, that with pages."""
    tokenizer = load_tokenizer(ModelConfig(path=tiny_model()), "policy")
    routers = Routers.required(model, "models.policy")
    if pool_tokens is None:
        return NativeEngine(model, tokenizer, frozenset({0}), max_sequences, CPU, routers=routers)
    options = PagedOptions(attend_with_torch, pool_tokens, 32, page_tokens=8)
    return PagedEngine(model, tokenizer, frozenset({0}), max_sequences, CPU, options, routers)


def trainer(model: CausalLM, micro_batch_tokens: int = 4096) -> FsdpEngine:
    return FsdpEngine(model, ModelConfig(path="unused", compute_dtype="float32"), ALONE, CPU, micro_batch_tokens)


@torch.no_grad()
def choices_of(tokens: list[int], model: CausalLM) -> list[bytes]:
    """The experts that a model chooses for each token of a text."""
    routers = Routers.required(model, "models.policy")
    routers.begin()
    count = len(tokens)
    model(torch.tensor(tokens), torch.arange(count), PackedAttention([count], CPU), torch.tensor([count - 1]))
    return [row.tobytes() for row in routers.now.choices().numpy()]


def samples(prompts: list[list[int]], completions: list[Completion]) -> Batch:
    tokens = Jagged.from_lists([c.tokens for c in completions], torch.int64, "tokens")
    recorded = [torch.tensor(list(b"".join(c.experts)), dtype=torch.uint8) for c in completions]
    lengths = torch.tensor([len(row) for row in recorded])
    columns = {
        "prompt_tokens": Jagged.from_lists(prompts, torch.int64, "prompt_tokens"),
        "tokens": tokens,
        "response_mask": Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens"),
        "temperatures": Jagged(torch.full((len(tokens.values),), 1.2), tokens.lengths, "response_tokens"),
        "experts": Jagged(torch.cat(recorded), lengths, "experts"),
    }
    return Batch(torch.arange(len(completions)), columns)


@pytest.mark.parametrize("max_sequences", [3, 64])
def test_the_engine_records_what_the_model_chooses(max_sequences: int) -> None:
    requests = [Request(prompt, [10 * i, 10 * i + 1][: 1 + i % 2]) for i, prompt in enumerate(PROMPTS)]
    results = generate(recording(model_of("qwen3_moe"), max_sequences), requests, PARAMS)
    for request, completions in zip(requests, results, strict=True):
        for completion in completions:
            text = [*request.prompt, *completion.tokens[:-1]]
            assert completion.experts == choices_of(text, model_of("qwen3_moe"))


@pytest.mark.parametrize("pool_tokens", [None, 4096])
def test_a_resumed_response_keeps_the_choices_that_sampled_it(pool_tokens: int | None) -> None:
    engine, request = recording(model_of("qwen3_moe"), pool_tokens=pool_tokens), Request(PROMPTS[1], [1, 2])
    (begun,) = generate(engine, [request], PARAMS.limited_to(4))
    begun = [Completion(c.tokens, c.log_probs, None, c.policy_versions, c.experts) for c in begun]
    other = model_of("qwen3_moe")
    with torch.no_grad():
        for layer in other.model.model.layers:
            layer.mlp.gate.weight.add_(0.3 * torch.randn(4, 32, generator=torch.Generator().manual_seed(2)))
    weights = [(name, weight.detach()) for name, weight in other.model.named_parameters()]
    engine.load_weights(WeightStream(iter(weights), 1))
    (results,) = generate(engine, [Request(request.prompt, [1, 2], begun)], PARAMS)
    for before, after in zip(begun, results, strict=True):
        num_kept = len(request.prompt) + 3
        assert after.experts[:num_kept] == before.experts
        again = choices_of([*request.prompt, *after.tokens[:-1]], other)
        assert len(after.experts) == len(again)
        assert after.experts[num_kept:] == again[num_kept:]
        assert after.experts != again


@pytest.mark.parametrize("way", [SamplingConfig(temperature=1.2), None], ids=["one way", "several ways"])
@pytest.mark.parametrize("pool_tokens", [4096, 120], ids=["enough pages", "few pages"])
def test_pages_give_the_tokens_and_choices_of_slots(
    pool_tokens: int, way: SamplingConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted, preempt = list[int](), PagedEngine._preempt
    monkeypatch.setattr(PagedEngine, "_preempt", lambda self: (preempted.append(len(self._active)), preempt(self)))
    results = []
    for pool in (None, pool_tokens):
        engine, gained = recording(model_of("qwen3_moe"), 8, pool), dict[int, list[Delta]]()
        for number, prompt in enumerate(PROMPTS):
            distribution = way or SamplingConfig(temperature=0.8 + 0.4 * (number % 2))
            engine.submit(Request(prompt, [10 * number, 10 * number + 1]), SamplingParams(distribution, 14, seed=3))
        while any(not one[-1].finish_reason for one in gained.values()) or len(gained) < 2 * len(PROMPTS):
            for delta in engine.step():
                gained.setdefault(2 * delta.request + delta.sibling, []).append(delta)
        results.append(
            {
                key: ([t for d in deltas for t in d.tokens], [e for d in deltas for e in d.experts])
                for key, deltas in gained.items()
            }
        )
    assert results[0] == results[1]
    for key, (tokens, experts) in results[1].items():
        text = [*PROMPTS[key // 2 - 1], *tokens[:-1]]
        assert experts == choices_of(text, model_of("qwen3_moe"))
    assert bool(preempted) == (pool_tokens == 120)


@pytest.mark.parametrize("pool_tokens", [None, 4096])
def test_a_kept_conversation_keeps_its_choices(pool_tokens: int | None) -> None:
    engine, text, number = recording(model_of("qwen3_moe"), pool_tokens=pool_tokens), list(PROMPTS[0]), 7
    for turn in range(3):
        ((completion,),) = generate(engine, [Request(text, [turn], (), number)], PARAMS.limited_to(4))
        text += completion.tokens
        assert completion.experts == choices_of(text[:-1], model_of("qwen3_moe"))
        text += [5, 6]


def test_replayed_choices_of_the_same_weights_change_nothing() -> None:
    groups = generate(
        recording(model_of("qwen3_moe")), [Request(p, [i, 50 + i]) for i, p in enumerate(PROMPTS)], PARAMS
    )
    prompts = [list(prompt) for prompt in PROMPTS for _ in range(2)]
    rows = samples(prompts, [completion for group in groups for completion in group])
    engine = trainer(model_of("qwen3_moe"))
    replayed = engine.log_probs(rows).values
    assert torch.equal(replayed, engine.log_probs(rows.only(set(rows.names()) - {"experts"})).values)
    assert replayed.tolist() == pytest.approx([one for g in groups for c in g for one in c.log_probs], abs=1e-4)


def test_choices_for_images_are_recorded_replayed_and_counted() -> None:
    config = ModelConfig(path=vision_model("qwen3_vl_moe"))
    model = load_causal_lm(config, "policy").eval()
    routers, tokenizer = Routers.required(model, "models.policy"), load_tokenizer(config, "policy")
    assert routers.layers == [0, 1]
    sampling = NativeEngine(model.requires_grad_(False), tokenizer, frozenset({0}), 64, CPU, routers=routers)
    prompts = [prompt_with(one, "qwen3_vl_moe", seed) for seed, one in enumerate(SIZES[:3])]
    asked = [Request(tokens, [place], images=seen) for place, (tokens, seen) in enumerate(prompts)]
    found = [one for (one,) in generate(sampling, asked, SamplingParams(SamplingConfig(temperature=1.2), 9))]
    rows = samples([tokens for tokens, _ in prompts], found)
    images = Jagged.from_lists([list(pack_images(seen)) for _, seen in prompts], torch.uint8, "image_bytes")
    rows = rows.with_columns(images=images)
    trained = load_causal_lm(config, "policy")
    engine = FsdpEngine(trained, config, ALONE, CPU, 4096, optimizer=OptimizerConfig())
    replayed = engine.log_probs(rows).values
    assert torch.equal(replayed, engine.log_probs(rows.only(set(rows.names()) - {"experts"})).values)
    assert replayed.tolist() == pytest.approx([one for c in found for one in c.log_probs], abs=1e-4)
    recorded = rows.jagged("experts")
    others = rows.with_columns(experts=Jagged((recorded.values + 1) % 4, recorded.lengths, "experts"))
    assert (engine.log_probs(others).values - replayed).abs().max() > 1e-3
    add_gradients(engine, rows, lambda outputs, _: -outputs.log_probs.sum())
    counts, sums = engine.expert_loads()
    sampled = len(rows.jagged("tokens").values)
    assert counts.sum(1).tolist() == [2 * sampled] * 2
    assert sums.sum(1).tolist() == pytest.approx([sampled] * 2)


def test_replay_brings_the_trainer_closer_where_routers_differ() -> None:
    groups = generate(recording(model_of("qwen3_moe")), [Request(p, [i]) for i, p in enumerate(PROMPTS)], PARAMS)
    rows = samples([list(prompt) for prompt in PROMPTS], [completion for (completion,) in groups])
    moved = model_of("qwen3_moe")
    with torch.no_grad():
        for layer in moved.model.model.layers:
            layer.mlp.gate.weight.add_(0.02 * torch.randn(4, 32, generator=torch.Generator().manual_seed(3)))
    engine = trainer(moved)
    sampled = torch.tensor([one for (completion,) in groups for one in completion.log_probs])
    without = (engine.log_probs(rows.only(set(rows.names()) - {"experts"})).values - sampled).abs().max()
    assert (engine.log_probs(rows).values - sampled).abs().max() < 0.5 * without


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_gradient_of_replayed_choices_is_that_of_finite_differences(family: str) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {
        "qwen3_moe": Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
        "mixtral": MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2),
    }[family]
    router = AutoModelForCausalLM.from_config(config).model.layers[0].mlp.gate.double()
    noise = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(router.weight, generator=noise)
    routers, hidden = Routers([router], [0]), torch.randn(5, 8, dtype=torch.double, generator=noise)
    chosen = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [0, 1]], dtype=torch.uint8)
    gains = torch.randn(5, 2, dtype=torch.double, generator=noise)

    def gain(weight: Tensor) -> Tensor:
        routers.begin(chosen)
        logits, scores, experts = torch.func.functional_call(router, {"weight": weight}, (hidden,))
        assert torch.equal(experts, chosen.long())
        expected = logits.gather(1, experts).softmax(1)
        torch.testing.assert_close(scores.double(), expected, atol=1e-6, rtol=0)
        return (gains * scores).sum()

    weight = router.weight.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(gain(weight), weight)
    assert slope.abs().max() > 0.01
    for place in range(0, weight.numel(), 3):
        step = torch.zeros(weight.numel(), dtype=torch.double)
        step[place] = 4e-3
        ends = [float(gain(weight.detach() + sign * step.view_as(weight))) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / 8e-3 == pytest.approx(float(slope.flatten()[place]), abs=3e-4)


def balanced(engine: FsdpEngine, rows: Batch) -> None:
    """Add the gradient of unequal loads alone."""
    engine.balance_experts(rows, 0.5)
    for micro_batch in engine.micro_batches(rows):
        (0.0 * engine.forward(micro_batch).log_probs.sum()).backward()


def trained(micro_batch_tokens: int) -> FsdpEngine:
    optimizer, config = OptimizerConfig(learning_rate=1e-2), ModelConfig(path="unused", compute_dtype="float32")
    return FsdpEngine(model_of("qwen3_moe"), config, ALONE, CPU, micro_batch_tokens, optimizer=optimizer)


def test_balancing_adds_the_gradient_of_the_loss_of_loads_over_all_micro_batches() -> None:
    rows, engine = random_samples([(3, 9), (7, 1), (5, 14), (6, 0), (2, 5)], siblings=2), trained(30)
    assert len(engine.micro_batches(rows)) > 1
    balanced(engine, rows)
    plain = model_of("qwen3_moe")
    logits: list[Tensor] = []
    for layer in plain.model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, outputs: logits.append(outputs[0]))
    (whole,) = trained(4096).micro_batches(rows)
    plain(whole.tokens, whole.positions, attention_over(whole.families, CPU, torch.float32), whole.select)
    terms = []
    for layer_logits in logits:
        probabilities = layer_logits.index_select(0, whole.select).softmax(1)
        shares = probabilities.topk(2).indices.flatten().bincount(minlength=4) / (2 * len(whole.select))
        terms.append(4 * (shares * probabilities.mean(0)).sum())
    loss = 0.5 * torch.stack(terms).mean()
    names = [name for name, _ in plain.model.named_parameters()]
    slopes = torch.autograd.grad(loss, list(plain.model.parameters()), allow_unused=True)
    found = {name: parameter.grad for name, parameter in engine.named_weights()}
    for name, slope in zip(names, slopes, strict=True):
        if slope is not None:
            torch.testing.assert_close(found[name], slope, atol=1e-6, rtol=1e-4)
    counts, sums = engine.expert_loads()
    assert counts.sum(1).tolist() == [2 * len(whole.select)] * 2
    shares, means = counts / (2 * len(whole.select)), sums / len(whole.select)
    assert float(0.5 * 4 * (shares * means).sum(1).mean()) == pytest.approx(loss.item())


def test_balancing_makes_loads_more_equal() -> None:
    rows, engine = random_samples([(5, 30)] * 8), trained(4096)
    peaks = []
    for _ in range(30):
        balanced(engine, rows)
        peaks.append(float(engine.expert_loads()[0].amax()))
        engine.optimizer_step()
    assert peaks[-1] < 0.8 * peaks[0]


def test_a_model_without_known_routers_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"models\.policy: has no routers whose choices algorithm.replay_experts"):
        Routers.required(model_of("llama"), "models.policy")


def test_choices_of_another_model_are_not_replayed() -> None:
    ((completion,),) = generate(recording(model_of("qwen3_moe")), [Request(PROMPTS[0], [0])], PARAMS)
    wrong = Completion(completion.tokens, experts=[one[:3] for one in completion.experts])
    with pytest.raises(RuntimeError, match=r"3 experts were recorded for each token, but .* chooses 2 in each of 2"):
        trainer(model_of("qwen3_moe")).log_probs(samples([PROMPTS[0]], [wrong]))
    with pytest.raises(RuntimeError, match="the model that replays them has none"):
        trainer(model_of("llama")).log_probs(samples([PROMPTS[0]], [completion]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "algorithm.replay_experts: is set, but the model of 'policy' has no experts"),
        ({"engine": "native"}, "has 256 experts, and a record can tell 255 apart"),
        (
            {"engine": OWN},
            f"the engine '{OWN}' of 'policy' does not record .*: set rollout.engine to native or vllm or ",
        ),
    ],
)
def test_replay_that_cannot_be_is_refused_in_the_plan(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    count = 256 if settings.get("engine") == "native" else 4
    sizes = {"model_type": "qwen3_moe", "num_experts": count, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = write_model(tmp_path / "model", **(sizes if settings else {}))
    with pytest.raises(RecipeError, match=message):
        plan_of("grpo", 2, models={"policy": model}, rollout=settings, algorithm={"replay_experts": True})


class Repeat(Environment):
    """Says a digit three times, of which the second turn depends on the policy."""

    def reset(self, task: Task, rng: Random) -> Observation:
        self.turn, self.digit = 0, rng.randrange(10)
        return f"{task['question']}{self.digit}"

    def act(self, text: str) -> Turn:
        self.turn += 1
        return Turn(f"{text[:1]}={self.digit}", reward=1.0, done=self.turn == 3)


@pytest.mark.parametrize("max_sequences", [1, 64], ids=["read again", "kept"])
def test_samples_of_episodes_have_the_choices_of_all_turns(max_sequences: int) -> None:
    recipe = make_recipe(
        environment={"type": f"{__name__}:Repeat", "max_turns": 5},
        data={"train": {"path": "rows.jsonl", "template": "plain"}},
        rollout={"max_response_tokens": 5},
    )
    engine = recording(model_of("qwen3_moe"), max_sequences)
    columns = {"rows": ({"question": "1+1"}, {"question": "a"})}
    tasks, play = Batch(torch.tensor([3, 4]), columns), Play([SamplingConfig()] * 2, 0, 10, 5)
    data = [recipe.data.train] * 2
    played = play_tasks(engine, play, tasks, data, recipe, engine.tokenizer, lambda _: None)  # type: ignore[arg-type]
    rows = played.samples().with_columns(experts=played.experts())
    texts = zip(rows.jagged("prompt_tokens").to_lists(), rows.jagged("tokens").to_lists(), strict=True)
    expected = [b"".join(choices_of([*prompt, *tokens[:-1]], model_of("qwen3_moe"))) for prompt, tokens in texts]
    assert [row.numpy().tobytes() for row in rows.jagged("experts").rows()] == expected
    assert all(turns[-1] == 2 for turns in rows.jagged("turns").to_lists())


def test_what_was_not_recorded_is_chosen_by_the_router() -> None:
    requests = [Request(prompt, [i]) for i, prompt in enumerate(PROMPTS)]
    groups = generate(recording(model_of("qwen3_moe")), requests, PARAMS)
    found = [completion for (completion,) in groups]
    found[1].experts[3:] = [bytes([255] * 4)] * (len(found[1].experts) - 3)
    found[2].experts.clear()
    rows = samples([list(prompt) for prompt in PROMPTS], found)
    engine = trainer(model_of("qwen3_moe"))
    plain = engine.log_probs(rows.only(set(rows.names()) - {"experts"})).values
    assert torch.equal(engine.log_probs(rows).values, plain)
