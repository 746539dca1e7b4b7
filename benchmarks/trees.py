"""Episodes whose conversations branch: passes over trees, next to passes over rows that share their prompts or nothing.

    python benchmarks/trees.py [MODEL] [--rounds N]

The traces have eight turns: a sampled answer and what a tool says. Branching harnesses make such shapes:

- *alternatives*: four answers at each turn, of which one goes on;
- *search*: two answers at each turn, the best eight conversations go on;
- *shortened*: sixteen episodes, each shortened to a summary after four turns and once asked aside at every turn;
- *apart*: responses that share their prompt alone, which shows what looking for trees costs.

Without a model it is a Qwen2 of 12 million parameters with random weights. The ways take turns, and each trains on the
same samples: log-probabilities and their gradient. The results go to docs/performance/trees.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.packed import ATTENTION_NAME
from leaderless.models.attention.shared_prompts import blocks_of
from leaderless.models.causal_lm import CausalLM, load_causal_lm
from leaderless.training import micro_batches
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.prefix_trees import tree_order
from made import Size
from model_flops import training_flops

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/trees.json"
PROMPT, ANSWER, TOLD, TURNS = 96, 24, 40, 8
"""Tokens of a prompt, of an answer, of what a tool says, and number of turns."""
MICRO_BATCH_TOKENS = 16_384
Row = tuple[list[int], list[bool]]
"""Tokens behind a prompt, and which of them were sampled in this row."""


class Trace:
    """Rows of one prompt, drawn from one generator."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self._generator, self._vocabulary = torch.Generator().manual_seed(seed), vocabulary
        self.rows: list[Row] = []

    def text(self, count: int) -> list[int]:
        """Random tokens."""
        return torch.randint(1, self._vocabulary, (count,), generator=self._generator).tolist()

    def add(self, before: list[int]) -> list[int]:
        """Sample an answer after some tokens, and return all of it with what a tool says then."""
        answer = self.text(ANSWER)
        self.rows.append(([*before, *answer], [False] * len(before) + [True] * ANSWER))
        return [*before, *answer, *self.text(TOLD)]


def alternatives(trace: Trace) -> None:
    """Four answers at each turn, of which the last one goes on."""
    before: list[int] = []
    for _ in range(TURNS):
        going_on = [trace.add(before) for _ in range(4)]
        before = going_on[-1]


def search(trace: Trace) -> None:
    """Two answers at each turn of each conversation; eight of them go on."""
    open_ones: list[list[int]] = [[]]
    for _ in range(TURNS):
        open_ones = [trace.add(before) for before in open_ones for _ in range(2)][:8]


def shortened(trace: Trace) -> None:
    """Episodes that begin anew with a summary after half of their turns, and ask a helper at every turn."""
    for _ in range(16):
        before: list[int] = []
        for turn in range(TURNS):
            if turn == TURNS // 2:
                before = trace.text(2 * TOLD)
            trace.add([*before, *trace.text(TOLD)])
            before = trace.add(before)


def apart(trace: Trace) -> None:
    """Responses of one turn."""
    for _ in range(32):
        trace.add([])


