"""What becomes of families when ranks divide them, when adapters are trained, and in the native engine.

    python -m tests.divided_families [FAMILY ...]

tries each family of language models that is right on one rank, with a tiny random model, and writes a table of which a
page of the documentation is made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_context_parallel import train
from tests.distributed.test_training import Numbers, largest_difference
from tests.tiny_families import FILE as FAMILIES
from tests.tiny_families import TOLERANCE, tiny_config, write_family
from tests.unit.rollout.test_engine_forms import check
from tests.unit.rollout.test_native_engine import engine_of, sample

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.models.causal_lm import load_causal_lm
from leaderless.planner.checks.model_files import UNDIVIDED

FILE = FAMILIES.with_name("divided_families.json")
"""What becomes of each family, by way."""
RIGHT = "right"
MICRO_BATCH_TOKENS = 64
WAYS: Mapping[str, tuple[dict[str, int], dict[str, object]]] = {
    "two ranks": ({"dp": 2}, {}),
    "adapters": ({"dp": 2}, {"lora": LoraConfig(rank=3, alpha=6)}),
    "tp": ({"dp": 1, "tp": 2}, {}),
    "cp": ({"dp": 1, "cp": 2}, {}),
    "ep": ({"dp": 2, "ep": 2}, {}),
}
"""Sizes of the layout, and changes of the model's settings; each is compared with one rank."""


def attempt(path: str, sizes: dict[str, int], changes: dict[str, object]) -> Numbers | str:
    """Scores, the norm of a gradient and new weights, or the reason why the model is refused."""
    try:
        return train(path, sizes, MICRO_BATCH_TOKENS, {**changes})
    except RecipeError as error:
        return str(error).removeprefix("models.policy: ")


def divide(ranks: RankPool, path: str, way: str) -> str:
    """`RIGHT`, or the reason of a refusal.

    Raises:
        AssertionError: The model is accepted, and computed wrongly.
    """
    sizes, changes = WAYS[way]
    (expected,) = ranks.once(1, attempt, path, {"dp": 1}, changes)
    found = ranks.run(2, attempt, path, sizes, changes)
    if way == "tp" and "set ep" in str(found[0]):  # of a mixture
        found = ranks.run(2, attempt, path, {**sizes, "ep": 2}, changes)
    refusals = [one for one in (expected, *found) if isinstance(one, str)]
    if refusals:
        assert isinstance(expected, str) or len(refusals) == len(found), "one rank alone refuses it"
        return refusals[0]
    assert isinstance(expected, dict)
    difference = largest_difference([one for one in found if isinstance(one, dict)], expected)
    assert difference < TOLERANCE, f"numbers differ by {difference:.1e}"
    return RIGHT


def generate(path: str) -> str:
    """Whether the native engine draws by the log-probabilities of the trainer: `RIGHT`, or the reason of a refusal."""
    try:
        model = load_causal_lm(ModelConfig(path=path), "policy").eval()
        if any(kind.is_indexed for kind in model.attention_kinds):
            return "layers with an indexer, as make_native says"
        check(model, sample(engine_of(model, max_sequences=4), temperature=1.0))
    except RecipeError as error:
        return str(error)
    return RIGHT


def judge(ranks: RankPool, family: str, folder: Path) -> dict[str, str]:
    """What becomes of a family, by way."""
    write_family(tiny_config(family, vocab_size=83), folder)
    path, found = str(folder), {}
    for way in ("native engine", *WAYS):
        try:
            if way == "tp" and family in UNDIVIDED:
                found[way] = "not divided, as the planner says"
                continue
            found[way] = divide(ranks, path, way) if way in WAYS else generate(path)
        except Exception as error:  # noqa: BLE001 - it is written down, and other ways are tried
            found[way] = f"WRONG: {type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"
    return found


def main() -> None:
    """Judge some families, or all that are right."""
    families = json.loads(FAMILIES.read_text(encoding="utf-8"))["families"]
    table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    ranks = RankPool()
    torch.set_num_threads(1)
    for family in sys.argv[1:] or [name for name, verdict in families.items() if "refused" not in verdict]:
        with TemporaryDirectory() as folder:
            table[family] = judge(ranks, family, Path(folder))
        print(family, {way: one[:100] for way, one in table[family].items() if one != RIGHT}, flush=True)
        FILE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n", encoding="utf-8")
    ranks.close()


if __name__ == "__main__":
    from tests import divided_families  # as ranks know it

    divided_families.main()
