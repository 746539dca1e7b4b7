"""What external engines have in common, with a driver that fails on demand."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.ranks import RankPool
from tests.distributed.test_experts import experts_model
from tests.engines import ALONE, CopyDriver, change_weights, colocated, expected_log_probs, make_external, make_trainer
from tests.tiny import tiny_model

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.remote.messages import Ask, Gain
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.transport import Transport
from leaderless.distributed.weights.blocks import Pool, even_rows, everything
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import Probe, WeightStream, send_weights
from leaderless.models.causal_lm import empty_causal_lm
from leaderless.models.loading.weight_sources import form_of
from leaderless.models.routers import UNKNOWN
from leaderless.planner import Layout
from leaderless.rollout.engine import (
    PROBE_TOLERANCE,
    TOKENS_AT_ONCE,
    Completion,
    Request,
    SamplingParams,
    check_probe,
    derive_seed,
    generate,
    make_probe,
)
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.weight_sources import Fed, held_by, probe_of, shapes_of

REQUESTS = [Request([5, 6, 7], [1, 2]), Request([9, 8], [3])]
PARAMS = SamplingParams(SamplingConfig(), 6)


def test_weights_are_loaded_once_for_each_policy_version() -> None:
    driver, trainer = CopyDriver(tiny_model()), make_trainer(tiny_model())
    engine = make_external(driver)
    serving = colocated(engine, trainer)
    for _ in range(2):
        with serving.phase():
            assert driver.is_awake
        assert not driver.is_awake
    once = driver.calls["load"]
    assert once > 1, "in several buckets"
    assert driver.calls["prompt_log_probs"] == 1
    change_weights(trainer)
    with serving.phase():
        results = generate(engine, REQUESTS, PARAMS)
    assert driver.calls["load"] == 2 * once
    for request, group in zip(REQUESTS, results, strict=True):
        for completion in group:
            expected = expected_log_probs(trainer, request, completion)
            assert completion.log_probs == pytest.approx(expected, abs=1e-4)


def test_weights_are_kept_only_where_no_update_comes_next() -> None:
    driver, trainer = CopyDriver(tiny_model()), make_trainer(tiny_model())
    engine, kept = make_external(driver), list[bool]()
    serving = colocated(engine, trainer)
    for num_servings in (2, 2, 1, 2):
        for _ in range(num_servings):
            with serving.phase():
                results = generate(engine, REQUESTS, PARAMS)
            kept.append(float(next(driver._model.parameters()).detach().std()) > 1e-6)
            expected = expected_log_probs(trainer, REQUESTS[0], results[0][0])
            assert results[0][0].log_probs == pytest.approx(expected, abs=1e-4)
        change_weights(trainer)
    assert kept == [True, True, True, False, True, False, False]
    assert driver.calls["prompt_log_probs"] == 5, "loaded for each version, and once more where an update did not come"


def test_a_single_token_may_differ_by_more_than_all_do_on_average() -> None:
    found, probe, tolerance = torch.zeros(31), Probe(range(32), torch.zeros(31)), PROBE_TOLERANCE["bfloat16"]
    found[3] = 14.0
    check_probe("the engine", found, probe, 7, tolerance, "mend it")
    with pytest.raises(RuntimeError, match=r"by 0\.517 on average"):
        check_probe("the engine", found + 0.065, probe, 7, tolerance, "mend it")


def test_weights_that_do_not_arrive_are_noticed_by_the_probe() -> None:
    driver = CopyDriver(tiny_model(), loses="model.layers.1.mlp.up_proj.weight")
    trainer = make_trainer(tiny_model())
    serving = colocated(make_external(driver), trainer)
    trainer.policy_version = 7
    message = r"the engine does not use the weights of policy version 7 .* on average, .* explains 0.001"
    with pytest.raises(RuntimeError, match=message), serving.phase():
        pass


def test_weights_that_are_no_numbers_do_not_pass_the_probe() -> None:
    trainer = make_trainer(tiny_model())
    serving = colocated(make_external(CopyDriver(tiny_model())), trainer)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    with pytest.raises(RuntimeError, match="by inf on average"), serving.phase():
        pass


@pytest.mark.parametrize(
    "failing", [("step", 3), ("submit", 2), ("wake", 1), ("load", 2), ("prompt_log_probs", 1), ("sleep", 1)]
)
def test_an_engine_that_fails_is_started_again_and_nothing_is_lost(failing: tuple[str, int]) -> None:
    messages: list[str] = []
    trainer, driver = make_trainer(tiny_model()), CopyDriver(tiny_model(), [failing])
    engine = make_external(driver, messages=messages)
    serving = colocated(engine, trainer)
    with serving.phase():
        results = generate(engine, REQUESTS, PARAMS)
    assert driver.calls["start"] == 2
    assert messages == [f"{failing[0]} was to fail\nthe engine is started again"]
    for request, group in zip(REQUESTS, results, strict=True):
        for completion in group:
            assert completion.finish_reason in {"stop", "length"}
            expected = expected_log_probs(trainer, request, completion)
            assert completion.log_probs == pytest.approx(expected, abs=1e-4)
    with serving.phase():
        assert [[c.tokens for c in group] for group in generate(engine, REQUESTS, PARAMS)] == [
            [c.tokens for c in group] for group in generate(engine, REQUESTS, PARAMS)
        ]


@pytest.mark.parametrize("failing", [None, ("load", 7), ("submit", 3), ("prompt_log_probs", 2)])
def test_an_engine_that_fails_while_it_takes_other_weights_loses_nothing(failing: tuple[str, int] | None) -> None:
    trainer, driver = make_trainer(tiny_model()), CopyDriver(tiny_model(), [failing] if failing else [])
    engine, probe = make_external(driver), make_probe(trainer.vocab_size, 64)

    def reload() -> None:
        while engine.policy_version != trainer.policy_version:
            weights = WeightStream(trainer.full_weights(), trainer.policy_version, probe_of(trainer, probe))
            engine.load_weights(weights, keep_cache=False)

    engine.wake(reload)
    reload()
    found = {engine.submit(request, PARAMS): request.begin() for request in REQUESTS}
    for is_updated in (False, True):
        while is_updated and not all(one.finish_reason for group in found.values() for one in group):
            for delta in engine.step():
                found[delta.request][delta.sibling].add(delta)
        if not is_updated:
            for delta in engine.step():
                found[delta.request][delta.sibling].add(delta)
            change_weights(trainer)
            reload()
    assert driver.calls["start"] == (2 if failing else 1)
    for request, group in zip(REQUESTS, found.values(), strict=True):
        for answer in group:
            assert answer.policy_versions == [0] + [1] * (len(answer.tokens) - 1)
            assert answer.log_probs[1:] == pytest.approx(expected_log_probs(trainer, request, answer)[1:], abs=1e-4)


def test_many_tokens_are_asked_for_at_once_only_where_nobody_waits_for_each() -> None:
    class Asked(CopyDriver):
        def submit(self, asks: Sequence[Ask]) -> None:
            numbers.append({ask.tokens_at_once for ask in asks})
            super().submit(asks)

    numbers, engine = list[set[int]](), make_external(Asked(tiny_model()))
    with colocated(engine, make_trainer(tiny_model())).phase():
        generate(engine, REQUESTS[:1], PARAMS)
        generate(engine, REQUESTS[:1], replace(PARAMS, stop=("no text has this in it",)))
        engine.submit(REQUESTS[0], PARAMS)  # as a conversation, a judge and a client do
    assert numbers == [{TOKENS_AT_ONCE}, {1}, {1}]


def test_an_engine_that_fails_twice_while_it_serves_ends_the_run() -> None:
    driver, messages = CopyDriver(tiny_model(), [("step", 2), ("step", 3)]), list[str]()
    engine = make_external(driver, messages=messages)
    serving = colocated(engine, make_trainer(tiny_model()))
    with pytest.raises(EngineError, match="step was to fail"), serving.phase():
        generate(engine, REQUESTS, PARAMS)
    assert len(messages) == 1


def test_an_engine_that_fails_in_each_step_may_be_started_again_in_each() -> None:
    driver, trainer = CopyDriver(tiny_model(), [("step", 2), ("step", 12)]), make_trainer(tiny_model())
    engine = make_external(driver)
    serving = colocated(engine, trainer)
    for _ in range(2):
        with serving.phase():
            generate(engine, REQUESTS, PARAMS)
    assert driver.calls["start"] == 3


def test_an_engine_that_does_not_start_is_not_tried_again() -> None:
    driver = CopyDriver(tiny_model(), [("start", 1)])
    with pytest.raises(EngineError), colocated(make_external(driver), make_trainer(tiny_model())).phase():
        pass
    assert driver.calls["start"] == 1


def test_a_response_that_an_engine_gives_up_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = CopyDriver(tiny_model())
    engine, draw, is_first = make_external(driver), driver._draw, True

    def give_up(*args: object) -> object:
        nonlocal is_first
        gain = draw(*args)  # type: ignore[arg-type]
        if is_first:
            is_first = False
            return type(gain)(gain.id, [], [], "abort", gain.policy_version)
        return gain

    monkeypatch.setattr(driver, "_draw", give_up)
    serving = colocated(engine, make_trainer(tiny_model()))
    with serving.phase():
        results = generate(engine, REQUESTS, PARAMS)
    assert {c.finish_reason for group in results for c in group} <= {"stop", "length"}
    assert driver.calls["start"] == 2


ROWS = [base64.b64encode(letter * 2).decode() for letter in (b"A", b"B", b"C", b"D", b"E")]
"""Experts of the tokens of a prompt and of a response, as an engine reports them."""


def recording() -> tuple[ExternalEngine, Completion]:
    """An engine that reports two experts of each token, and a response that it resumes; others sampled its token."""
    engine = make_external(CopyDriver(tiny_model(), is_awake=True))
    engine.experts_per_token, engine.policy_version = 2, 0
    begun = Completion([4], [-1.0], "aborted", [0], [b"aa", b"bb"])
    engine.submit(Request([5, 6, 7], [1], [begun]), replace(PARAMS, stop=("9",)))
    return engine, begun


@pytest.mark.parametrize("case", ["with each token", "after all tokens", "cut", "cut before they come"])
def test_each_token_that_was_read_has_experts_or_is_known_to_have_none(case: str) -> None:
    engine, completion = recording()
    (nine,) = engine._tokenizer.encode("9")
    unknown = bytes([UNKNOWN] * 2)
    gains, later = {
        "with each token": (
            [Gain(1, [8], [-1.0], None, 0, 0, ROWS[:4]), Gain(1, [3], [-1.0], "length", 0, 0, ROWS[4:])],
            [b"CC", b"DD", b"EE"],
        ),
        "after all tokens": (
            [Gain(1, [8, 3], [-1.0, -1.0], None, 0), Gain(1, [], [], "length", 0, 0, ROWS)],
            [b"CC", b"DD", b"EE"],
        ),
        "cut": ([Gain(1, [nine, 3], [-1.0, -1.0], None, 0, 0, ROWS)], [b"CC", b"DD"]),
        "cut before they come": ([Gain(1, [8], [-1.0], None, 0), Gain(1, [nine], [-1.0], None, 0)], [unknown] * 3),
    }[case]
    for gain in gains:
        engine._take(gain)
        completion.add(engine._deltas[-1])
    assert completion.finish_reason in {"stop", "length"}
    assert completion.experts == [b"aa", b"bb", *later], "those that sampled its first token are kept"


def test_tokens_that_are_read_again_with_other_weights_keep_their_experts() -> None:
    engine, completion = recording()
    engine._take(Gain(1, [8], [-1.0], None, 0, 0, ROWS[:4]))
    completion.add(engine._deltas[-1])
    engine._ask_again()
    engine._take(Gain(2, [3], [-1.0], "length", 0, 0, [ROWS[0]] * 4 + ROWS[4:]))
    completion.add(engine._deltas[-1])
    assert completion.experts == [b"aa", b"bb", b"CC", b"DD", b"EE"]


def test_an_engine_that_reports_too_few_experts_is_refused() -> None:
    engine, _ = recording()
    engine._take(Gain(1, [8], [-1.0], None, 0, 0, ROWS[:4]))
    with pytest.raises(RuntimeError, match=r"has reported the experts of 4 of 5 tokens .* algorithm.replay_experts"):
        engine._take(Gain(1, [3], [-1.0], "length", 0))


def test_tokens_of_other_weights_are_refused() -> None:
    driver = CopyDriver(tiny_model())
    engine = make_external(driver)
    serving = colocated(engine, make_trainer(tiny_model()))
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="version 5, but version 0 was loaded"),
        serving.phase(),
    ):
        driver._version = 5
        generate(engine, REQUESTS, PARAMS)


def test_an_error_in_between_leaves_the_engine_asleep_and_with_nothing_under_way() -> None:
    driver, trainer = CopyDriver(tiny_model()), make_trainer(tiny_model())
    engine = make_external(driver)
    serving = colocated(engine, trainer)
    with pytest.raises(KeyError), serving.phase():  # noqa: PT012
        engine.submit(REQUESTS[0], PARAMS)
        engine.step()
        raise KeyError
    assert not driver.is_awake
    with serving.phase():
        assert engine.step() == []


def serve_with_failures(path: str) -> tuple[list[list[list[int]]], int, list[str]]:
    """On each rank a separate engine: one fails while it receives weights, the other while it generates."""
    transport = Transport(torch.device("cpu"), 60.0)
    rank, messages = transport.rank, list[str]()
    driver = CopyDriver(path, [("load", 2), ("step", 2)][rank : rank + 1])
    engine, trainer = make_external(driver, path, messages), make_trainer(path, transport.world)
    serving = colocated(engine, trainer)
    mine = [Request(request.prompt, [10 * rank + i for i in request.sample_ids]) for request in REQUESTS]
    with serving.phase():
        results = generate(engine, mine, PARAMS)
    return [[completion.tokens for completion in group] for group in results], driver.calls["start"], messages


def test_all_ranks_bring_weights_to_an_engine_that_has_failed(ranks: RankPool) -> None:
    for tokens, num_starts, messages in ranks.run(2, serve_with_failures, tiny_model()):
        assert num_starts == 2
        assert len(messages) == 1
        assert all(1 <= len(response) <= 6 for group in tokens for response in group)


def serve_fed(path: str, failing: tuple[str, int] | None) -> tuple[list[list[list[float]]], int, int, list[str]]:
    """Rank 0 trains, rank 1 only generates: log-probs of its responses as found and as expected, versions, starts."""
    transport, messages = Transport(torch.device("cpu"), 60.0), list[str]()
    layouts = [Layout((rank,), 1) for rank in (0, 1)]
    for layout in layouts:
        transport.add_process_group(layout.ranks)
    trainer = make_trainer(path, transport.process_group((transport.rank,)))
    change_weights(trainer)
    route = WeightRoute(
        "weights of role 'policy'",
        shapes_of(empty_causal_lm(ModelConfig(path=path), "policy")),
        Pool(layouts[0], even_rows),
        Pool(layouts[1], everything),
        torch.float32,
        transport.rank,
        is_gathered=True,
    )
    if transport.rank == 0:
        send_weights(route, held_by(trainer), transport.world)
        return [], 0, 0, messages
    driver = CopyDriver(path, [failing] if failing else [])
    serving = Fed(make_external(driver, path, messages), route, transport.process_group((1,)), may_restart=True)
    serving.receive(transport.world, None, probe_of(trainer, make_probe(trainer.vocab_size, 64)))
    with serving.phase() as engine:
        results = generate(engine, REQUESTS, PARAMS)
    pairs = [
        [completion.log_probs, expected_log_probs(trainer, request, completion)]
        for request, group in zip(REQUESTS, results, strict=True)
        for completion in group
    ]
    assert driver.calls["prompt_log_probs"] >= 1, "the engine is probed after each load, after a restart, too"
    return pairs, serving.policy_version, driver.calls["start"], messages


@pytest.mark.parametrize("failing", [None, ("load", 2), ("step", 2), ("submit", 1)])
def test_an_engine_without_a_trainer_keeps_its_weights_for_a_restart(
    ranks: RankPool, failing: tuple[str, int] | None
) -> None:
    _, (pairs, version, num_starts, messages) = ranks.run(2, serve_fed, tiny_model(), failing)
    assert (version, num_starts, len(messages)) == (1, 2 if failing else 1, 1 if failing else 0)
    assert len(pairs) == 3
    for found, expected in pairs:
        assert found == pytest.approx(expected, abs=1e-4)


def test_an_engine_that_was_sent_no_weights_generates_nothing() -> None:
    route = WeightRoute(
        "weights of role 'policy'", {}, *[Pool(Layout((0,), 1), everything)] * 2, torch.float32, 0, is_gathered=True
    )
    serving = Fed(make_external(CopyDriver(tiny_model())), route, ALONE)
    with pytest.raises(RuntimeError, match="rank 0: weights of role 'policy' have not been sent yet"), serving.phase():
        pass


def test_seeds_of_responses_depend_on_seed_sample_and_position() -> None:
    seeds = {derive_seed(seed, sample, place) for seed in (0, 1) for sample in range(50) for place in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(3, 4, 5) == 1_016_042_191


def test_the_probe_is_a_text_of_the_vocabulary_that_fits() -> None:
    assert make_probe(82, 64) == make_probe(82, 64)
    assert len(make_probe(82, 64)) == 32
    assert len(make_probe(82, 9)) == 8
    assert set(make_probe(5, 64)) == set(range(5))


class _Names(CopyDriver):
    """A driver that remembers the weights that it is given."""

    def load(self, weights: WeightStream) -> None:
        self.found = {name: weight.clone() for name, weight in weights}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_an_engine_gets_the_weights_of_experts_as_folders_have_them(tmp_path: Path, family: str) -> None:
    path = experts_model(tmp_path, family)
    config, driver = ModelConfig(path=path), _Names(tiny_model())
    engine = make_external(driver)
    engine.form = form_of(empty_causal_lm(config, "policy").model)
    trainer = make_trainer(path)
    engine.load_weights(WeightStream(trainer.full_weights(), 3))
    expected = load_file(Path(path) / "model.safetensors")
    assert driver.found.keys() == expected.keys()
    assert sum("experts.1." in name for name in expected) == 2 * 3
    assert all(torch.equal(weight, expected[name]) for name, weight in driver.found.items())
    assert engine.policy_version == 3


def test_what_a_model_has_besides_weights_is_sent_with_each_load() -> None:
    driver, trainer = Mock(prompt_log_probs=Mock(return_value=[])), make_trainer(tiny_model())
    engine, arrived = make_external(driver), list[list[str]]()
    driver.load.side_effect = lambda weights: arrived.append([name for name, _ in weights])
    engine.buffers = {"biases": torch.ones(2)}
    for version in range(2):
        stream = WeightStream(iter(dict(trainer.full_weights()).items()), version)
        engine.load_weights(stream)
        assert stream.exact == {"biases"}
    assert arrived == [[*dict(trainer.full_weights()), "biases"]] * 2
