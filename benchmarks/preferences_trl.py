"""Compares losses of preferences, and their gradients, with those of TRL on the same model and rows.

Run it in an environment that has `trl` next to this package's dependencies:

    PYTHONPATH=src:. python benchmarks/preferences_trl.py

It writes `docs/performance/preferences_trl.json`. A test computes this package's numbers again, and compares them with
what is stored there.
"""

# ruff: noqa: ANN401 - where types are checked, TRL is not installed
from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

STORED = Path(__file__).parents[1] / "docs/performance/preferences_trl.json"
Computed = tuple[float, Mapping[str, Tensor]]
"""A loss, and the gradient of each weight."""
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "sigmoid": {"type": "sigmoid", "beta": 0.2},
    "sigmoid, length_normalized": {"type": "sigmoid", "beta": 2.0, "length_normalized": True},
    "sigmoid, sft_coefficient": {"type": "sigmoid", "beta": 0.2, "sft_coefficient": 0.5},
    "ipo": {"type": "ipo", "beta": 0.3},
    "hinge": {"type": "hinge", "beta": 0.2},
    "robust": {"type": "robust", "beta": 0.2, "label_smoothing": 0.2},
    "apo_zero": {"type": "apo_zero", "beta": 0.2},
    "simpo": {"type": "simpo", "beta": 2.0, "gamma": 1.0, "label_smoothing": 0.1},
    "orpo, without imitation": {"type": "orpo", "beta": 0.3, "sft_coefficient": 0.0},
    "kto": {"type": "kto", "beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.5},
}
"""What is compared, by name. TRL's label smoothing of `sigmoid` is gone, and its ORPO imitates prompts, too."""
REWARD_MODELS: Mapping[str, tuple[float, bool]] = {
    "reward model": (0.0, False),
    "reward model, margins": (0.0, True),
    "reward model, centering": (0.1, True),
}
"""Losses of reward models by name: the coefficient of centering, and whether pairs have margins."""


def probe(gradients: Mapping[str, Tensor]) -> list[float]:
    """A few numbers that depend on every gradient: the norm, and products with fixed random directions."""
    generator = torch.Generator().manual_seed(3)
    flat = torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])
    directions = torch.randn(3, len(flat), generator=generator, dtype=torch.float64) / len(flat) ** 0.5
    return [float(flat.norm()), *(directions @ flat).tolist()]


def difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """L2 distance of two gradients, relative to the second."""
    first, second = (torch.cat([one[name].double().flatten() for name in sorted(theirs)]) for one in (ours, theirs))
    return float((first - second).norm() / second.norm())


def main() -> None:
    """Compare all losses, and store the result."""
    from tests.preferences import loss_and_gradient, reward_loss_and_gradient
    from tests.tiny import tiny_model

    from leaderless.algorithms.settings import AlgorithmConfig

    rows = {}

    def compare(name: str, mine: Computed, others: Computed) -> None:
        rows[name] = {
            "trl_loss": others[0],
            "trl_gradient": probe(others[1]),
            "loss_difference": abs(mine[0] - others[0]),
            "gradient_difference": difference(mine[1], others[1]),
        }
        print(f"{name}: {mine[0]:.6f} {rows[name]}")

    for name, settings in SETTINGS.items():
        loss = AlgorithmConfig.model_validate({"preference_loss": settings}).preference_loss
        compare(name, loss_and_gradient(loss), _trl(dict(settings), tiny_model()))
    for name, (centering, has_margins) in REWARD_MODELS.items():
        mine = reward_loss_and_gradient(centering, has_margins=has_margins)
        compare(name, mine, _trl({"type": "reward", "centering": centering, "has_margins": has_margins}, ""))
    versions = {package: version(package) for package in ("trl", "torch", "transformers")}
    STORED.write_text(json.dumps({"versions": versions, "losses": rows}, indent=2) + "\n", encoding="utf-8")


