"""Some steps of TRL's `GRPOTrainer` in a separate environment, started by `benchmarks/training_step.py`.

    python benchmarks/training_step_trl.py JOB.json

The job describes what to do, and names the file for the results.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
PARTS = {
    "generation": "_generate",
    "scoring": "_generate_and_score_completions",
    "log_probs": "_get_per_token_logps_and_entropies",
}
"""Methods of the trainer. Scoring is everything before the update, including generation and log-probs."""
P = ParamSpec("P")
T = TypeVar("T")
Turn = tuple[list[list[int]], object]
"""The tokens of each response, and their log-probabilities."""


class FirstToken(LogitsProcessor):
    """Allows only the first tokens from which a response gets the same length as on the other side."""

    def __init__(self, prompt_tokens: int, lengths: list[int]) -> None:
        self.prompt_tokens, self.lengths = prompt_tokens, lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > self.prompt_tokens:
            return scores
        first, period = JOB["first_counter"], JOB["longest"] - 1
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        for row, length in enumerate(self.lengths):
            allowed[row, first + length - 2 :: period] = True
        return scores.masked_fill(~allowed, -torch.inf)


@dataclass
class Watch:
    """How long the parts of a step have taken, and how many tokens were sampled."""

    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("generation", "scoring", "log_probs"), 0.0)
    )
    num_tokens: int = 0

    def timed(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        """The same function; its time is added up if no gradient is needed."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if part == "log_probs" and torch.is_grad_enabled():
                return function(*args, **kwargs)
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - begin
            return result

        return call

    def counted(self, function: Callable[P, Turn]) -> Callable[P, Turn]:
        """The same function; its tokens are counted."""

        def call(*args: P.args, **kwargs: P.kwargs) -> Turn:
            result = function(*args, **kwargs)
            self.num_tokens = sum(map(len, result[0]))
            return result

        return call


class Steps(TrainerCallback):
    """One record per step."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.records: list[dict[str, float]] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.watch.seconds.update(dict.fromkeys(self.watch.seconds, 0.0))
        self.begin = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        step, parts = time.perf_counter() - self.begin, self.watch.seconds
        self.records.append(
            {
                "step": step,
                "generation": parts["generation"],
                "log_probs": parts["log_probs"],
                "update": step - parts["scoring"],
                "response_tokens": self.watch.num_tokens,
            }
        )


def as_long(generate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same function, sampling responses of the lengths in the job, step by step."""
    lengths = iter(JOB["lengths"])

    def call(**kwargs: object) -> torch.Tensor:
        first = FirstToken(JOB["prompt_tokens"], next(lengths))
        return generate(**kwargs, logits_processor=LogitsProcessorList([first]))

    return call


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(re.fullmatch(JOB["pattern"], text, re.DOTALL) is not None) for text in completions]


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    model = AutoModelForCausalLM.from_pretrained(JOB["model"], dtype=torch.float32)
    config = GRPOConfig(
        output_dir=JOB["output"],
        per_device_train_batch_size=JOB["batch"],
        gradient_accumulation_steps=JOB["prompts"] * JOB["responses"] // JOB["batch"],
        num_generations=JOB["responses"],
        max_completion_length=JOB["max_response_tokens"],
        temperature=1.0,
        beta=JOB["kl"],
        loss_type="grpo",
        learning_rate=JOB["learning_rate"],
        max_grad_norm=1.0,
        max_steps=JOB["steps"],
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    watch = Watch()
    steps = Steps(watch)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=JOB["rows"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(JOB["model"], padding_side="left"),
        callbacks=[steps],
    )
    for part, name in PARTS.items():
        setattr(trainer, name, watch.timed(part, getattr(trainer, name)))
    trainer._generate_single_turn = watch.counted(trainer._generate_single_turn)  # noqa: SLF001
    trainer.model.generate = as_long(trainer.model.generate)
    trainer.train()
    result = {"versions": {name: version(name) for name in ("trl", "transformers", "torch")}, "steps": steps.records}
    Path(JOB["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