SHAPES: Mapping[str, Callable[[Trace], None]] = {
    "alternatives": alternatives,
    "search": search,
    "shortened": shortened,
    "apart": apart,
}
WAYS = {"rows": "nothing", "prompts": "prompts", "trees": "all that is equal"}
"""What samples share in each way."""
Results = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""By model, shape and way."""


def samples_of(shape: str, vocabulary: int, *, is_shared: bool) -> Batch:
    """The samples of a shape; each with a prompt of its own, or all with the same."""
    trace = Trace(0, vocabulary)
    prompt = trace.text(PROMPT)
    SHAPES[shape](trace)
    count = len(trace.rows)
    columns = {
        "tokens": Jagged.from_lists([tokens for tokens, _ in trace.rows], torch.int64, "tokens"),
        "response_mask": Jagged.from_lists([mask for _, mask in trace.rows], torch.bool, "tokens"),
    }
    prompts = Jagged.from_lists([prompt] * (1 if is_shared else count), torch.int64, "prompt_tokens")
    table = Batch(torch.arange(len(prompts)), {"prompt_tokens": prompts})
    index = torch.zeros(count, dtype=torch.int64) if is_shared else torch.arange(count)
    return Batch(torch.arange(count), columns, table, index)


@contextmanager
def looking_for_trees(*, is_on: bool) -> Iterator[None]:
    """Let samples share what they begin with, or their prompts alone."""
    kept = micro_batches.tree_order
    try:
        if not is_on:
            micro_batches.tree_order = lambda texts: tree_order(texts, least=1 << 40)
        yield
    finally:
        micro_batches.tree_order = kept


def engine_of(path: str | None) -> tuple[FsdpEngine, PreTrainedConfig]:
    """The engine of a model, and its description."""
    config = ModelConfig(path=path or "made here")
    if path is None:
        described: PreTrainedConfig = Qwen2Config(
            vocab_size=1024, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
            num_key_value_heads=2,
        )  # fmt: skip
        torch.manual_seed(0)
        model = CausalLM(AutoModelForCausalLM.from_config(described, attn_implementation=ATTENTION_NAME))
    else:
        described, model = AutoConfig.from_pretrained(path), load_causal_lm(config, "policy")
    group = ProcessGroup((0,), 0)
    made = FsdpEngine(
        model, config, group, torch.device("cpu"), MICRO_BATCH_TOKENS, optimizer=OptimizerConfig(), num_updates=1
    )
    return made, described


def train(engine: FsdpEngine, samples: Batch) -> tuple[float, float, int, int, torch.Tensor]:
    """Seconds, sum of log-probs, tokens and pairs of passes, and the gradient of the sum of log-probs."""
    for _, parameter in engine.named_weights():
        parameter.grad = None
    begin, total, num_tokens, num_pairs = time.perf_counter(), 0.0, 0, 0
    for one in engine.micro_batches(samples):
        outputs = engine.forward(one)
        outputs.log_probs.sum().backward()
        total += float(outputs.log_probs.detach().sum())
        num_tokens += len(one.tokens)
        for block in blocks_of(one.families):
            own = len(block.own)
            num_pairs += own * block.position + own * (own + 1) // 2
    seconds = time.perf_counter() - begin
    grads = [parameter.grad.flatten() for _, parameter in engine.named_weights() if parameter.grad is not None]
    return seconds, total, num_tokens, num_pairs, torch.cat(grads)


def table(results: Results) -> str:
    """What was found, for the page about training."""
    lines = [
        "| model | shape | samples | shared | tokens in passes | operations, 10^12 | seconds | speedup | on prompts |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model, shapes in results.items():
        for shape, ways in shapes.items():
            for way, one in ways.items():
                figures = [f"{one['tokens']:,.0f}", f"{one['tera_flops']:.2f}", f"{median(one['seconds']):.2f}"]
                figures += [_faster(ways[other]["seconds"], one["seconds"]) for other in ("rows", "prompts")]
                lines.append(f"| {model} | {shape} | {one['samples']:.0f} | {WAYS[way]} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _faster(slow: list[float], fast: list[float]) -> str:
    """How much faster one way is in the same rounds, with the smallest and the largest ratio."""
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    """Measure all shapes in turns, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    given = parser.parse_args()
    engine, described = engine_of(given.model)
    size = Size(
        described.hidden_size,
        described.num_hidden_layers,
        described.num_attention_heads,
        described.num_key_value_heads,
        described.intermediate_size,
        described.vocab_size,
    )
    name = "Qwen2, random" if given.model is None else Path(given.model).name
    found: Results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for shape in given.shapes.split(","):
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        facts: dict[str, dict[str, Any]] = {}
        reference: torch.Tensor | None = None
        for _ in range(given.rounds):
            for way in WAYS:
                samples = samples_of(shape, described.vocab_size, is_shared=way != "rows")
                with looking_for_trees(is_on=way == "trees"):
                    took, total, num_tokens, num_pairs, gradient = train(engine, samples)
                reference = gradient if reference is None else reference
                seconds[way].append(took)
                flops = training_flops(size, num_tokens, int(samples.jagged("response_mask").values.sum()), num_pairs)
                facts[way] = {
                    "samples": len(samples),
                    "tokens": num_tokens,
                    "tera_flops": flops / 1e12,
                    "log_probs": total,
                    "gradient_difference": float((gradient - reference).norm() / reference.norm()),
                }
        found.setdefault(name, {})[shape] = {way: {**facts[way], "seconds": seconds[way]} for way in WAYS}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(table({name: {shape: found[name][shape]}}), flush=True)


if __name__ == "__main__":
    main()
