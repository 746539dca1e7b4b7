"""Adapters of low rank on their way to an engine, which reads them from a folder in the format of `peft`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


class AdapterFolder:
    """Collects the matrices of one policy version, and shows them to an engine as a folder."""

    def __init__(self, description: Mapping[str, object], names: Sequence[str]) -> None:
        """Have nothing yet.

        Args:
            description: What `peft` has to know of the adapters.
            names: Names of all of their matrices.
        """
        self._description, self._names = description, frozenset(names)
        self._matrices: dict[str, Tensor] = {}

    def add(self, name: str, matrix: Tensor) -> None:
        """Copy a matrix to host memory."""
        self._matrices[name] = matrix.to("cpu", copy=True)

    @contextmanager
    def written(self) -> Iterator[str]:
        """Write what has come to a folder, which is there as long as this context.

        Raises:
            RuntimeError: Some matrix has not come, or is not one of the model's.
        """
        matrices, self._matrices = self._matrices, {}
        for problem, names in (
            ("have not been sent", self._names - matrices.keys()),
            ("were sent, which the model does not have", matrices.keys() - self._names),
        ):
            if names:
                raise RuntimeError(f"{len(names)} matrices of adapters {problem}, such as {min(names)}")
        with tempfile.TemporaryDirectory(prefix="leaderless-adapters-") as folder:
            saved = {f"base_model.model.{name}.weight": matrix for name, matrix in matrices.items()}
            save_file(saved, Path(folder, "adapter_model.safetensors"), {"format": "pt"})
            Path(folder, "adapter_config.json").write_text(json.dumps(self._description), encoding="utf-8")
            yield folder
