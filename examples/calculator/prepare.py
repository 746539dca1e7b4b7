"""Makes a tiny model that chats and calls tools, sums to learn, and the demonstrations of a careless teacher.

Sums have numbers of one digit, which the model can add in its head, or of four, which it cannot. The teacher uses the
calculator at random, types wrong now and then, and miscopies some results. Reinforcement learning then finds out when
to use it, and how, from nothing but rewards.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from transformers import AutoTokenizer

from leaderless.models.loading.tiny import END_TOKEN, write_tiny_model

CALL, CLOSE = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<says>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}" + END_TOKEN + "\n"
    "{% elif m.role == 'tool' %}<result>{{ m.content }}"
    "{% else %}<asks>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<says>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "calculate"}}]
NUM_SUMS, NUM_HELD_OUT = 20_000, 256
CALLS, SLIPS, MISCOPIES = 0.3, 0.25, 0.1
"""Shares of questions that the teacher types in, of wrong typing, and of wrong copies of a result."""


def prepare(folder: Path, seed: int = 0, num_sums: int = NUM_SUMS) -> None:
    """Write `model/`, `demonstrations.jsonl`, `train.jsonl` and `test.jsonl`.

    Args:
        folder: Folder to write into.
        seed: Seed of the model's weights, the sums and the teacher.
        num_sums: Number of sums to train on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [CALL, CLOSE, "<tool>calculate", "<asks>", "<says>", "<result>"]
    characters = "0123456789+\nErorxpsinmutbehlwdga, "
    write_tiny_model(
        folder / "model", characters, hidden_size=128, num_layers=2, chat_template=TEMPLATE, words=words, seed=seed
    )
    generator = random.Random(seed)
    sums = [make_sum(generator) for _ in range(num_sums + NUM_HELD_OUT)]
    teacher = Teacher(folder / "model", generator)
    shown = [line for row in sums[:num_sums] for line in teacher.demonstrate(row["question"])]
    test = [row for row in sums[num_sums:] if len(row["question"]) > 3 or generator.random() < 0.5]
    for name, content in (("train", sums[:num_sums]), ("test", test), ("demonstrations", shown)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")


def make_sum(generator: random.Random) -> dict[str, str]:
    """A question of two numbers, with its answer.

    Args:
        generator: Random numbers.
    """
    low, high = generator.choice([(0, 9), (1000, 9999)])
    a, b = generator.randint(low, high), generator.randint(low, high)
    return {"question": f"{a}+{b}", "answer": str(a + b)}


class Teacher:
    """Shows how to answer, not always well.

    Args:
        model: Folder of the tokenizer.
        generator: Random numbers.
    """

    def __init__(self, model: Path, generator: random.Random) -> None:
        self.tokenizer, self.generator = AutoTokenizer.from_pretrained(model), generator

    def demonstrate(self, question: str) -> list[dict[str, str]]:
        """Each message of a conversation with what comes before it, as rows of a dataset.

        Args:
            question: Sum.
        """
        asked = [{"role": "user", "content": question}]
        answer = str(sum(map(int, question.split("+"))))
        if self.generator.random() > CALLS:
            return [self._row(asked, answer)]
        typed = self._slip(question) if self.generator.random() < SLIPS else question
        call = f"{CALL}{typed}{CLOSE}"
        result = str(sum(map(int, typed.split("+"))))
        told = [*asked, {"role": "assistant", "content": call}, {"role": "tool", "content": result}]
        copied = self._slip(result) if self.generator.random() < MISCOPIES else result
        return [self._row(asked, call), self._row(told, copied)]

    def _row(self, messages: list[dict[str, str]], response: str) -> dict[str, str]:
        prompt = self.tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
        return {"prompt": prompt, "response": response}

    def _slip(self, text: str) -> str:
        """A text with another last digit."""
        return text[:-1] + str((int(text[-1]) + self.generator.randint(1, 9)) % 10)


if __name__ == "__main__":
    prepare(Path("runs/calculator-data"))
