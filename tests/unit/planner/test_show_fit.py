"""What `leaderless plan --memory` says."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.recipes import make_recipe, plan_of, write_model

from leaderless.planner.memory.fit import MARGIN, fit_plan
from leaderless.planner.memory.limits import CacheBound
from leaderless.planner.show.fit import Fitted

GIB = 1 << 30


def fitted(gib: float, **sections: object) -> Fitted:
    return Fitted.of(make_recipe(**sections), plan_of("grpo", 1, **sections), gib)


def printed(fit: Fitted) -> str:
    console = Console(file=io.StringIO(), width=400)
    fit.print(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, object]:
    """A model whose keys and values take most of the memory."""
    model = write_model(tmp_path / "model", num_key_value_heads=4)
    return {"models": {"policy": model}, "rollout": {"max_sequences": 1024}, "batch": {"prompts_per_step": 1024}}


def test_with_much_memory_everything_stays(sections: dict[str, object]) -> None:
    fit = fitted(64, **sections)
    text = printed(fit)
    assert re.search(r"fits +the fullest rank takes [\d.]+ GiB; up to 54 GiB", text)
    assert "chunks of at most 268,435,456" in text
    assert "weights and gradients" in text
    assert re.search(r"policy's engine +keys and values of [\d,]+ tokens: all sequences at their longest", text)
    assert "keeps its memory while it sleeps" in text
    assert fit.plan.memory is not None
    assert "policy engine asleep" in fit.plan.memory.accelerator.resident, "the memory shown is of what ranks do"


def test_with_less_sequences_wait(sections: dict[str, object]) -> None:
    fit = fitted(2, **sections)
    assert "sequences wait for room" in printed(fit)
    assert "releases its memory while it sleeps" in printed(fit)
    assert fit.plan.memory is not None
    pool = fit.pools["policy"]
    shown = fit.plan.memory.accelerator.phases["policy generates"]["kv cache"]
    assert shown == pool.tokens * 2 * 4 * 4 * 16 * 4
    assert fit.plan.memory.accelerator.peak <= MARGIN * 2 * GIB < shown * 4 / 3 + fit.plan.memory.accelerator.peak


def test_what_does_not_fit_is_said_with_what_to_do(sections: dict[str, object]) -> None:
    text = printed(fitted(1, **sections, run={"memory_check": "warn"}))
    assert "may not fit" in text
    hopeless = fitted(1, **(sections | {"models": {"policy": big(Path(str(sections["models"]["policy"])))}}))  # type: ignore[index]
    assert "does not fit" in printed(hopeless)
    assert "train adapters: set models.policy.lora; use more ranks, or a smaller model" in hopeless.fit.problem
    assert json.loads(json.dumps(hopeless.to_json()))["fits"] is False


def big(folder: Path) -> str:
    return write_model(folder.parent / "big", hidden_size=4096, intermediate_size=16_384)


def test_a_model_of_unknown_size_is_no_promise() -> None:
    assert "unknown" in printed(fitted(80))


def test_without_pages_keys_and_values_are_not_bounded(sections: dict[str, object]) -> None:
    recipe, plan = make_recipe(**sections), plan_of("grpo", 1, **sections)
    for gib, problem in ((64, ""), (2, "lower rollout.max_sequences=1024")):
        fit = fit_plan(recipe, plan, gib * GIB, is_cpu=False, has_pages=False)
        assert fit.room.cache == CacheBound(has_pages=False)
        assert problem in fit.problem
        assert bool(fit.problem) == bool(problem)
