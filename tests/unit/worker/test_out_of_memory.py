"""Running out of memory is recognized, explained, and where possible overcome."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from tests.tiny import random_samples, tiny_model
from tests.unit.recipes import make_recipe, plan_of
from torch import nn

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.distributed.errors import CollectiveError, MemoryExhausted, is_out_of_memory, memory_explained
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import load_causal_lm
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner.show.text import print_plan
from leaderless.training.fsdp import FsdpEngine
from leaderless.worker.supervision.failure import WorkerFailure
from leaderless.worker.supervision.settled_memory import lower_limit, read_limits

ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried")
LENGTHS = [(3, 9), (7, 1), (5, 14), (1, 30), (12, 2), (4, 4), (9, 21), (2, 5), (6, 1), (3, 17), (8, 8)]
LONGEST = 30
TOTAL = sum(map(sum, LENGTHS)) - len(LENGTHS)
"""The last token of a sample predicts nothing, and takes part in no pass."""


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (ALLOCATOR, True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (MemoryExhausted("too much"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("shapes do not match"), False),
        (CollectiveError("rank 0 waited"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_an_error_of_memory_is_told_from_others(error: Exception, answer: bool) -> None:
    assert is_out_of_memory(error) == answer
    assert (WorkerFailure.of(error, 0).kind == "out_of_memory") == answer


def test_what_did_not_fit_is_said_once() -> None:
    said = r"lower x \(.*can't allocate memory"
    with pytest.raises(MemoryExhausted, match=said) as caught, memory_explained("lower x"):
        raise ALLOCATOR
    assert caught.value.__cause__ is ALLOCATOR
    with pytest.raises(MemoryExhausted, match=r"^inner"), memory_explained("outer"):
        raise MemoryExhausted("inner")
    with pytest.raises(KeyError), memory_explained("lower x"):
        raise KeyError("x")


def test_memory_that_runs_out_anywhere_comes_with_the_place_and_a_remedy() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    error.add_note("at step 3, in my_stage, on rank 1")
    message = WorkerFailure.of(error, 1).message
    assert "(at step 3, in my_stage, on rank 1): memory has run out; lower batch.micro_batch_tokens" in message
    assert "memory has run out" not in WorkerFailure.of(MemoryExhausted("lower x"), 1).message


def engine_of(micro_batch_tokens: int) -> FsdpEngine:
    config = ModelConfig(path=tiny_model())
    optimizer = OptimizerConfig(learning_rate=1e-3)
    return FsdpEngine(
        load_causal_lm(config, "policy"),
        config,
        ProcessGroup((0,), 0),
        torch.device("cpu"),
        micro_batch_tokens,
        optimizer=optimizer,
        num_updates=2,
    )


def fail_above(model: nn.Module, num_tokens: int) -> None:
    """Behave as if passes of at most this number of tokens fitted into memory."""

    def refuse(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if len(inputs[0]) > num_tokens:
            raise ALLOCATOR

    model.register_forward_pre_hook(refuse)


def test_scores_are_those_of_a_bound_that_was_low_from_the_start() -> None:
    batch, bounds = random_samples(LENGTHS), list[int]()
    engine = engine_of(4096)
    engine.adapt_to_memory(bounds.append)
    fail_above(engine.model, 60)
    scores = engine.log_probs(batch)
    assert bounds[0] == TOTAL // 2
    assert engine.micro_batch_tokens == bounds[-1] <= 60 < bounds[-2]
    assert torch.equal(scores.values, engine_of(bounds[-1]).log_probs(batch).values)


@pytest.mark.parametrize("is_auto", [True, False])
def test_a_pass_that_can_be_no_smaller_says_what_else_to_lower(is_auto: bool) -> None:
    engine = engine_of(4096 if is_auto else LONGEST)
    if is_auto:
        engine.adapt_to_memory(lambda _: None)
    fail_above(engine.model, LONGEST - 1)
    with pytest.raises(MemoryExhausted, match=rf"of {LONGEST} tokens in .*rollout.max_response"):
        engine.log_probs(random_samples(LENGTHS))
    assert LONGEST <= engine.micro_batch_tokens < 2 * LONGEST


def test_a_bound_that_was_set_is_not_changed_and_named() -> None:
    engine = engine_of(4096)
    fail_above(engine.model, 60)
    said = rf"rank 0: a micro-batch of {TOTAL} tokens in 11 samples, the longest of 30, does not fit into the memory of"
    with pytest.raises(MemoryExhausted, match=said + r" cpu.*lower batch.micro_batch_tokens=4096 .*or set it to auto"):
        engine.log_probs(random_samples(LENGTHS))
    assert engine.micro_batch_tokens == 4096


def test_other_errors_of_a_pass_are_left_as_they_are() -> None:
    engine = engine_of(4096)
    engine.adapt_to_memory(lambda _: pytest.fail("memory has not run out"))

    def refuse(*_: object) -> None:
        raise KeyError("x")

    engine.model.register_forward_pre_hook(refuse)
    with pytest.raises(KeyError):
        engine.log_probs(random_samples(LENGTHS))


def test_limits_only_fall_and_outlive_a_start(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert read_limits(directory) == {}
    lower_limit(directory, "policy", 512)
    lower_limit(directory, "policy", 1024)
    lower_limit(directory, "critic", 2048)
    assert read_limits(directory) == {"policy": 512, "critic": 2048}
    directory.set_aside(keep_limits=True)
    assert read_limits(directory)["policy"] == 512
    directory.set_aside()
    assert read_limits(directory) == {}, "a fresh run begins anew"


def test_auto_begins_with_its_constant_or_the_longest_sample() -> None:
    auto = {"micro_batch_tokens": "auto"}
    assert plan_of("grpo", batch=auto).batch.micro_batch_tokens == 16384
    long = plan_of("grpo", batch=auto, rollout={"max_response_tokens": 30_000})
    assert long.batch.micro_batch_tokens == 30_000 + make_recipe().data.max_prompt_tokens
    fixed = plan_of("grpo", batch={"micro_batch_tokens": 2048}).batch
    assert (fixed.micro_batch_tokens, fixed.adapts_to_memory) == (2048, False)


def test_the_plan_shows_what_auto_came_to(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    plan = plan_of("grpo", batch={"micro_batch_tokens": "auto"})
    print_plan(plan, Console(width=200), {"policy": 512})
    shown = capsys.readouterr().out
    assert "at most 16,384 tokens a rank to begin with (auto), lowered where memory is short" in shown
    assert "a pass of policy" in shown
    assert "512 tokens: more did not fit" in shown
    print_plan(plan_of("grpo"), Console(width=200))
    assert "(auto)" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many", None, [1]])
def test_a_bound_is_a_number_or_auto(value: object) -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match="must be a whole number of at least 1, or auto"):
        make_recipe(batch={"micro_batch_tokens": value})
