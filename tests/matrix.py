"""Features next to layouts: how far what several ranks learn is from what one rank does.

    python -m tests.matrix

prints a table for `docs/concepts/training.md`. Each cell trains a tiny model twice, in float32, and names the largest
relative difference of log-probabilities or values, norms of gradients, and updated weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from tests.distributed.ranks import RankError, RankPool
from tests.distributed.test_experts import experts_model
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference
from tests.distributed.test_vision import with_own_head
from tests.pictures import samples_with
from tests.tiny import add_gradients, random_samples, tiny_model, untied_model
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch
from leaderless.data.transport import Transport
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
    "`cp` 2, `ep` 2": {"dp": 1, "cp": 2, "ep": 2},
    "`pp` 2": {"dp": 1, "pp": 2},
    "`dp` 2, `pp` 2": {"dp": 2, "pp": 2},
}


def features(folder: Path) -> dict[str, tuple[str, Mapping[str, object]]]:
    """The model of each feature, and its settings."""
    images = with_own_head(folder, "qwen3_vl")
    text, experts = untied_model(tiny_model("qwen3")), experts_model(folder, "qwen3_moe")
    return {
        "all weights": (text, {}),
        "recomputed activations": (text, {"gradient_checkpointing": True}),
        "critic": (text, {}),
        "LoRA": (text, {"lora": {"rank": 4}}),
        "experts": (experts, {}),
        "images": (images, {}),
        "images, frozen vision": (images, {"freeze_vision": True}),
        "images, experts": (with_own_head(folder, "qwen3_vl_moe"), {}),
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


def cell(ranks: RankPool, model: str, sizes: dict[str, int], changes: dict[str, object], *, is_critic: bool) -> str:
    """The largest difference of a feature on a layout; a dash where it is refused."""
    samples = samples_with() if "_vl" in Path(model).name else random_samples(LENGTHS, siblings=3)
    if "lora" in changes and "pp" in sizes:
        return "–"  # the planner refuses it
    size = prod(count for axis, count in sizes.items() if axis != "ep")
    arguments = (model, samples)
    try:
        (expected,) = ranks.run(1, critic if is_critic else policy, *arguments, {"dp": 1}, changes)
        results = ranks.run(size, critic if is_critic else policy, *arguments, sizes, changes)
    except RankError as error:
        return f"FAILED: {str(error).splitlines()[-1][:80]}"
    if any(isinstance(one, str) for one in results):
        return "–"
    assert not isinstance(expected, str)
    return f"{largest_difference([one for one in results if not isinstance(one, str)], expected):.0e}"


def policy(model: str, samples: Batch, sizes: dict[str, int], changes: dict[str, object]) -> Numbers | str:
    """See `train`."""
    return train(model, samples, sizes, changes, is_critic=False)


def critic(model: str, samples: Batch, sizes: dict[str, int], changes: dict[str, object]) -> Numbers | str:
    """See `train`."""
    return train(model, samples, sizes, changes, is_critic=True)


def main() -> None:
    """Print the table."""
    ranks = RankPool()
    with tempfile.TemporaryDirectory() as folder:
        rows = features(Path(folder))
        print("| |" + " | ".join(LAYOUTS) + " |")
        print("| --- |" + " --- |" * len(LAYOUTS))
        for name, (model, changes) in rows.items():
            cells = [cell(ranks, model, sizes, dict(changes), is_critic=name == "critic") for sizes in LAYOUTS.values()]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    ranks.close()


if __name__ == "__main__":
    import tests.matrix  # ranks look functions up by the name of their module

    tests.matrix.main()
