"""Training, scoring and decoding on a device that does not exist: no tensor may be left on the host by mistake."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.forking import Forked
from torch.utils import backend_registration


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (
            "train",
            {
                "gradients": 26,
                **{f"reads in torch.{kind}": 0 for kind in ("float32", "bfloat16")},
                **{f"copies to the device in torch.{kind}": 1.0 for kind in ("float32", "bfloat16")},
            },
        ),
        ("values", {"gradients": 28}),
        # Of each pass one for its inputs and one for its loss; only sums of all losses are waited for.
        ("losses", {"passes": 2, "copies": 5, "waits": 1}),
        ("decode", {"tokens": 114, "copies to the host for each draw": 0.0}),  # besides `tolist` of what was drawn
        # The sums of chunks, those in a chunk, the noise and the logit of each of four draws.
        ("refusals", {"tokens": 8, "copies to the host": 16, "warnings": 1}),
        ("mistakes", {"found": 3}),
    ],
)
def test_a_pass_leaves_nothing_on_the_host(name: str, counts: dict[str, int]) -> None:
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot register a device in Python")
    command = [sys.executable, "-m", "tests.fake_accelerator", name]
    process = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert json.loads(output) == counts
