"""What becomes of each family of language models, for its page."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "reference/families.json"
DIVIDED, OF_VLLM = RESULTS.with_name("divided_families.json"), RESULTS.with_name("vllm_families.json")
WAYS = {
    "native engine": "native engine",
    "two ranks": "2 ranks",
    "adapters": "adapters",
    "tp": "`tp`",
    "cp": "`cp`",
    "ep": "`ep`",
    "export": "export",
}
"""Columns of the table of those that are right, by what they are called in the results."""
HEAD = """# Model families

Every family of language models of `transformers` {version} was tried with a tiny random model, with dropout and
noise on routers wherever it has them. A family is right if log-probabilities in the training path, packed and
with shared prompts, equal those of the model itself in evaluation mode (to 1e-5 in float32), are the same in a
second pass, and gradients equal those of the model itself. All others are refused by name before the first
step. Of models with images or sound, only the text part was tried.

`make test` tries some families and `make test-thorough` all of them; `python -m tests.tiny_families` writes this table.
"""
TABLE = """The native engine draws tokens by the log-probabilities of the trainer (to 1e-5). Two ranks have the scores,
the gradient's norm and the new weights of one rank (to 1e-5) where they divide weights and samples, with all weights
or with adapters, layers (`tp`), the tokens of sequences (`cp`) or experts (`ep`). Mixtures are divided along `ep`, too,
where `tp` asks for it. What `leaderless export` makes of a checkpoint that two ranks have written after an update is
loaded by `transformers`: it has the weights of the trainer, bit for bit, and its log-probabilities (to 1e-5). For this,
Youtu was given no token for padding: `transformers` sets the embedding of one to 0 whenever it loads the family. A dash
means that a family is refused by name before the first step, or has no experts, and a cross that it is accepted, and
its numbers are wrong or its processes fail.
`python -m tests.divided_families` tries all of it.

In vLLM 0.32 on the CPU, a model with heads of 32 numbers is given the weights of a trainer, before and after an update,
and draws tokens by its log-probabilities; some kernels compute in bfloat16 alone. "Names" stands for families whose
kernels it lacks there: all of its weights come, by name and size, and it was not run. What vLLM cannot do ends with an
error before a token is drawn, as it is said below. `python -m tests.vllm_families` tries it, with vLLM's interpreter,
as `make test-vllm` makes it, in the variable `LEADERLESS_VLLM_PYTHON`. SGLang was not tried.
"""
ENGINE = """## In vLLM

Windows of `cohere2` and `cohere2_moe` have one token more in vLLM than in `transformers`, and are refused there.
The log-probabilities of DeepSeek-V3 and LFM2 differ with vLLM's own loader, too; whether they do on GPUs was not tried.
"""


def families_page() -> str:
    """The page of model families, from the results of `python -m tests.tiny_families`."""
    table = json.loads(RESULTS.read_text(encoding="utf-8"))
    families: dict[str, dict[str, str]] = table["families"]
    divided: dict[str, dict[str, str]] = json.loads(DIVIDED.read_text(encoding="utf-8")) if DIVIDED.exists() else {}
    of_vllm: dict[str, str] = json.loads(OF_VLLM.read_text(encoding="utf-8"))
    right = [name for name, verdict in families.items() if "refused" not in verdict]
    lines = [
        HEAD.format(version=table["transformers"]),
        f"## Right: {len(right)}\n\n{TABLE}",
        f"| family | {' | '.join(WAYS.values())} | vLLM |",
        f"| --- |{' :-: |' * (len(WAYS) + 1)}",
        *(f"| `{name}` | {' | '.join(_cells(divided.get(name)))} | {_in_vllm(of_vllm.get(name))} |" for name in right),
        "",
        ENGINE,
        "| family | what vLLM says |",
        "| --- | --- |",
        *(f"| `{name}` | {_said(of_vllm[name])} |" for name in right if ":" in of_vllm.get(name, "")),
        "",
        f"## Refused: {len(families) - len(right)}\n",
        "A star marks families that are right with other settings: full attention in all layers, scores as they are.\n",
        "| why | families |",
        "| --- | --- |",
    ]
    by_reason: dict[str, list[str]] = {}
    for name, verdict in families.items():
        if "refused" in verdict:
            star = " \\*" if "otherwise" in verdict else ""
            by_reason.setdefault(verdict["refused"], []).append(f"`{name}`{star}")
    for reason, names in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {reason} | {', '.join(names)} |")
    return "\n".join(lines)


def _cells(found: dict[str, str] | None) -> list[str]:
    if found is None:
        return ["not tried"] * len(WAYS)
    return [_cell(found.get(way)) for way in WAYS]


def _cell(verdict: str | None) -> str:
    if verdict is None:
        return "not tried"
    return "✓" if verdict == "right" else "✗" if verdict.startswith("WRONG") else "–"


def _in_vllm(found: str | None) -> str:
    if found is None:
        return "not tried"
    if found.startswith("right"):
        return "✓" if found == "right" else "✓ (bfloat16)"
    return {"names": "names", "WRONG": "✗"}.get(found.partition(":")[0], "–")


def _said(found: str) -> str:
    return found.partition(": ")[2].replace("|", "\\|").replace("<", "&lt;")
