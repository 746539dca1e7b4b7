"""Runs that tests of the report write, and the page as they read it."""

from __future__ import annotations

import json
import math
import random
from html.parser import HTMLParser
from pathlib import Path

import yaml

from leaderless.config import dump_recipe, load_recipe
from leaderless.observability.report.checks import review
from leaderless.observability.report.run_files import read_run
from leaderless.planner import Cluster, make_plan
from leaderless.planner.show.picture import draw_plan
from leaderless.planner.workflow import resolve_workflow

RECIPE = """
name: qwen3-gsm8k
workflow: grpo
models: {policy: MODEL}
data:
  train: {path: openai/gsm8k, prompt: question, answer: answer}
  evaluation: {path: openai/gsm8k, split: test, prompt: question, answer: answer}
reward: {math: 1.0, format: {weight: 0.2, pattern: ".*<answer>.*"}}
batch: {prompts_per_step: 32, responses_per_prompt: 8}
evaluation: {every_steps: 10, responses_per_prompt: 4, temperature: 1.0}
algorithm: {kl: {coefficient: 0.001}}
layout: {rollout: {ranks: 0-3}, policy: {ranks: 4-7}}
steps: STEPS
"""

MODEL_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


def write_run(directory: Path, num_steps: int = 40, *, seed: int = 0) -> Path:
    """A run directory as left by a healthy GRPO run."""
    directory.mkdir(parents=True, exist_ok=True)
    model = directory.parent / "Qwen3-1.7B"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    source = directory.parent / "recipe.yaml"
    source.write_text(RECIPE.replace("MODEL", str(model)).replace("STEPS", str(num_steps)))
    recipe = load_recipe(source).recipe
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(8))
    (directory / "config.yaml").write_text(dump_recipe(recipe))
    (directory / "plan.json").write_text(json.dumps(plan.to_json()))
    (directory / "plan.svg").write_text(draw_plan(plan))
    rng = random.Random(seed)
    write_lines(directory / "metrics.jsonl", [metrics_row(step, num_steps, rng) for step in range(num_steps + 1)])
    for step in range(1, num_steps + 1):
        write_lines(directory / f"samples/step-{step:06d}.jsonl", sample_rows(step, step / num_steps, rng))
    return directory


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def replace_metric(run: Path, metric: str, value_at) -> Path:
    """Change one metric of every logged training step, by a function of the step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run / "metrics.jsonl", [row | {metric: value_at(row["step"])} if row["step"] else row for row in rows])
    return run


def metrics_row(step: int, num_steps: int, rng: random.Random) -> dict[str, object]:
    progress = 1 - math.exp(-3 * step / num_steps)

    def noisy(value: float, spread: float = 0.05) -> float:
        return value * rng.gauss(1, spread)

    row: dict[str, object] = {"step": step, "time_s": 21.5 * step + 4}
    if step % 10 == 0 or step == num_steps:
        row |= {"evaluation/mean@4": 0.41 + 0.3 * progress, "evaluation/pass@4": 0.62 + 0.2 * progress}
        row |= {"evaluation/maj@4": 0.47 + 0.28 * progress, "time/evaluate": noisy(6.5)}
    if step == 0:
        return row
    math_reward, format_reward = noisy(0.3 + 0.45 * progress), min(1.0, noisy(0.5 + 0.48 * progress, 0.02))
    row |= {
        "reward/mean": math_reward + 0.2 * format_reward,
        "reward/std": 0.45 - 0.1 * progress,
        "reward/math": math_reward,
        "reward/format": format_reward,
        "reward/failed": 0,
        "rollout/response_tokens": noisy(190 + 90 * progress),
        "rollout/truncated": noisy(0.08 - 0.05 * progress),
        "rollout/tokens_per_s": noisy(5200),
        "group/no_signal": noisy(0.12 + 0.15 * progress),
        "policy/loss": rng.gauss(0, 1e-3),
        "policy/grad_norm": noisy(0.35, 0.2),
        "policy/entropy": noisy(0.8 - 0.4 * progress),
        "policy/kl": noisy(0.02 * progress + 1e-4),
        "policy/clip_fraction": noisy(0.01),
        "policy/learning_rate": 1e-6 * min(1, step / 5),
        "mismatch/abs_mean": noisy(2e-4, 0.2),
        "mismatch/abs_max": noisy(8e-3, 0.3),
        "mismatch/kl": noisy(3e-7, 0.3),
        "throughput/tokens_per_s": noisy(3300),
        "data/epoch": step * 32 / 7473,
        "time/step": noisy(21.5),
        "time/rollout": noisy(11),
        "time/reward": noisy(0.6),
        "time/reference": noisy(1.9),
        "time/advantage": 0.01,
        "time/samples": 0.02,
        "time/policy": noisy(6.2),
        "time/weights(policy->0-3)": noisy(0.7),
        "time/load": 0.01,
        "time/reshard(rollout->4-7)": noisy(0.1),
        "time/reshard(advantage->4-7)": 0.01,
    }
    return row


def sample_rows(step: int, skill: float, rng: random.Random) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for prompt in range(4):
        a, b = rng.randint(12, 99), rng.randint(12, 99)
        question = f"A baker sells {a} loaves on Monday and {b} on Tuesday.\nHow many loaves does she sell in all?"
        is_right = [rng.random() < 0.2 + 0.6 * skill for _ in range(8)]
        mean = sum(is_right) / 8
        for sibling, right in enumerate(is_right):
            total = a + b if right else a + b + rng.choice([-10, 1, 10])
            response = f"She sells {a} loaves first.\nThen {b} more: {a} + {b} = {total}.\n\n<answer>{total}</answer>"
            details = {"math": {"value": float(right)}, "format": {"value": 1.0}}
            rows.append(
                {
                    "step": step,
                    "group_id": 1000 * step + prompt,
                    "sample_id": f"{step}-{prompt}-{sibling}",
                    "prompt": question,
                    "response": response,
                    "answer": str(a + b),
                    "reward": float(right) + 0.2,
                    "is_valid": True,
                    "details": details,
                    "advantage": right - mean,
                    "is_truncated": False,
                }
            )
    return rows


def token_view(*texts: str) -> dict[str, object]:
    """Tokens as a run records them."""
    return {"total": len(texts), "text": list(texts), "rollout": [-0.25] * len(texts), "old": [-0.5] * len(texts)}


class Page(HTMLParser):
    """The elements that a browser's parser finds in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag in self._open:
            del self._open[len(self._open) - 1 - self._open[::-1].index(tag) :]

    def handle_data(self, data):
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.words.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def data(self, identifier: str):
        scripts = [attributes for tag, attributes in self.elements if tag == "script"]
        return json.loads(self.scripts[[one.get("id") for one in scripts].index(identifier)])


def titles(run: Path) -> list[str]:
    return [finding.title for finding in review(read_run(run)).findings]


EVIL = "</script><script>alert(1)</script></script ><img src=x onerror=alert(2)>&lt;b\u2028\" '"


def spoil_with(run: Path, evil: str) -> None:
    """Put a text wherever a run directory can contain one."""
    rows = sample_rows(40, 1.0, random.Random(0))
    texts = {"prompt": evil, "response": evil, "answer": evil, "group_id": evil, "is_valid": False}
    texts["tokens"] = token_view(evil)
    rows[0] |= {**texts, "details": {evil: {"error": evil, "said": evil}}}
    write_lines(run / "samples/step-000040.jsonl", rows)
    replace_metric(run, "reward/failed", lambda _: 1)
    replace_metric(run, evil, lambda step: step)
    replace_metric(run, f"time/{evil}", lambda step: step)
    plan = json.loads((run / "plan.json").read_text())
    plan |= {"recipe": evil, "workflow": evil, "pruned": [evil], "batch": {evil: evil}}
    plan["nodes"][0] |= {"name": evil, "run": evil, "layout": evil}
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "config.yaml").write_text(yaml.safe_dump({"models": {"policy": {"path": evil}}}))
