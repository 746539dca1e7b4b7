"""A run in Python: own model, own dataset, own reward."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless import RewardInput, Run

BASE = "runs/quickstart-base"  # made by `make quickstart`; any causal language model will do
model, tokenizer = AutoModelForCausalLM.from_pretrained(BASE), AutoTokenizer.from_pretrained(BASE)
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 100) for b in range(10, 100)]


def is_right(sample: RewardInput) -> float:
    """1 for the right sum, else 0."""
    return float(sample.response == sample.answer)


run = Run(
    "grpo",
    name="python-run",
    models={"policy": (model, tokenizer)},
    data={"train": {"path": rows, "answer": "answer"}, "max_prompt_tokens": 8},
    reward={is_right: 1.0},
    batch={"prompts_per_step": 32},
    rollout={"max_response_tokens": 6},
    optimizer={"learning_rate": 1e-4},
    steps=20,
)
run.train()
print(run.metrics, run.generate(["12+34=", "99+99="]), sep="\n")
