"""Distance between vLLM's log-probabilities and the trainer's, by the format in which vLLM computes.

    .venv-vllm/bin/python benchmarks/low_precision.py MODEL docs/performance/low_precision.json

Weights are sent as in a run, twice: as they are, and changed. Each time responses are sampled at temperature 1, and
their log-probabilities are compared with those of the model by transformers, in the type in which weights are sent. The
probe is compared, too: with the weights, and with the meaningless ones that vLLM has at its start.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from pydantic import JsonValue
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from leaderless.config.low_precision import num_drafts
from leaderless.distributed.remote.messages import Ask, Settings
from leaderless.distributed.weights.buckets import LocalStaging, make_buckets
from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.engine import make_probe
from leaderless.rollout.external.vllm_process.worker import VllmWorker

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
CASES: Mapping[str, Mapping[str, object]] = {
    "none": {},
    "weights int8_per_channel": {"quantization": "int8_per_channel"},
    "weights fp8_per_channel": {"quantization": "fp8_per_channel"},
    "cache fp8_e4m3": {"kv_cache_dtype": "fp8"},
    "cache fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "weights fp8_per_channel, cache fp8_e4m3": {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"},
    "drafts ngram": {"speculative_config": NGRAM},
}
"""Arguments by the name of what they change."""
TOPICS = ("the sea", "a broken clock", "how bread is made", "a walk in the rain", "prime numbers", "an old friend")
HIGHEST = 2.0
"""Limit of truncated importance sampling, as in a recipe that says nothing else."""


def prompts_of(path: str) -> list[list[int]]:
    """Token ids of some prompts."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    return [tokenizer.encode(f"Here is a short text about {topic}:\n") for topic in TOPICS]


@torch.no_grad()
def log_probs(model: PreTrainedModel, tokens: list[int], first: int) -> Tensor:
    """Log-probabilities of the tokens of a text from a place on."""
    scores = model(torch.tensor([tokens])).logits[0, first - 1 : -1].float().log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens[first:])[:, None])[:, 0]


class Measured:
    """One engine, and the model with the weights that it is sent."""

    def __init__(self, path: str, dtype: str, arguments: Mapping[str, object], length: int) -> None:
        """Start the engine, with meaningless weights."""
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self.prompts, self.length = prompts_of(path), length
        self.probe = make_probe(min(self.model.config.vocab_size, len(AutoTokenizer.from_pretrained(path))), 256)
        given = cast("Mapping[str, JsonValue]", arguments)
        settings = Settings(path, None, False, dtype, 256, 8, 0.3, 1 << 28, enable_graphs=False)
        self.worker = VllmWorker(replace(settings, arguments=given, num_drafts=num_drafts("vllm", given)))
        self.worker.start()
        self.worker.wake()

    def load(self, version: int) -> None:
        """Send the weights."""
        stream = WeightStream(iter(self.model.named_parameters()), version)
        for bucket in make_buckets(stream, self.model.dtype, LocalStaging(torch.device("cpu"))):
            self.worker.load_bucket(bucket.weights, bucket.data)
        self.worker.finish_load(version)

    def probe_difference(self) -> float:
        """Mean difference of the log-probabilities of the probe."""
        own = torch.tensor(self.worker.prompt_log_probs(self.probe))
        return float((own - log_probs(self.model, self.probe, 1)).abs().mean())

    def mismatch(self) -> dict[str, float]:
        """Distance on responses that the engine samples."""
        for number, prompt in enumerate(self.prompts):
            self.worker.submit([Ask(number, prompt, self.length, 1.0, 1.0, 0, 0.0, 100 + number, [])])
        found: dict[int, tuple[list[int], list[float]]] = {number: ([], []) for number in range(len(self.prompts))}
        open_ones, drafts, begin = len(found), [0, 0], time.perf_counter()
        while open_ones:
            for gain in self.worker.step():
                found[gain.id][0].extend(gain.tokens)
                found[gain.id][1].extend(gain.log_probs)
                open_ones -= gain.finish_reason is not None
                drafts = [one + more for one, more in zip(drafts, gain.drafts or (0, 0), strict=True)]
        seconds = time.perf_counter() - begin
        parts = [
            torch.tensor(scores) - log_probs(self.model, [*prompt, *tokens], len(prompt))
            for prompt, (tokens, scores) in zip(self.prompts, found.values(), strict=True)
        ]
        difference = torch.cat(parts)
        ratios = (-difference).exp()
        return {
            "tokens": len(difference),
            "abs_mean": float(difference.abs().mean()),
            "abs_max": float(difference.abs().max()),
            "kl": float(difference.mean()),
            "effective_samples": float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())),
            "truncated": float((ratios > HIGHEST).float().mean()),
            "seconds": seconds,
            **({"drafts_accepted": drafts[1] / drafts[0]} if drafts[0] else {}),
        }

    @torch.no_grad()
    def change(self) -> None:
        """Change the weights."""
        generator = torch.Generator().manual_seed(7)
        for weight in self.model.parameters():
            size = weight.float().std().nan_to_num(0.0) * 0.02
            weight.add_((size * torch.randn(weight.shape, generator=generator)).to(weight.dtype))


def measure(path: str, dtype: str, arguments: Mapping[str, object], length: int) -> dict[str, object]:
    """The numbers of one case."""
    one = Measured(path, dtype, arguments, length)
    try:
        result: dict[str, object] = {"arguments": arguments, "probe_without_weights": one.probe_difference()}
        one.load(0)
        result |= {"probe": one.probe_difference(), **one.mismatch()}
        one.change()
        result["probe_with_earlier_weights"] = one.probe_difference()
        one.load(1)
        return result | {"probe_after_update": one.probe_difference(), "after_update": one.mismatch()}
    finally:
        one.worker.close()


def main() -> None:
    """Measure the cases that a file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("output", type=Path, help="JSON file that is completed")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--cases", nargs="*", default=[*CASES])
    chosen = parser.parse_args()
    name = Path(chosen.model).name
    for case in chosen.cases:
        written = json.loads(chosen.output.read_text()) if chosen.output.exists() else {}
        if case in written.get(name, {}):
            continue
        try:
            found = measure(chosen.model, chosen.dtype, CASES[case], chosen.tokens)
        except Exception as error:  # noqa: BLE001 - what vLLM cannot do is a result
            print(f"{case}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        written.setdefault(name, {})[case] = found
        chosen.output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        print(f"{case}: {json.dumps(found)}")


if __name__ == "__main__":
    main()
