"""A model that is served by the command, and computed by `transformers`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tests.end_to_end.cli import environment
from tests.tiny import CHARACTERS, scatter_vectors
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless.models.loading.tiny import write_tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TIMEOUT_S = 600
QUESTIONS = [f"{i}+{i + 3}=" for i in range(8)]
"""Questions of all tasks."""


@dataclass(frozen=True)
class Decoder:
    """A model as `transformers` computes it.

    Attributes:
        path: Folder of the model.
        model: Its decoder, in float32.
        tokenizer: Its tokenizer.
    """

    path: Path
    model: Any
    tokenizer: Any

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Questions with choices: the tokens of some are parts of characters, and one is what the model would say."""
        own = [self.greedy(self.encode(question), 1) or "twelve" for question in QUESTIONS]
        choices = [[str(2 * i + 3), "é你", own[i], "twelve"] for i in range(len(QUESTIONS))]
        return [{"question": QUESTIONS[i], "choices": choices[i], "gold": i % 2 * 2} for i in range(len(QUESTIONS))]

    @classmethod
    def of_tests(cls, folder: Path) -> Decoder:
        """The model in the folder `LEADERLESS_EVAL_MODEL`, or else a tiny one that is written into a folder."""
        given = os.environ.get("LEADERLESS_EVAL_MODEL")
        path = Path(given) if given else folder / "tiny"
        if not given:
            write_tiny_model(path, f"{CHARACTERS}é你", hidden_size=32, max_positions=2048, chat_template=TEMPLATE)
            scatter_vectors(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return cls(path, model, AutoTokenizer.from_pretrained(path))

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    def log_prob(self, prompt: list[int], answer: list[int]) -> tuple[float, bool]:
        """The log-probability of an answer, and whether each of its tokens is the likeliest."""
        with torch.no_grad():
            scores = self.model(torch.tensor([prompt + answer])).logits[0].double().log_softmax(-1)
        rows, own = scores[len(prompt) - 1 : -1], torch.tensor(answer)
        return float(rows.gather(1, own[:, None]).sum()), bool((rows.argmax(-1) == own).all())

    def score(self, question: str, answer: str) -> tuple[float, bool]:
        """The log-probability of an answer after a question, tokenized together."""
        prompt, whole = self.encode(question), self.encode(question + answer)
        return self.log_prob(prompt, whole[len(prompt) :])

    def greedy(self, prompt: list[int], most: int) -> str:
        """The greedy answer, whatever settings for sampling come with the model."""
        tokens, ends = list(prompt), self.model.generation_config.eos_token_id
        while len(tokens) < len(prompt) + most:
            with torch.no_grad():
                tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] in (ends if isinstance(ends, list) else [ends]):
                break
        text: str = self.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
        return text


@contextmanager
def serving(model: Path) -> Iterator[tuple[str, str]]:
    """The address of `leaderless serve` for a model, and the name of the model there."""
    command = [sys.executable, "-m", "leaderless", "serve", str(model), "--port", "0", "--name", "served"]
    process = subprocess.Popen(
        [*command, "--compute-dtype", "float32"], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        found = next(filter(None, (re.search(r"answers at (\S+/v1)", line) for line in process.stdout)))
        yield found[1], "served"
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT


def evaluated(model: Path, *arguments: object, code: int = 0) -> str:
    """What `leaderless eval --with lm-eval` prints about a model."""
    words = [str(argument) for argument in ("eval", model, "--with", "lm-eval", *arguments)]
    return ran([sys.executable, "-m", "leaderless", *words], Path.cwd(), environment(), code)


def ran(command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None, code: int = 0) -> str:
    """What a command prints that ends with this code."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder,
        env=os.environ | (variables or {}),
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
