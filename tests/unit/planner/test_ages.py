"""What an update reports of the ages of its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from leaderless.observability.metrics import Metrics
from leaderless.stages.context import StageContext
from leaderless.stages.update import _report_ages


class Alone:
    """A process group of one rank."""

    def sum(self, values: Tensor, what: str) -> Tensor:  # noqa: ARG002
        return values

    def max(self, values: Tensor, what: str) -> Tensor:  # noqa: ARG002
        return values


def test_a_rank_without_tokens_reports_no_ages() -> None:
    metrics = Metrics()
    context = cast("StageContext", SimpleNamespace(metrics=metrics))
    _report_ages(torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), context)
    _report_ages(torch.tensor([1, 3, 2]), torch.tensor([2, 0, 1]), context)
    assert metrics.reduce(Alone())["staleness/oldest"] == 2.5
