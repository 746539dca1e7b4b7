"""Training, scoring and decoding on a device that does not exist: no tensor may be left on the host by mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.forking import Forked
from torch.utils import backend_registration

RESULTS = Path(__file__).parents[2] / "docs/performance/decode_counts.json"


def counts_of(*names: str) -> dict[str, Any]:
    """What a process with the device prints."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot register a device in Python")
    command = [sys.executable, "-m", "tests.fake_accelerator", *names]
    process = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    counts: dict[str, Any] = json.loads(output)
    return counts


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (
            "train",
            {
                "gradients": 14,
                **{f"reads in torch.{kind}": 0 for kind in ("float32", "bfloat16")},
                **{f"copies to the device in torch.{kind}": 1.0 for kind in ("float32", "bfloat16")},
            },
        ),
        ("values", {"gradients": 16}),
        # Of each pass one for its inputs and one for its loss.
        ("losses", {"passes": 2, "copies": 4, "waits": 0}),
        ("formulas", {"losses": 13, "waits": 0}),
        # One for its inputs, one to add up the scores of each response, and one for what is known of them.
        ("preferences", {"passes": 1, "copies": 3, "waits": 0, "reads": 0}),
        ("decode", {"tokens": 114, "copies to the host for each draw": 0.0}),  # besides `tolist` of what was drawn
        # The sums of chunks, those in a chunk, the noise and the logit of each of four draws.
        ("refusals", {"tokens": 8, "copies to the host": 16, "warnings": 1}),
        ("mistakes", {"found": 3}),
    ],
)
def test_a_pass_leaves_nothing_on_the_host(name: str, counts: dict[str, int]) -> None:
    assert counts_of(name) == counts


SOME = ("adapters with dropout", "recorded experts", "images, qwen3_vl", "cp")
"""Updates whose passes have the most kinds of inputs."""


@pytest.mark.parametrize("names", [SOME, pytest.param((), marks=pytest.mark.thorough)], ids=["some", "all"])
def test_a_pass_of_an_update_is_one_copy_to_the_device_for_which_nobody_waits(names: Sequence[str]) -> None:
    found = counts_of("updates", *names)
    assert {*found} == {*names} or len(found) == 13
    for name, counts in found.items():
        is_scored = name.startswith("scores")
        assert counts["copies in"] == 1 + is_scored, name
        assert counts["waits"] == 0, name
        assert counts["copies back"] == (0.5 if is_scored else 0), f"{name}: one for both passes"


def test_passes_of_bodies_and_updates_of_sac_wait_for_nothing() -> None:
    found = {name: tuple(counts.values()) for name, counts in counts_of("bodies").items()}
    assert found == {  # copies to the device, those for which the host waits, and copies back
        "policy": (1, 0, 0),
        "critic": (1, 0, 0),
        "scores": (2, 0, 0.2),  # the second one says where the scores belong, and all of them come back together
        "final values": (2, 0, 1),  # of two passes
        "decisions": (2, 0, 1),  # the second one is the range of actions
        "sac": (3, 0, 1),  # of two updates of the critics, and one of the policy
    }


def test_a_step_over_pages_is_one_copy_in_one_pass_and_one_copy_back(tmp_path: Path) -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot register a device in Python")
    results = tmp_path / "counts.json"
    process = Forked([sys.executable, "-m", "benchmarks.decode_counts", "--ways", "pages", "--results", str(results)])
    assert process.wait(timeout=300) == 0
    steps, shown = json.loads(results.read_text())["pages"], json.loads(RESULTS.read_text())
    assert steps == shown["pages"], "the page shows what is counted now"
    with_experts = shown["pages, with experts"]["128 responses"]
    assert (with_experts["copies in"], with_experts["reads back"], with_experts["waiting reads back"]) == (1, 1, 0)
    reading = steps.pop("16 prompts are read")
    assert reading["waiting copies in"] == reading["waiting reads back"] == 0
    assert reading["copies in"] == 3, "of the prompts, of the first draws, and of the first step"
    for name, step in steps.items():
        assert step == steps["128 responses"], "whatever happens in it"
        assert step["kernels"] < shown["slots"][name]["kernels"]
        assert step["kernels outside of the pass"] == step["clones of keys or values"] == 0
        assert step["copies in"] == step["reads back"] == 1
        assert step["waiting copies in"] == step["waiting reads back"] == 0