def _trl(settings: dict[str, Any], reference: str) -> tuple[float, Mapping[str, Tensor]]:
    """TRL's loss and gradient."""
    kind = settings.pop("type")
    make: Callable[..., Any] = {"simpo": _cpo, "orpo": _orpo, "kto": _kto, "reward": _reward}.get(kind, _dpo)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(kind, settings, reference, _arguments(folder))
        inputs = next(iter(trainer.get_train_dataloader()))
        trainer.model.zero_grad()
        value = trainer.compute_loss(trainer.model, inputs)
        value.backward()
        return float(value), {name: one.grad for name, one in trainer.model.named_parameters() if one.grad is not None}


def _arguments(folder: str) -> dict[str, object]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 100,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }


def _models(reference: str) -> tuple[Any, Any, Any]:
    from tests.preferences import moved_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load = AutoModelForCausalLM.from_pretrained
    tokenizer = AutoTokenizer.from_pretrained(reference)
    return load(moved_model(), dtype=torch.float32), load(reference, dtype=torch.float32), tokenizer


def _rows(rows: object) -> Any:
    from datasets import Dataset

    return Dataset.from_list(list(rows))  # type: ignore[call-overload]


def _dpo(kind: str, settings: dict[str, Any], reference: str, arguments: dict[str, object]) -> Any:
    from tests.preferences import PAIRS
    from trl import DPOConfig, DPOTrainer

    kinds, weights = ["sigmoid_norm" if settings.pop("length_normalized", False) else kind], [1.0]
    if share := settings.pop("sft_coefficient", 0.0):
        kinds, weights = [*kinds, "sft"], [*weights, share]
    config = DPOConfig(loss_type=kinds, loss_weights=weights, **settings, **arguments)
    model, ref_model, tokenizer = _models(reference)
    return DPOTrainer(model, ref_model=ref_model, args=config, train_dataset=_rows(PAIRS), processing_class=tokenizer)


def _kto(kind: str, settings: dict[str, Any], reference: str, arguments: dict[str, object]) -> Any:
    from tests.preferences import SINGLES
    from trl import KTOConfig, KTOTrainer

    config = KTOConfig(loss_type=kind, **settings, **arguments)
    model, ref_model, tokenizer = _models(reference)
    return KTOTrainer(model, ref_model=ref_model, args=config, train_dataset=_rows(SINGLES), processing_class=tokenizer)


def _cpo(kind: str, settings: dict[str, Any], reference: str, arguments: dict[str, object]) -> Any:
    from tests.preferences import PAIRS
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    config = CPOConfig(loss_type=kind, cpo_alpha=0.0, simpo_gamma=settings.pop("gamma"), **settings, **arguments)
    model, _, tokenizer = _models(reference)
    return CPOTrainer(model, args=config, train_dataset=_rows(PAIRS), processing_class=tokenizer)


def _orpo(kind: str, settings: dict[str, Any], reference: str, arguments: dict[str, object]) -> Any:
    from tests.preferences import PAIRS
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    del kind, settings["sft_coefficient"]
    model, _, tokenizer = _models(reference)
    trainer = ORPOTrainer(
        model, args=ORPOConfig(**settings, **arguments), train_dataset=_rows(PAIRS), processing_class=tokenizer
    )

    def without_imitation(model: Any, inputs: Any) -> Tensor:
        chosen, rejected, *_ = trainer.concatenated_forward(model, inputs)
        return -trainer.odds_ratio_loss(chosen, rejected)[0].mean()

    trainer.compute_loss = without_imitation
    return trainer


def _reward(kind: str, settings: dict[str, Any], reference: str, arguments: dict[str, object]) -> Any:
    from tests.preferences import MARGINS, PAIRS, scoring_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    del kind, reference
    config = RewardConfig(center_rewards_coefficient=settings["centering"] or None, **arguments)
    model = AutoModelForSequenceClassification.from_pretrained(scoring_model(), num_labels=1, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(scoring_model())
    rows = _rows(MARGINS if settings["has_margins"] else PAIRS)
    return RewardTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    main()
