"""What becomes of each family of language models, for its page."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "reference/families.json"
HEAD = """# Model families

Every family of language models of `transformers` {version} was tried with a tiny random model, with dropout and
noise on routers wherever it has them. A family is right if log-probabilities in the training path, packed and
with shared prompts, equal those of the model itself in evaluation mode (to 1e-5 in float32), are the same in a
second pass, and gradients equal those of the model itself. All others are refused by name before the first
step. Of models with images or sound, only the text part was tried.

`make test` tries some families and `make test-thorough` all of them; `python -m tests.tiny_families` writes this table.
"""


def families_page() -> str:
    """The page of model families, from the results of `python -m tests.tiny_families`."""
    table = json.loads(RESULTS.read_text(encoding="utf-8"))
    families: dict[str, dict[str, str]] = table["families"]
    right = [name for name, verdict in families.items() if "refused" not in verdict]
    lines = [
        HEAD.format(version=table["transformers"]),
        f"## Right: {len(right)}\n\n{', '.join(f'`{name}`' for name in right)}\n",
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
