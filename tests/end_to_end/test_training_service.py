"""`leaderless serve --train`, asked by Tinker's own client, which is not changed.

Skipped without the package `tinker`; `make test-tinker` installs it in an environment of its own.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import start
from tests.end_to_end.test_ppo import train_until
from tests.tiny import tiny_model, write_additions, write_recipe
from tests.unit.serving.training.services import BASE, KEY, served
from torch import Tensor
from transformers import AutoModelForCausalLM

from leaderless.config.models import LoraConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.encode import RowEncoder
from leaderless.planner.workflow import load_recipe
from leaderless.serving.training.service import TrainingService

httpx = pytest.importorskip("httpx")
tinker = pytest.importorskip("tinker")
learn = importlib.import_module("examples.training_service.additions").learn
WAIT_S = 120
EPSILON = 1e-3
"""Constant of AdamW that is large next to the rounding of a gradient, which a small one makes as large as a step."""
SEQUENCES = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [20, 21, 22, 23, 24]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TrainingService]]:
    with served(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture
def client(service: tuple[str, TrainingService]) -> Iterator[Any]:
    found = tinker.ServiceClient(base_url=service[0], api_key=KEY)
    yield found
    found.close("success").result(WAIT_S)


def datum(sequence: Sequence[int], **inputs: Sequence[float]) -> Any:
    """A sequence whose tokens predict the next ones, with inputs of a loss."""
    given = {name: tinker.TensorData(data=[*values], dtype="float32") for name, values in inputs.items()}
    targets = tinker.TensorData(data=[*sequence[1:]], dtype="int64")
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([*sequence[:-1]]), loss_fn_inputs={"target_tokens": targets, **given}
    )


def texts() -> list[Any]:
    """Sequences for cross-entropy."""
    return [datum(one, weights=[0.0, *([1.0] * (len(one) - 2))]) for one in SEQUENCES]


def trained(client: Any, **options: Any) -> Any:
    """A training client."""
    return client.create_lora_training_client(BASE, rank=4, **options).result(WAIT_S)


def test_what_the_server_offers_is_listed(client: Any) -> None:
    offered = tinker.RestClient(base_url=client.holder._base_url, api_key=KEY).get_server_capabilities().result(WAIT_S)
    assert [(one.model_name, one.max_context_length) for one in offered.supported_models] == [(BASE, 512)]
    info = trained(client).get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (BASE, 4, True)


def test_passes_and_steps_lower_the_loss(client: Any) -> None:
    model = trained(client)
    losses = []
    for _ in range(4):
        passed = model.forward_backward(texts(), "cross_entropy")
        stepped = model.optim_step(tinker.AdamParams(learning_rate=0.02))
        result = passed.result(WAIT_S)
        assert stepped.result(WAIT_S).metrics["grad_norm"] > 0
        losses.append(result.metrics["loss:sum"])
        assert [len(one["logprobs"].data) for one in result.loss_fn_outputs] == [5, 2, 4]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


@functools.cache
def exact() -> Any:
    """The tiny model in double precision, from `transformers`."""
    return AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float64).eval()


@torch.no_grad()
def log_probs_after(tokens: Sequence[int]) -> Tensor:
    """Log-probabilities of all next tokens after each token, of the model without adapters."""
    found: Tensor = exact()(input_ids=torch.tensor([[*tokens]])).logits[0].log_softmax(-1)
    return found


def naive_loss(data: Sequence[Any], loss: Callable[..., float]) -> float:
    """A loss, token by token, of a model without adapters."""
    sum_ = 0.0
    for one in data:
        log_probs = log_probs_after(one.model_input.to_ints())
        inputs = {name: value.data for name, value in one.loss_fn_inputs.items()}
        targets = inputs.pop("target_tokens")
        for place, target in enumerate(targets):
            own = {name: values[place] for name, values in inputs.items()}
            sum_ += loss(float(log_probs[place, target]), **own)
    return sum_


def ppo(log_prob: float, logprobs: float, advantages: float, low: float = 0.8, high: float = 1.2) -> float:
    ratio = math.exp(log_prob - logprobs)
    return -min(ratio * advantages, min(max(ratio, low), high) * advantages)


LOSSES: dict[str, Callable[..., float]] = {
    "cross_entropy": lambda log_prob, weights: -weights * log_prob,
    "importance_sampling": lambda log_prob, logprobs, advantages: -math.exp(log_prob - logprobs) * advantages,
    "ppo": ppo,
    "cispo": lambda log_prob, logprobs, advantages: -min(math.exp(log_prob - logprobs), 4.0) * advantages * log_prob,
    "dro": lambda log_prob, logprobs, advantages: -(log_prob * advantages - 0.025 * (log_prob - logprobs) ** 2),
}


def of_policy() -> list[Any]:
    """Sequences for policy gradients, whose ratios are on both sides of both limits."""
    drawn = torch.Generator().manual_seed(0)
    data = []
    for one in SEQUENCES:
        now = log_probs_after(one[:-1])[torch.arange(len(one) - 1), torch.tensor(one[1:])]
        log_probs = now + 0.3 * torch.randn(len(now), generator=drawn)
        advantages = [0.0, *torch.randn(len(now) - 1, generator=drawn).tolist()]
        data.append(datum(one, logprobs=log_probs.tolist(), advantages=advantages))
    return data


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_a_naive_loop_in_double_precision(client: Any, name: str) -> None:
    data = texts() if name == "cross_entropy" else of_policy()
    passed = trained(client).forward(data, name).result(WAIT_S)
    wanted = naive_loss(data, LOSSES[name])
    assert passed.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6, abs=1e-5)


def test_settings_of_a_loss_are_used(client: Any) -> None:
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}
    passed = trained(client).forward(of_policy(), "ppo", config).result(WAIT_S)
    wanted = naive_loss(of_policy(), lambda *a, **k: ppo(*a, **k, low=0.5, high=3.0))
    assert passed.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-6, abs=1e-5)


def saved_weights(service: TrainingService, model: Any, name: str) -> dict[str, Tensor]:
    """Adapters that a client has saved, as they are on disk."""
    path = model.save_weights_for_sampler(name).result(WAIT_S).path
    return service.states.load(service.states.find(path))[0]


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo"])
def test_steps_are_those_of_the_trainer(client: Any, service: tuple[str, TrainingService], name: str) -> None:
    adam = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.1}
    config = OptimizerConfig(**adam, epsilon=EPSILON, max_grad_norm=0.5)
    trainer = service[1].model._instance(LoraConfig(rank=4), config, None)
    data = texts() if name == "cross_entropy" else of_policy()
    model = trained(client)
    for _ in range(3):
        passed = model.forward_backward(data, name)
        model.optim_step(tinker.AdamParams(**adam, eps=EPSILON, grad_clip_norm=0.5)).result(WAIT_S)
        own = 0.0
        for micro_batch in trainer.micro_batches(as_batch(data)):
            places = micro_batch.response_index
            inputs = {
                key: torch.cat([torch.tensor(one.loss_fn_inputs[key].data) for one in data])[places]
                for key in data[0].loss_fn_inputs
                if key != "target_tokens"
            }
            losses = LOSS_OF[name](trainer.forward(micro_batch).log_probs, **inputs)
            own += float(losses.detach().double().sum())
            losses.sum().backward()
        trainer.optimizer_step()
        assert passed.result(WAIT_S).metrics["loss:sum"] == pytest.approx(own, rel=1e-6, abs=1e-6)
    found = saved_weights(service[1], model, name)
    for key, value in trainer.named_weights():
        torch.testing.assert_close(found[key], value.detach(), atol=1e-6, rtol=0)
        assert not key.endswith("lora_B") or value.abs().max() > 1e-4


LOSS_OF: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda log_probs, weights: -log_probs * weights,
    "importance_sampling": lambda log_probs, logprobs, advantages: -(log_probs - logprobs).exp() * advantages,
    "ppo": lambda log_probs, logprobs, advantages: (
        -torch.minimum(
            (log_probs - logprobs).exp() * advantages, (log_probs - logprobs).exp().clamp(0.8, 1.2) * advantages
        )
    ),
}


def as_batch(data: Sequence[Any]) -> Batch:
    """The same sequences for the trainer, as prompts of one token and responses."""
    prompts = [one.model_input.to_ints()[:1] for one in data]
    responses = [one.loss_fn_inputs["target_tokens"].data for one in data]
    tokens = Jagged.from_lists(responses, torch.int64, "tokens")
    mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
    columns = {"prompt_tokens": Jagged.from_lists(prompts, torch.int64, "prompt_tokens"), "tokens": tokens}
    return Batch(torch.arange(len(data)), {**columns, "response_mask": mask})


def test_numbers_are_those_of_a_run_with_the_same_data(
    client: Any, service: tuple[str, TrainingService], ranks: RankPool, tmp_path: Path
) -> None:
    settings = {"learning_rate": 0.01, "beta2": 0.95, "epsilon": EPSILON}
    changes = {
        "workflow": "sft",
        "models": {"policy": {"path": tiny_model(), "lora": {"rank": 4}}},
        "data.train.response": "answer",
        "data.max_response_tokens": 8,
        "batch": {"prompts_per_step": 64, "micro_batch_tokens": 64},
        "optimizer": settings,
        "steps": 3,
    }
    file = write_recipe(tmp_path, tiny_model(), changes)
    (of_run,) = ranks.run(1, train_until, str(file), "sft", 3, init_group=False)

    recipe = load_recipe(str(file)).recipe
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    (train,) = recipe.data.train_sets().values()
    encoder = RowEncoder(service[1].model.tokenizer, train, "data.train")
    encoded = [encoder.encode(row, "row") for row in rows]
    total = sum(len(one.response) for one in encoded)
    data = [
        datum([*one.prompt, *one.response], weights=[0.0] * (len(one.prompt) - 1) + [1 / total] * len(one.response))
        for one in encoded
    ]
    model = trained(client)
    for _ in range(3):
        model.forward_backward(data, "cross_entropy")
        model.optim_step(tinker.AdamParams(learning_rate=0.01, beta2=0.95, eps=EPSILON, grad_clip_norm=1.0)).result(
            WAIT_S
        )
    found = saved_weights(service[1], model, "as-a-run")
    for name, value in found.items():
        torch.testing.assert_close(value, of_run[f"policy.weights.{name}"], atol=1e-6, rtol=0)


def test_a_loss_of_the_clients_own_has_the_gradient_of_the_built_in_one(
    client: Any, service: tuple[str, TrainingService]
) -> None:
    def own(data: Sequence[Any], log_probs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weights = [torch.tensor(one.loss_fn_inputs["weights"].data) for one in data]
        return -sum((a * b).sum() for a, b in zip(log_probs, weights, strict=True)), {"own:mean": 1.0}  # type: ignore[return-value]

    custom, plain = trained(client), trained(client)
    passed = custom.forward_backward_custom(texts(), own)
    custom.optim_step(tinker.AdamParams(learning_rate=0.01)).result(WAIT_S)
    plain.forward_backward(texts(), "cross_entropy")
    plain.optim_step(tinker.AdamParams(learning_rate=0.01)).result(WAIT_S)
    assert passed.result(WAIT_S).metrics["own:mean"] == 1.0
    wanted = saved_weights(service[1], plain, "plain")
    for name, value in saved_weights(service[1], custom, "custom").items():
        torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=0)


def test_gradients_add_up_until_a_step_and_forward_adds_none(client: Any, service: tuple[str, TrainingService]) -> None:
    parts, whole = trained(client), trained(client)
    for one in texts():
        parts.forward_backward([one], "cross_entropy")
    parts.forward(texts(), "cross_entropy")
    whole.forward_backward(texts(), "cross_entropy")
    for model in (parts, whole):
        model.optim_step(tinker.AdamParams(learning_rate=0.01)).result(WAIT_S)
    wanted = saved_weights(service[1], whole, "whole")
    for name, value in saved_weights(service[1], parts, "parts").items():
        torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=0)
    nothing = parts.optim_step(tinker.AdamParams(learning_rate=0.01))
    with pytest.raises(tinker.RequestFailedError, match="there is no gradient"):
        nothing.result(WAIT_S)


def drawn(sampler: Any, seed: int = 3, count: int = 4, **params: Any) -> list[tuple[list[int], list[float], str]]:
    """Samples, with their log-probabilities and the reasons for their ends."""
    wanted = tinker.SamplingParams(**{"max_tokens": 12, "seed": seed, **params})
    found = sampler.sample(tinker.ModelInput.from_ints([5, 6, 7]), count, wanted).result(WAIT_S)
    return [(one.tokens, one.logprobs, one.stop_reason) for one in found.sequences]


def test_samples_have_the_log_probs_of_training(client: Any) -> None:
    model = trained(client)
    model.forward_backward(texts(), "cross_entropy")
    model.optim_step(tinker.AdamParams(learning_rate=0.05)).result(WAIT_S)
    sampler = model.save_weights_and_get_sampling_client().result(WAIT_S)
    samples = drawn(sampler)
    assert len({tuple(tokens) for tokens, *_ in samples}) > 1
    data = [datum([5, 6, 7, *tokens], weights=[1.0] * (len(tokens) + 2)) for tokens, *_ in samples]
    passed = model.forward(data, "cross_entropy").result(WAIT_S)
    for (tokens, log_probs, _), output in zip(samples, passed.loss_fn_outputs, strict=True):
        of_training = output["logprobs"].data
        assert log_probs == pytest.approx(of_training[-len(tokens) :], abs=1e-5)
        of_prompt = sampler.compute_logprobs(tinker.ModelInput.from_ints([5, 6, 7, *tokens])).result(WAIT_S)
        assert of_prompt[0] is None
        assert of_prompt[1:] == pytest.approx(of_training, abs=1e-6)


def test_samples_follow_from_their_seed_and_end_where_they_should(client: Any) -> None:
    sampler = client.create_sampling_client(base_model=BASE).result(WAIT_S)
    whole = drawn(sampler, stop=[])
    assert drawn(sampler, stop=[]) == whole != drawn(sampler, seed=4, stop=[])
    assert {len(tokens) for tokens, *_ in whole} == {12}
    assert {reason for *_, reason in whole} == {"length"}
    end = whole[0][0][3]
    for (tokens, _, reason), (before, *_) in zip(drawn(sampler, stop=[end]), whole, strict=True):
        cut = before[: before.index(end) + 1] if end in before else before
        assert (tokens, reason) == (cut, "stop" if end in before else "length")
    assert len({tuple(tokens) for tokens, *_ in drawn(sampler, temperature=0.0, stop=[])}) == 1
    tail = sampler.sample(
        tinker.ModelInput.from_ints([5, 6, 7, 8]),
        1,
        tinker.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
    ).result(WAIT_S)
    assert [one is None for one in tail.prompt_logprobs] == [True, True, False, False]


def test_a_sampler_keeps_its_weights(client: Any) -> None:
    model = trained(client)
    before = model.save_weights_and_get_sampling_client().result(WAIT_S)
    first = drawn(before)
    assert first == drawn(client.create_sampling_client(base_model=BASE).result(WAIT_S))
    model.forward_backward(texts(), "cross_entropy")
    model.optim_step(tinker.AdamParams(learning_rate=0.05)).result(WAIT_S)
    path = model.save_weights_for_sampler("later").result(WAIT_S).path
    assert drawn(before) == first
    assert drawn(client.create_sampling_client(model_path=path).result(WAIT_S)) != first


def test_a_sampler_is_released_for_newer_ones_unless_it_is_used(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaderless.serving.training.service.SAMPLERS", 2)
    first, second = (client.create_sampling_client(base_model=BASE).result(WAIT_S) for _ in range(2))
    samples = drawn(first)
    third = client.create_sampling_client(base_model=BASE).result(WAIT_S)
    assert drawn(first) == drawn(third) == samples
    with pytest.raises(tinker.NotFoundError, match="released for 2 newer ones"):
        drawn(second)


def test_a_request_for_samples_is_canceled_with_its_future(client: Any, service: tuple[str, TrainingService]) -> None:
    sampler = client.create_sampling_client(base_model=BASE).result(WAIT_S)
    params = tinker.SamplingParams(max_tokens=500, stop=[])
    future = sampler.sample(tinker.ModelInput.from_ints([5]), 64, params)
    session = service[1].session(client.holder.get_session_id())
    (lane,) = session.lanes.values()
    deadline = time.monotonic() + WAIT_S
    while not lane.is_ready() and time.monotonic() < deadline:
        time.sleep(0.01)
    future.future().cancel()
    while lane.is_ready() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lane.is_ready()
    assert len(drawn(sampler)) == 4


def losses_of(model: Any, steps: int) -> list[float]:
    """The losses of some steps, to the last bit."""
    found = []
    for _ in range(steps):
        passed = model.forward_backward(of_policy(), "importance_sampling")
        model.optim_step(tinker.AdamParams(learning_rate=0.003)).result(WAIT_S)
        found.append(passed.result(WAIT_S).metrics["loss:sum"])
    return found


def test_a_saved_state_continues_bit_by_bit(client: Any) -> None:
    whole = losses_of(trained(client, seed=1), 6)
    model = trained(client, seed=1)
    assert losses_of(model, 3) == whole[:3]
    path = model.save_state("half").result(WAIT_S).path
    with_optimizer = client.create_training_client_from_state_with_optimizer(path).result(WAIT_S)
    assert losses_of(with_optimizer, 3) == whole[3:]
    weights_alone = losses_of(client.create_training_client_from_state(path).result(WAIT_S), 3)
    assert weights_alone[0] == whole[3]
    assert weights_alone != whole[3:]
    model.load_state_with_optimizer(path).result(WAIT_S)
    assert losses_of(model, 3) == whole[3:]


def test_saved_states_are_listed_replaced_and_removed(client: Any) -> None:
    model = trained(client)
    rest = tinker.RestClient(base_url=client.holder._base_url, api_key=KEY)
    path = model.save_state("a", user_metadata={"step": "0"}).result(WAIT_S).path
    with pytest.raises(tinker.RequestFailedError, match="'a' is taken"):
        model.save_state("a").result(WAIT_S)
    assert model.save_state("a", overwrite=True).result(WAIT_S).path == path
    model.save_weights_for_sampler("b").result(WAIT_S)
    listed = rest.list_checkpoints(model.model_id).result(WAIT_S).checkpoints
    assert [one.checkpoint_id for one in listed] == ["sampler_weights/b", "weights/a"]
    assert rest.get_weights_info_by_tinker_path(path).result(WAIT_S).lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    with pytest.raises(tinker.BadRequestError, match="is not saved here"):
        client.create_training_client_from_state(path).result(WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="must be 1 to 128 letters"):
        model.save_state("../b").result(WAIT_S)


def script(client: Any, others: Callable[[], None] = lambda: None) -> list[object]:
    """What a client gets from a small run, in which others do something between two steps."""
    model, found = trained(client, seed=7), list[object]()
    for step in range(3):
        others()
        passed = model.forward_backward(of_policy(), "importance_sampling")
        model.optim_step(tinker.AdamParams(learning_rate=0.02)).result(WAIT_S)
        result = passed.result(WAIT_S)
        found += [result.metrics, [one["logprobs"].data for one in result.loss_fn_outputs]]
        sampler = model.save_weights_and_get_sampling_client().result(WAIT_S)
        others()
        found.append(drawn(sampler, seed=step))
    return found


def test_a_client_gets_the_same_bits_whether_others_are_there_or_not(
    client: Any, service: tuple[str, TrainingService]
) -> None:
    alone = script(client)
    second = tinker.ServiceClient(base_url=service[0], api_key=KEY)
    other = trained(second, seed=8)
    sampler = other.save_weights_and_get_sampling_client().result(WAIT_S)
    pending: list[Any] = []

    def disturb() -> None:
        pending.append(other.forward_backward(texts(), "cross_entropy"))
        pending.append(other.optim_step(tinker.AdamParams(learning_rate=0.1)))
        prompt = tinker.ModelInput.from_ints([9, 9])
        pending.append(sampler.sample(prompt, 3, tinker.SamplingParams(max_tokens=20, stop=[])))

    assert script(client, disturb) == alone
    assert all(one.result(WAIT_S) is not None for one in pending)
    second.close("success").result(WAIT_S)


def test_a_policy_learns_from_rewards(client: Any) -> None:
    model, prompt, means = trained(client, seed=0), [5, 6, 7], list[float]()
    for step in range(14):
        sampler = model.save_weights_and_get_sampling_client().result(WAIT_S)
        samples = drawn(sampler, seed=step, count=64, max_tokens=2, stop=[])
        rewards = [float(tokens[0] % 2) for tokens, *_ in samples]  # the first token should be odd
        means.append(sum(rewards) / len(rewards))
        data = [
            datum([*prompt, *tokens], logprobs=[0.0, 0.0, *log_probs], advantages=[0.0, 0.0, *[reward - means[-1]] * 2])
            for (tokens, log_probs, _), reward in zip(samples, rewards, strict=True)
        ]
        model.forward_backward(data, "importance_sampling")
        model.optim_step(tinker.AdamParams(learning_rate=0.02)).result(WAIT_S)
    assert means[0] < 0.8
    assert means[-1] > 0.9


def test_the_example_trains_and_saves(
    service: tuple[str, TrainingService], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "test"):
        write_additions(tmp_path / f"{name}.jsonl", 40)
    curve = learn(service[0], tmp_path, steps=2, every=1)
    assert len(curve) == 3
    path = re.findall(r"saved as (tinker://\S+)", capsys.readouterr().out)[0]
    assert service[1].states.find(path).kind == "weights"


def test_wrong_requests_are_refused_and_those_after_them_are_carried_out(client: Any) -> None:
    model = trained(client)
    wrong = [
        (texts(), "gspo", "loss_fn='gspo' is not offered here"),
        ([datum([5, 6, 7], weights=[1.0])], "cross_entropy", "has 1 values for 2 tokens"),
        ([datum([5, 6, 99], weights=[1.0, 1.0])], "cross_entropy", "has token 99, but the model knows 0 to 82"),
        ([datum([5, 6, 7], weights=[1.0, math.nan])], "cross_entropy", "not finite"),
        ([datum([5, 6, 7])], "cross_entropy", "lacks 'weights'"),
        ([datum([5, 6] * 300, weights=[1.0] * 599)], "cross_entropy", "has 599 tokens: send between 1 and 512"),
        (texts(), "ppo", "lacks 'logprobs'"),
    ]
    futures = [model.forward_backward(data, loss) for data, loss, _ in wrong]
    futures.append(model.save_state("a/b"))
    good = model.forward_backward(texts(), "cross_entropy")
    for future, message in zip(futures, [*(one for *_, one in wrong), "must be 1 to 128 letters"], strict=True):
        with pytest.raises(tinker.RequestFailedError, match=re.escape(message)):
            future.result(WAIT_S)
    assert good.result(WAIT_S).metrics["loss:sum"] > 0
    with pytest.raises(tinker.BadRequestError, match="base_model='other' is not served here"):
        client.create_lora_training_client("other").result(WAIT_S)
    with pytest.raises(tinker.BadRequestError, match="unembedding alone"):
        client.create_lora_training_client(BASE, train_mlp=False, train_attn=False).result(WAIT_S)
    sampler = client.create_sampling_client(base_model=BASE).result(WAIT_S)
    with pytest.raises(tinker.BadRequestError, match="more than the 512"):
        sampler.sample(tinker.ModelInput.from_ints([5]), 1, tinker.SamplingParams(max_tokens=600)).result(WAIT_S)


def test_a_killed_server_has_what_clients_know_to_be_saved(client: Any, tmp_path: Path) -> None:
    wanted = losses_of(trained(client, seed=1), 6)
    url, process = started(tmp_path)
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    model = trained(client, seed=1)
    assert losses_of(model, 3) == wanted[:3]
    path = model.save_state("half").result(WAIT_S).path
    losses_of(model, 1)
    model.save_state("cut")  # whether it is there, the client was not told
    process.kill()
    process.wait(WAIT_S)
    client.holder.close()
    url, process = started(tmp_path)
    try:
        client = tinker.ServiceClient(base_url=url, api_key=KEY)
        lost = json.dumps({"model_id": model.model_id})
        assert post(url, "get_info", lost)[0] == 404
        assert "the newest state that was saved is tinker://" in post(url, "get_info", lost)[1]
        resumed = client.create_training_client_from_state_with_optimizer(path).result(WAIT_S)
        assert losses_of(resumed, 3) == wanted[3:]
        client.close("success").result(WAIT_S)
    finally:
        process.terminate()
        process.wait(WAIT_S)


def started(folder: Path) -> tuple[str, subprocess.Popen[str]]:
    """The address of a server in a process of its own."""
    options = ["--train", "--port", "0", "--name", BASE, "--directory", str(folder / "killed")]
    arguments = ["leaderless", "serve", tiny_model(), *options, "--compute-dtype", "float32"]
    process = start(folder, *arguments)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"at (http://\S+?),", line):
            return found[1], process
    raise AssertionError("the server has not started")


def post(url: str, path: str, body: str, kind: str = "application/json", **headers: str) -> tuple[int, str]:
    """Status and text of an answer."""
    answer = httpx.post(f"{url}/api/v1/{path}", content=body, headers={"content-type": kind, **headers}, timeout=WAIT_S)
    return answer.status_code, answer.text
