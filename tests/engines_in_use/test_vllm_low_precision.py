"""Weights and caches of low precision, and drafts of tokens, in a real vLLM; `make test-vllm` has an environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines import expected_log_probs, make_external, make_trainer, server_of, settings_of
from tests.engines_in_use.test_vllm_runs import PYTHON, SERVER, train
from tests.tiny import tiny_model
from torch import Tensor

from leaderless.config.low_precision import FORMATS, INT8_WEIGHTS, formats_of, num_drafts
from leaderless.config.rollout import ExternalConfig, SamplingConfig
from leaderless.distributed.weights.buckets import LocalStaging, checksums, make_buckets
from leaderless.distributed.weights.stream import Probe, WeightStream
from leaderless.rollout.engine import Completion, Request, SamplingParams, generate, make_probe
from leaderless.rollout.external import arguments as installed
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.external.vllm_engine import InProcessVllm, VllmServer
from leaderless.training.fsdp import FsdpEngine

pytestmark = [
    pytest.mark.skipif(PYTHON is None or find_spec("vllm") is None, reason="`make test-vllm` runs this with vLLM"),
    pytest.mark.timeout(900),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CASES: Mapping[str, Mapping[str, Any]] = {
    "weights in INT8": {"quantization": "int8_per_channel"},
    "weights in FP8": {"quantization": "fp8_per_channel"},
    "keys and values in FP8": {"kv_cache_dtype": "fp8"},
    "keys and values in FP8 with a small mantissa": {"kv_cache_dtype": "fp8_e5m2"},
}
"""Formats in which vLLM computes on this CPU."""
CPU = torch.device("cpu")
SAME_AS_PLAIN = 0.02
"""Mean difference of log-probabilities by rounding to bfloat16 alone, at most."""


class Changing:
    """An engine in this process, or in one of its own, and the trainer whose weights it is given."""

    def __init__(self, path: str, arguments: Mapping[str, Any], dtype: str, apart: Path | None = None) -> None:
        self.trainer = make_trainer(path)
        self.trainer.model.model.set_attn_implementation("eager")  # the trainer's own is for its passes
        settings = replace(settings_of(path, max_sequences=64), dtype=dtype, arguments=arguments)
        settings = replace(settings, num_drafts=num_drafts("vllm", arguments))
        self.driver: InProcessVllm | VllmServer = InProcessVllm(settings, CPU)
        if apart is not None:
            assert PYTHON is not None
            self.driver = VllmServer(PYTHON, settings, CPU, server_of("vllm", apart, answer_timeout_s=600))
        self.engine: ExternalEngine = make_external(self.driver, path)
        self.engine._report = None  # a failure is raised, in place of a restart
        self.text = make_probe(self.trainer.vocab_size, 64)
        self.engine.wake(lambda: None)

    def load(self, tolerance: float) -> None:
        """Give the engine the trainer's weights, and compare the probe."""
        self.engine._tolerance = tolerance
        probe = Probe(self.text, self.expected())
        weights = self.trainer.model.model.named_parameters()
        self.engine.load_weights(WeightStream(iter(weights), self.trainer.policy_version, probe))

    @torch.no_grad()
    def expected(self) -> Tensor:
        """The trainer's log-probabilities of the probe."""
        scores = self.trainer.model.model(torch.tensor([self.text])).logits[0, :-1].log_softmax(-1)
        return scores.gather(1, torch.tensor(self.text[1:])[:, None])[:, 0]

    def difference(self) -> float:
        """Mean difference of the engine's log-probabilities of the probe from the trainer's."""
        return float((torch.tensor(self.driver.prompt_log_probs(self.text)) - self.expected()).abs().mean())


