"""What becomes of families in vLLM.

    LEADERLESS_VLLM_PYTHON=.venv-vllm/bin/python python -m tests.vllm_families [FAMILY ...]

tries each family of language models that is right in training, with a tiny random model, and writes a table of which a
page of the documentation is made. `make test-vllm` makes the environment. Its vLLM is that of CPUs: of a family whose
kernels it lacks, only names and sizes of weights are tried.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from safetensors.torch import save_file
from tests.engines import CACHE_BYTES, change_weights, colocated, make_trainer, server_of, settings_of
from tests.tiny_families import FILE as FAMILIES
from tests.tiny_families import wide_config, write_family
from tests.unit.rollout.test_engine_forms import scored

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.weight_sources import form_of
from leaderless.rollout.engine import PROBE_TOLERANCE, Request, SamplingParams, generate
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.external.vllm_engine import VllmServer
from leaderless.training.fsdp import FsdpEngine

FILE = FAMILIES.with_name("vllm_families.json")
"""What becomes of each family."""
PYTHON = os.environ.get("LEADERLESS_VLLM_PYTHON", "")
"""Python of an environment with vLLM."""
RIGHT, NAMES = "right", "names"
DTYPES = ("float32", "bfloat16")
"""Types to try: some kernels of CPUs compute in the second alone."""
TOLERANCE = {"float32": 5e-4, "bfloat16": 0.1}
"""Largest mean error of log-probabilities of responses."""
PROMPT_LENGTHS = (5, 140, 11)
"""One of them is longer than all windows and chunks."""
LONGEST = 140
"""Letters of a reason."""
CPU = torch.device("cpu")


def engine_of(path: str, dtype: str) -> ExternalEngine:
    """vLLM for a model without a tokenizer."""
    settings = replace(settings_of(path), dtype=dtype, kv_cache_bytes=4 * CACHE_BYTES)
    server = server_of("vllm", Path(path))
    driver, tolerance = VllmServer(PYTHON, settings, CPU, server), PROBE_TOLERANCE[dtype]
    engine = ExternalEngine("vLLM", driver, cast("Tokenizer", None), frozenset[int](), tolerance, CPU, None)
    model = load_causal_lm(ModelConfig(path=path), "policy")
    engine.form, own = form_of(model.model), model.saved_buffers
    engine.buffers = dict(part for name, value in own.items() for part in engine.form(name, value))
    return engine


def generate_and_compare(engine: ExternalEngine, trainer: FsdpEngine, dtype: str) -> None:
    """Compare log-probabilities of a probe and of responses with those of the trainer, before and after an update."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    requests = [Request(prompt, [2 * place, 2 * place + 1]) for place, prompt in enumerate(prompts)]
    serving = colocated(engine, trainer)
    for is_changed in (False, True):
        if is_changed:
            change_weights(trainer)
        for parameter in trainer.model.parameters():  # so that only the rounding of results differs
            parameter.data = parameter.data.to(getattr(torch, dtype)).float()
        with serving.phase():  # it is probed
            results = generate(engine, requests, SamplingParams(SamplingConfig(temperature=1.0), 12))
        pairs = [
            (request, completion) for request, group in zip(requests, results, strict=True) for completion in group
        ]
        found = torch.tensor([score for _, one in pairs for score in one.log_probs])
        expected = torch.cat([scored(trainer.model, list(request.prompt), one.tokens) for request, one in pairs])
        error = float((found - expected).abs().mean())
        assert error < TOLERANCE[dtype], f"log-probabilities of responses differ by {error:.1e} on average"


def run_in(folder: str, dtype: str) -> None:
    """Run vLLM with the weights of a trainer.

    Raises:
        EngineError: It fails.
        RuntimeError: It does not have the weights, or other log-probabilities.
    """
    trainer, engine = make_trainer(folder), engine_of(folder, dtype)
    try:
        engine.start()
        generate_and_compare(engine, trainer, dtype)
    finally:
        engine.close()


def lacking_names(folder: str) -> list[str]:
    """The weights of vLLM's model that do not come with those of a trainer; the model is not run.

    Raises:
        RuntimeError: They cannot be loaded.
    """
    trainer = make_trainer(folder)
    form = form_of(trainer.model.model)
    held = chain(trainer.full_weights(), trainer.model.saved_buffers.items())
    weights = dict(part for name, weight in held for part in form(name, weight))
    save_file({name: weight.contiguous().clone() for name, weight in weights.items()}, f"{folder}/sent.safetensors")
    command = [PYTHON, str(Path(__file__).with_name("vllm_names.py")), folder, f"{folder}/sent.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("LACKING")]
    return cast("list[str]", json.loads(found.removeprefix("LACKING")))


def judge(family: str) -> str:
    """`RIGHT`, `NAMES`, or why vLLM is not used.

    Raises:
        AssertionError: vLLM has the weights, and other log-probabilities.
    """
    with TemporaryDirectory() as folder:
        write_family(wide_config(family, vocab_size=83), Path(folder))
        reason = ""
        for dtype in DTYPES:
            try:
                run_in(folder, dtype)
            except EngineError as error:
                reason = reason or _shorter(str(error))
                if "BF16" not in reason:
                    break
            except RuntimeError as error:
                if "by 0.00" not in str(error):  # else rounding, as of what vLLM keeps in bfloat16
                    return f"refused: {_shorter(str(error))}"
            else:
                return RIGHT if dtype == DTYPES[0] else f"{RIGHT} in {dtype}"
        try:
            if lacking := lacking_names(folder):
                return f"refused: {len(lacking)} weights do not come, such as {lacking[0]}"
        except RuntimeError as error:
            return f"refused: {_shorter(str(error))}"
        return f"{NAMES}: {reason}"


def _shorter(message: str) -> str:
    """The error of a message with the end of a log."""
    if differing := re.search(r"differ from the trainer's by ([\d.]+)", message):
        return f"log-probabilities differ by {differing[1]}"
    found = re.findall(r"(?:\w+Error:|Value error,) [^\n\"]+", message)
    text = found[-1] if found else re.sub(r"; the end of .*", "", message.splitlines()[0])
    text = re.sub(r"'/[^']*'", "its folder", text.strip())
    return re.split(r"\. | \[type", text)[0][:LONGEST]


def main() -> None:
    """Judge some families, or all that are right in training."""
    families = json.loads(FAMILIES.read_text(encoding="utf-8"))["families"]
    table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    torch.set_num_threads(1)
    for family in sys.argv[1:] or [name for name, verdict in families.items() if "refused" not in verdict]:
        try:
            table[family] = judge(family)
        except AssertionError as error:
            table[family] = f"WRONG: {error}"
        except Exception as error:  # noqa: BLE001 - it is written down, and others are tried
            table[family] = f"not made: {_shorter(f'{type(error).__name__}: {error}')}"
        print(family, table[family], flush=True)
        FILE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
