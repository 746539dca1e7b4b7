"""One engine in a separate process: `python generation_ways.py WAY MODEL`.

It reads tasks from its input, one line of JSON each, and answers each with the seconds that it took. It may run in
another environment than the benchmark, and imports only what its engine needs. An engine prepares a task, untimed, and
then runs it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

MARK = "ANSWER "
"""Prefix of answers, since libraries may print in between."""
MOST_SEQUENCES = 512
MOST_BATCH_TOKENS = 8192


class Task(TypedDict):
    """What to generate: responses of given lengths for each prompt."""

    prompts: list[list[int]]
    lengths: list[list[int]]


Run = Callable[[], int]
"""Generates, and returns the number of tokens."""
Way = Callable[[Task], Run]


def leaderless(folder: str) -> Way:
    """The native engine. It gives the log-probability of each token, as training needs it."""
    import torch

    from leaderless.config.models import ModelConfig
    from leaderless.config.rollout import SamplingConfig
    from leaderless.models.causal_lm import load_causal_lm
    from leaderless.rollout.engine import Request, SamplingParams
    from leaderless.rollout.native.engine import NativeEngine

    device = torch.device("cpu")
    model = load_causal_lm(ModelConfig(path=folder), "policy").eval().float()

    def prepare(task: Task) -> Run:
        # Without end tokens and stop texts, a response ends only at its length, and no tokenizer is needed.
        engine = NativeEngine(model, None, frozenset(), MOST_SEQUENCES, device)  # type: ignore[arg-type]

        def run() -> int:
            for i, (prompt, lengths) in enumerate(zip(task["prompts"], task["lengths"], strict=True)):
                for j, length in enumerate(lengths):
                    engine.submit(Request(prompt, [i << 16 | j]), SamplingParams(SamplingConfig(), length))
            count = 0
            while deltas := engine.step():
                count += sum(len(delta.tokens) for delta in deltas)
            engine.close()
            return count

        return run

    return prepare


def transformers(folder: str) -> Way:
    """`generate`: all responses in one batch, until the longest has ended, without log-probabilities."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()

    class AtTheirLengths(StoppingCriteria):
        def __init__(self, lengths: Tensor, prompt_tokens: int) -> None:
            self.lengths, self.prompt_tokens = lengths, prompt_tokens

        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:  # noqa: ARG002
            return input_ids.shape[1] - self.prompt_tokens >= self.lengths

    def prepare(task: Task) -> Run:
        lengths = torch.tensor([length for group in task["lengths"] for length in group])
        rows = [p for p, group in zip(task["prompts"], task["lengths"], strict=True) for _ in group]
        inputs = torch.tensor(rows)  # all prompts of a task have the same length

        def run() -> int:
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=int(lengths.max()),
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([AtTheirLengths(lengths, inputs.shape[1])]),
            )
            assert output.shape[1] == inputs.shape[1] + int(lengths.max())
            return int(lengths.sum())

        return run

    return prepare


def transformers_continuous(folder: str) -> Way:
    """The continuous batching behind `generate_batch`, with its paged cache; each request has its own length."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()

    def prepare(task: Task) -> Run:
        page = 32
        pages = sum(
            -(-(len(prompt) + length) // page) + 1
            for prompt, group in zip(task["prompts"], task["lengths"], strict=True)
            for length in group
        )
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page, num_blocks=pages, max_batch_tokens=MOST_BATCH_TOKENS
            ),
        )
        manager.start()

        def run() -> int:
            wanted = 0
            for prompt, group in zip(task["prompts"], task["lengths"], strict=True):
                for length in group:
                    manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
                    wanted += 1
            count = 0
            while wanted:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    count += len(result.generated_tokens)
                    wanted -= 1
                elif not manager.is_running():
                    raise RuntimeError("the manager's thread has ended")
            manager.stop(block=True)
            return count

        return run

    return prepare


def vllm(folder: str) -> Way:
    """vLLM in this process, with its prefix cache, in the same type; it returns the log-probability of each token."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=MOST_SEQUENCES,
        max_num_batched_tokens=MOST_BATCH_TOKENS,
        max_model_len=2048,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def prepare(task: Task) -> Run:
        engine.reset_prefix_cache()
        prompts = [
            {"prompt_token_ids": prompt}
            for prompt, group in zip(task["prompts"], task["lengths"], strict=True)
            for _ in group
        ]
        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
            for group in task["lengths"]
            for length in group
        ]

        def run() -> int:
            outputs = engine.generate(prompts, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return run

    return prepare


WAYS = {way.__name__: way for way in (leaderless, transformers, transformers_continuous, vllm)}


def main() -> None:
    name, folder = sys.argv[1:]
    way = WAYS[name](folder)
    way({"prompts": [[1, 2, 3]], "lengths": [[4, 4]]})()
    print(MARK + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        task: Task = json.loads(line)
        run = way(task)
        begin = time.perf_counter()
        count = run()
        seconds = time.perf_counter() - begin
        expected = sum(map(sum, task["lengths"]))
        if count != expected:
            sys.exit(f"{name} gave {count} tokens instead of {expected}")
        print(MARK + json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
