"""Families whose layers or weights are unlike others', in vLLM; `python -m tests.vllm_families` tries all.

They run in the environment of the other tests, whose `transformers` may be newer than that of vLLM.
"""

from __future__ import annotations

import pytest
from tests.vllm_families import PYTHON, RIGHT, judge

pytestmark = pytest.mark.skipif(not PYTHON, reason="`make test-vllm` runs this with vLLM")

FAMILIES = {
    "gpt_oss": RIGHT,  # writes experts and sinks itself
    "gemma4_text": RIGHT,  # scales of layers that are no weights
    "glm4_moe": RIGHT,  # biases that choose experts, which are no weights
    "mamba2": RIGHT,
    "falcon_h1": RIGHT,
    "qwen3_next": f"{RIGHT} in bfloat16",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_drawn_by_the_log_probabilities_of_the_trainer(family: str) -> None:
    assert judge(family) == FAMILIES[family]
