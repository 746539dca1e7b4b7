"""GRPO with TRL on word problems in a separate environment, started by `benchmarks/real_task.py`.

    python benchmarks/real_task_trl.py JOB.json

The job describes what to do, and names the file for the results.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

JOB = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
EVALUATED_AT_ONCE = 32


class Steps(TrainerCallback):
    """Seconds and mean reward of each step."""

    def __init__(self) -> None:
        self.all_seconds: list[float] = []
        self.rewards: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.seconds = time.perf_counter() - self.begin

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        if "reward" in logs:
            self.all_seconds.append(self.seconds)
            self.rewards.append(logs["reward"])
            print(f"step {len(self.rewards)}: {self.seconds:.1f} s, reward {logs['reward']:.3f}", flush=True)


def rows_of(path: str) -> list[dict[str, object]]:
    """Questions as conversations, each with its answer."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]


def is_right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    return [float(one[0]["content"].strip() == right) for one, right in zip(completions, answer, strict=True)]


@torch.no_grad()
def accuracy(model: torch.nn.Module, tokenizer: AutoTokenizer) -> float:
    """Share of held-out problems that are answered right without sampling."""
    rows, right = rows_of(JOB["held_out"]), 0.0
    for begin in range(0, len(rows), EVALUATED_AT_ONCE):
        some = rows[begin : begin + EVALUATED_AT_ONCE]
        asked = tokenizer.apply_chat_template(
            [row["prompt"] for row in some],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        out = model.generate(**asked, max_new_tokens=JOB["max_response_tokens"], do_sample=False)
        texts = tokenizer.batch_decode(out[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(is_right([[{"content": text}] for text in texts], [row["answer"] for row in some]))
    return right / len(rows)


def main() -> None:
    torch.set_num_threads(JOB["threads"])
    model = AutoModelForCausalLM.from_pretrained(JOB["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(JOB["model"], padding_side="left")
    config = GRPOConfig(
        output_dir=JOB["output"],
        per_device_train_batch_size=JOB["batch"],
        gradient_accumulation_steps=JOB["prompts"] * JOB["responses"] // JOB["batch"],
        num_generations=JOB["responses"],
        max_completion_length=JOB["max_response_tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=JOB["learning_rate"],
        lr_scheduler_type=JOB["schedule"],
        max_grad_norm=1.0,
        max_steps=JOB["steps"],
        seed=JOB["seed"],
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    steps = Steps()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=is_right,
        args=config,
        train_dataset=Dataset.from_list(rows_of(JOB["train"])),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    trainer.train()
    result = {
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "rewards": steps.rewards,
        "seconds": steps.all_seconds,
        "accuracy": accuracy(trainer.model.eval(), tokenizer),
    }
    Path(JOB["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