@contextmanager
def engine_with(arguments: Mapping[str, Any]) -> Iterator[Changing]:
    made = Changing(tiny_model(head_dim=32), arguments, "bfloat16")
    try:
        yield made
    finally:
        made.engine.close()


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changing]:
    """An engine that drafts, with weights; no other engine can start in a process in which vLLM has drafted."""
    # Whole prompts in one pass: vLLM on the CPU fails where a response with a seed is read in several.
    given = {"speculative_config": NGRAM, "max_num_batched_tokens": 1 << 14}
    made = Changing(tiny_model(head_dim=32), given, "float32", tmp_path_factory.mktemp("vllm"))
    made.load(1e-3)
    yield made
    made.engine.close()


def change(trainer: FsdpEngine) -> None:
    """Change the weights so much that the probe shows it in any format."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.add_(0.3 * weight.std().nan_to_num(0.0) * torch.randn(weight.shape, generator=generator))
    trainer.policy_version += 1


@pytest.mark.parametrize("case", CASES)
def test_weights_are_quantized_as_they_arrive_each_time_that_they_come(case: str) -> None:
    (one,) = formats_of("vllm", CASES[case])
    with engine_with(CASES[case]) as changing:
        changing.load(one.probe_tolerance)
        first = changing.difference()
        assert SAME_AS_PLAIN < first < one.probe_tolerance / 4, "it computes in the format, and near the trainer"
        change(changing.trainer)
        stale = changing.difference()
        changing.load(one.probe_tolerance)
        assert changing.difference() < 2 * first < stale, "weights that come later are quantized anew"
        results = generate(
            changing.engine, [Request([5, 6, 7], [1, 2, 3, 4])], SamplingParams(SamplingConfig(), 24, (), 0)
        )
        differences = [
            torch.tensor(each.log_probs)
            - torch.tensor(expected_log_probs(changing.trainer, Request([5, 6, 7], [1]), each))
            for each in results[0]
        ]
        assert SAME_AS_PLAIN < float(torch.cat(differences).abs().mean()) < 4 * first


def test_checksums_are_of_weights_as_they_arrived() -> None:
    with engine_with({"quantization": "fp8_per_channel"}) as changing:
        changing.load(1.0)
        assert isinstance(changing.driver, InProcessVllm)
        worker, weights = changing.driver, list(changing.trainer.model.model.named_parameters())
        for is_damaged in (False, True):
            sums = list[int]()
            for bucket in make_buckets(weights, torch.bfloat16, LocalStaging(torch.device("cpu")), max_bytes=50_000):
                sums += checksums(bucket.data[None]).tolist()
                data = bucket.data.clone()
                data[3] ^= is_damaged and len(sums) == 2
                worker.load_bucket(bucket.weights, data, is_checked=True)
            if is_damaged:
                with pytest.raises(RuntimeError, match="arrived damaged: checksum"):
                    worker.finish_load(1, expected=sums)
            else:
                worker.finish_load(1, expected=sums)
                assert changing.difference() < 0.25


def test_every_format_of_vllm_is_one_of_the_installed_version() -> None:
    version, names, formats = installed._installed("vllm", ExternalConfig(python=PYTHON), installed.KEY)
    assert version.startswith("vLLM ")
    for one in FORMATS["vllm"]:
        assert one.argument in names
        assert one.value in formats[one.argument] or one.value == INT8_WEIGHTS


def repeated(vocabulary: int) -> list[int]:
    """A text with every token twice, so that each token that is sampled has been followed by another one."""
    order = torch.randperm(vocabulary - 2, generator=torch.Generator().manual_seed(1)) + 1
    return [*order.tolist(), *order.tolist()]


def sampled(changing: Changing, prompt: Sequence[int], count: int, length: int, **more: float) -> list[Completion]:
    """Responses to a prompt."""
    params = SamplingParams(SamplingConfig(**more), length, (), 11)  # type: ignore[arg-type]
    return generate(changing.engine, [Request(prompt, range(count))], params)[0]


def test_drafts_change_no_greedy_token(drafting: Changing) -> None:
    results = list[Completion]()
    for prompt in ([5, 6, 7, 8] * 4, [9, 10, 9, 10, 9], list(range(3, 40)), [12] * 9):
        (found,) = sampled(drafting, prompt, 1, 40, temperature=0.0)
        for place, token in enumerate(found.tokens):
            assert token == int(next_probabilities(drafting.trainer, [[*prompt, *found.tokens[:place]]])[0].argmax())
        check_log_probs(drafting, prompt, [found])
        results.append(found)
    accepted, drafted = sum(one.num_accepted for one in results), sum(one.num_drafted for one in results)
    assert 0 < accepted < drafted


def check_log_probs(changing: Changing, prompt: Sequence[int], results: Sequence[Completion]) -> None:
    """Log-probabilities are those of the model whose weights were given, whatever was drafted."""
    for one in results:
        expected = expected_log_probs(changing.trainer, Request(prompt, [1]), one)
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(expected), atol=1e-3, rtol=0)


def test_drafts_leave_the_distribution_and_its_log_probabilities_as_they_are(drafting: Changing) -> None:
    vocabulary = drafting.trainer.vocab_size
    prompt = repeated(vocabulary)
    results = [one for one in sampled(drafting, prompt, 1000, 3) if len(one.tokens) > 1]
    assert sum(one.num_drafted for one in results) > 1000, "the second token of nearly every response is drafted"
    firsts = next_probabilities(drafting.trainer, [prompt])[0]
    firsts[drafting.engine._end_tokens] = 0
    seconds = next_probabilities(drafting.trainer, [[*prompt, token] for token in range(vocabulary)])
    expected = firsts / firsts.sum() @ seconds
    drawn = torch.tensor([one.tokens[:2] for one in results])
    counts = torch.zeros(vocabulary).index_add_(0, drawn[:, 1], torch.ones(len(drawn)))
    assert abs(score_of_chi_square(counts, expected * len(results))) < 4
    drafts = torch.tensor([prompt[prompt.index(token) + 1] if token in prompt else 0 for token in range(vocabulary)])
    likely = seconds[drawn[:, 0], drafts[drawn[:, 0]]]
    surplus = float((drawn[:, 1] == drafts[drawn[:, 0]]).sum() - likely.sum())
    assert abs(surplus) < 4 * sqrt(float((likely * (1 - likely)).sum())), "drafts are accepted as often as is right"
    check_log_probs(drafting, prompt, results[:40])


@torch.no_grad()
def next_probabilities(trainer: FsdpEngine, texts: Sequence[Sequence[int]]) -> Tensor:
    """[texts, vocabulary] probabilities of the token after each text, all of the same length."""
    probabilities: Tensor = trainer.model.model(torch.tensor(texts)).logits[:, -1].softmax(-1)
    return probabilities


def score_of_chi_square(counts: Tensor, expected: Tensor) -> float:
    """Deviation of a chi-square statistic from what chance explains, in standard deviations (Wilson and Hilferty)."""
    is_rare = expected < 5
    rare = torch.stack([counts[is_rare].sum(), expected[is_rare].sum()])
    found = torch.cat([counts[~is_rare], rare[:1]]), torch.cat([expected[~is_rare], rare[1:]])
    freedom = len(found[0]) - 1
    ratio = float(((found[0] - found[1]) ** 2 / found[1]).sum()) / freedom
    return (ratio ** (1 / 3) - (1 - 2 / (9 * freedom))) / sqrt(2 / (9 * freedom))


def test_a_run_with_low_precision_and_drafts_is_corrected_and_measured(tmp_path: Path) -> None:
    given = {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8", "speculative_config": NGRAM}
    more = {**SERVER, "rollout.external.arguments": given, "compute_dtype": "bfloat16"}
    steps = train(tmp_path, more, 1)
    assert len(steps) == 3
    for numbers in steps:
        assert 0.01 < numbers["mismatch/abs_mean"] < 0.5
        assert 0.8 < numbers["mismatch/effective_samples"] < 1
        assert 0.8 < numbers["correction/weight"] < 1.2
        assert 0 <= numbers["rollout/drafts_accepted"] <= 1
