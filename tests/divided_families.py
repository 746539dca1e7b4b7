"""What becomes of families when ranks divide them, with adapters, in the native engine, and when they are exported.

    python -m tests.divided_families [--ways WAY,WAY] [FAMILY ...]

tries each family of language models that is right on one rank, with a tiny random model, and writes a table of which a
page of the documentation is made. Ways that are not named stay as they were found before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_checkpoint import LENGTHS, save, writer_of
from tests.distributed.test_context_parallel import train
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import Numbers, largest_difference
from tests.tiny import add_gradients, random_samples, tiny_model
from tests.tiny_families import FILE as FAMILIES
from tests.tiny_families import TOLERANCE, log_probs_of, tiny_config, write_family
from tests.unit.rollout.test_engine_forms import check
from tests.unit.rollout.test_native_engine import engine_of, sample
from torch import Tensor
from transformers import AutoModelForCausalLM

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.distributed.transport import Transport
from leaderless.models.causal_lm import load_causal_lm
from leaderless.observability.run_directory import list_checkpoints
from leaderless.planner import Layout
from leaderless.planner.checks.model_files import UNDIVIDED
from leaderless.training.fsdp import FsdpEngine, make_engine
from leaderless.worker.checkpoint.export import export_model

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
ALL_WAYS = ("native engine", *WAYS, "export")
"""All of them, in their order in the table."""


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


def save_trained(path: str, sizes: dict[str, int], folder: str, words: str) -> tuple[Numbers, Tensor]:
    """Write a checkpoint after an update; returns the weights, and log-probabilities of samples by them.

    The tokenizer is that of another model.
    """
    transport, samples = Transport(torch.device("cpu"), timeout_s=60), random_samples(LENGTHS)
    layout = Layout(transport.world.ranks, **sizes)
    engine = make_engine(setup_of(transport, layout, path))
    assert isinstance(engine, FsdpEngine)
    own = samples.select(torch.arange(layout.shard_of(transport.rank), len(LENGTHS), layout.dp))
    add_gradients(engine, own, lambda outputs, _: -outputs.log_probs.sum() / 16)
    engine.optimizer_step()
    save(writer_of(folder, engine, transport, words, timeout_s=60), 1)
    weights = {name: value.clone() for name, value in engine.full_weights()}
    return weights, engine.log_probs(samples).values


def export(ranks: RankPool, path: str, sizes: dict[str, int]) -> str:
    """`RIGHT`: `transformers` loads what is exported of a trained model, and computes what the trainer does.

    Raises:
        AssertionError: It has other weights, or computes otherwise.
    """
    with TemporaryDirectory() as folder:
        weights, expected = ranks.run(2, save_trained, path, sizes, folder, tiny_model())[0]
        (checkpoint,) = list_checkpoints(Path(folder))
        out = export_model(checkpoint, "policy", Path(folder, "exported"))
        options = {"attn_implementation": "eager", "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(out, **options)
    first = AutoModelForCausalLM.from_pretrained(path)
    strange = [f"{what} {sorted(map(str, names))[0]}" for what, names in info.items() if names]
    assert not strange, f"of weights there are {', '.join(strange)}"
    found, before = dict(model.named_parameters()), dict(first.named_parameters())
    wrong = [name for name in found.keys() | weights.keys() if not _are_equal(found.get(name), weights.get(name))]
    assert not wrong, f"weights differ, as {wrong[0]}"
    assert any(not torch.equal(found[name], weight) for name, weight in before.items()), "nothing was trained"
    saved, kept, trained = model.state_dict(), first.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    wrong = [name for name in kept.keys() - trained.keys() if not torch.equal(kept[name], saved[name])]
    assert not wrong, f"what is not trained differs, as {wrong[0]}"
    with torch.no_grad():
        difference = torch.cat([*log_probs_of(model.eval(), random_samples(LENGTHS))]) - expected
    assert difference.abs().max() < TOLERANCE, f"log-probabilities differ by {difference.abs().max():.1e}"
    return RIGHT


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def judge(ranks: RankPool, family: str, folder: Path, ways: Sequence[str] = ALL_WAYS) -> dict[str, str]:
    """What becomes of a family, by way."""
    write_family(tiny_config(family, vocab_size=83), folder)
    path, found = str(folder), dict[str, str]()
    for way in ways:
        try:
            if way == "tp" and family in UNDIVIDED:
                found[way] = "not divided, as the planner says"
            elif way in WAYS:
                found[way] = divide(ranks, path, way)
            else:
                found[way] = generate(path) if way == "native engine" else export(ranks, path, {"dp": 2})
        except Exception as error:  # noqa: BLE001 - it is written down, and other ways are tried
            found[way] = f"WRONG: {type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error) else ''}"
    return found


def main() -> None:
    """Judge some families, or all that are right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--ways", default=",".join(ALL_WAYS), help="those to try, with commas between them")
    given = parser.parse_args()
    if strange := {*(ways := given.ways.split(","))} - {*ALL_WAYS}:
        parser.error(f"--ways: {min(strange)} is none of {', '.join(ALL_WAYS)}")
    families = json.loads(FAMILIES.read_text(encoding="utf-8"))["families"]
    table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    ranks = RankPool()
    torch.set_num_threads(1)
    for family in given.families or [name for name, verdict in families.items() if "refused" not in verdict]:
        with TemporaryDirectory() as folder:
            found = judge(ranks, family, Path(folder), ways)
        known = table.get(family, {}) | found
        table[family] = {way: known[way] for way in ALL_WAYS if way in known}
        print(family, {way: one[:100] for way, one in found.items() if one != RIGHT}, flush=True)
        FILE.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n", encoding="utf-8")
    ranks.close()


if __name__ == "__main__":
    from tests import divided_families  # as ranks know it

    divided_families.main()
