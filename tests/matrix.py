"""Features next to layouts: how far what several ranks learn is from what one rank does.

    python -m tests.matrix

prints a table for `docs/reference/combinations.md`. Each cell trains a tiny model twice, in float32, and names the
largest relative difference of log-probabilities or values, norms of gradients, and updated weights. Names of rows may
be given.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from tests.distributed.ranks import RankError, RankPool
from tests.distributed.test_experts import experts_model, with_experts
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference
from tests.distributed.test_vision import with_own_head
from tests.pictures import samples_with
from tests.tiny import add_gradients, random_samples, tiny_model, untied_model, with_support
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch
from leaderless.distributed.transport import Transport
from leaderless.models.causal_lm import TokenOutputs
from leaderless.planner import Layout
from leaderless.training.fsdp import FsdpValueEngine, make_engine
from leaderless.training.micro_batches import MicroBatch

LAYOUTS: dict[str, dict[str, int]] = {
    "`dp` 2": {"dp": 2},
    "`dp` 4": {"dp": 4},
    "`cp` 2": {"dp": 1, "cp": 2},
    "`cp` 3 (ring)": {"dp": 1, "cp": 3},
    "`tp` 2": {"dp": 1, "tp": 2},
    "`dp` 2, `tp` 2": {"dp": 2, "tp": 2},
    "`cp` 2, `tp` 2": {"dp": 1, "cp": 2, "tp": 2},
    "`ep` 2": {"dp": 2, "ep": 2},
    "`dp` 4, `ep` 2": {"dp": 4, "ep": 2},
    "`cp` 2, `ep` 2": {"dp": 1, "cp": 2, "ep": 2},
    "`tp` 2, `ep` 2": {"dp": 1, "tp": 2, "ep": 2},
    "`pp` 2": {"dp": 1, "pp": 2},
    "`dp` 2, `pp` 2": {"dp": 2, "pp": 2},
    "`dp` 2, `pp` 2, `ep` 2": {"dp": 2, "pp": 2, "ep": 2},
    "`cp` 2, `pp` 2": {"dp": 1, "cp": 2, "pp": 2},
    "`tp` 2, `pp` 2": {"dp": 1, "tp": 2, "pp": 2},
    "`tp` 2, `pp` 2, `ep` 2": {"dp": 1, "tp": 2, "pp": 2, "ep": 2},
}


@dataclass(frozen=True)
class Feature:
    """A model, its settings, and how it is trained.

    Attributes:
        model: Its folder.
        changes: Its settings.
        is_critic: Whether it is a value model.
        num_replayed: Experts of which those that were chosen are replayed, if any.
        is_truncated: Whether tokens are scored over those alone that could be drawn.
    """

    model: str
    changes: Mapping[str, object] = field(default_factory=dict)
    is_critic: bool = False
    num_replayed: int = 0
    is_truncated: bool = False


def features(folder: Path) -> dict[str, Feature]:
    """The features by name."""
    images = with_own_head(folder, "qwen3_vl")
    text, experts = untied_model(tiny_model("qwen3")), experts_model(folder, "qwen3_moe")
    image_experts = with_own_head(folder, "qwen3_vl_moe")
    return {
        "all weights": Feature(text),
        "recomputed activations": Feature(text, {"gradient_checkpointing": True}),
        "critic": Feature(text, is_critic=True),
        "critic of experts": Feature(experts, is_critic=True),
        "truncated sampling": Feature(text, is_truncated=True),
        "head is the embedding": Feature(tiny_model("qwen3")),
        "LoRA": Feature(text, {"lora": {"rank": 4}}),
        "LoRA, dropout": Feature(text, {"lora": {"rank": 4, "dropout": 0.1}}),
        "LoRA, experts": Feature(experts, {"lora": {"rank": 4}}),
        "LoRA, adapters of experts": Feature(experts, {"lora": {"rank": 4, "expert_rank": "auto"}}),
        "LoRA, images": Feature(images, {"lora": {"rank": 4}}),
        "experts": Feature(experts),
        "experts, replayed choices": Feature(experts, num_replayed=6),
        "images": Feature(images),
        "images, critic": Feature(images, is_critic=True),
        "images, frozen vision": Feature(images, {"freeze_vision": True}),
        "images, experts": Feature(image_experts),
        "images, critic of experts": Feature(image_experts, is_critic=True),
    }


def train(
    model: str, samples: Batch, sizes: dict[str, int], changes: dict[str, object], *, is_critic: bool
) -> Numbers | str:
    """Numbers of two updates; or why the layout is refused."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    try:
        setup = replace(setup_of(transport, layout, model), model=ModelConfig(path=model, **changes))  # type: ignore[arg-type]
        engine = make_engine(replace(setup, micro_batch_tokens=80, is_critic=is_critic))
    except (RecipeError, ValueError) as error:
        return str(error)
    shard, numbers = layout.shard_of(transport.rank), Numbers()
    mine = [place for place in range(len(samples)) if place * layout.dp // len(samples) == shard]
    batch = samples.select(torch.tensor(mine))
    for update in range(2):
        scores = engine.values(batch) if isinstance(engine, FsdpValueEngine) else engine.log_probs(batch)
        for row, values in zip(batch.ids.tolist(), scores.rows(), strict=True):
            numbers[f"scores.{update}.{row}"] = values
        add_gradients(engine, batch, value_loss if is_critic else policy_loss)
        numbers[f"norm.{update}"] = torch.tensor(engine.optimizer_step().grad_norm)
    return numbers | {f"weights.{name}": value.clone() for name, value in engine.full_weights()}


def policy_loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
    gain = (micro_batch.targets % 7 - 3) * 0.1
    return (gain[: len(outputs.log_probs)] * (outputs.log_probs + 0.3 * outputs.entropies)[: len(gain)]).sum()


def value_loss(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    return ((values[: len(micro_batch.targets)] - micro_batch.targets % 7) ** 2).sum()


def rows(ranks: RankPool, folder: Path, named: Sequence[str] = ()) -> Iterator[tuple[str, list[float | str | None]]]:
    """The cells of each feature, or of those that are named; models are written into a folder.

    A cell is the largest difference from what one rank does; None where the layout is refused, a text where it fails.
    """
    for name, feature in features(folder).items():
        if not named or name in named:
            (expected,) = learned(ranks, feature, 1, {"dp": 1})
            assert not isinstance(expected, str), expected
            yield name, [cell(ranks, feature, sizes, expected) for sizes in LAYOUTS.values()]


def cell(ranks: RankPool, feature: Feature, sizes: dict[str, int], expected: Numbers) -> float | str | None:
    """See `rows`."""
    size = prod(count for axis, count in sizes.items() if axis != "ep")
    try:
        results = learned(ranks, feature, size, sizes)
    except RankError as error:
        return f"FAILED: {str(error).splitlines()[-1][:80]}"
    found = [one for one in results if not isinstance(one, str)]
    return largest_difference(found, expected) if len(found) == size else None


def shown(value: float | str | None) -> str:
    """A cell as the page has it."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:.0e}" if value else "0"


def learned(ranks: RankPool, feature: Feature, size: int, sizes: dict[str, int]) -> list[Numbers | str]:
    """What each rank has learned."""
    samples = samples_with() if "_vl" in Path(feature.model).name else random_samples(LENGTHS, siblings=3)
    if feature.num_replayed:
        samples = with_experts(samples, feature.num_replayed)
    if feature.is_truncated:
        samples = with_support(samples)
    return ranks.run(
        size, critic if feature.is_critic else policy, feature.model, samples, sizes, dict(feature.changes)
    )


def policy(model: str, samples: Batch, sizes: dict[str, int], changes: dict[str, object]) -> Numbers | str:
    """See `train`."""
    return train(model, samples, sizes, changes, is_critic=False)


def critic(model: str, samples: Batch, sizes: dict[str, int], changes: dict[str, object]) -> Numbers | str:
    """See `train`."""
    return train(model, samples, sizes, changes, is_critic=True)


def main() -> None:
    """Print the table, or the rows that are named."""
    ranks = RankPool()
    print("| | " + " | ".join(LAYOUTS) + " |")
    print("| --- |" + " --- |" * len(LAYOUTS))
    with tempfile.TemporaryDirectory() as folder:
        for name, cells in rows(ranks, Path(folder), sys.argv[1:]):
            print(f"| {name} | {' | '.join(map(shown, cells))} |", flush=True)
    ranks.close()


if __name__ == "__main__":
    import tests.matrix  # ranks look functions up by the name of their module

    tests.matrix.main()
