"""Adapters of low rank on their way to an engine, which reads them from a folder in the format of `peft`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine


class AdapterFolder:
    """Collects the matrices of one policy version, and shows them to an engine as a folder."""

    def __init__(self, description: Mapping[str, object], names: Sequence[str]) -> None:
        """Start empty.

        Args:
            description: Configuration of the adapters in the format of `peft`.
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


class VllmAdapters:
    """The adapters in one vLLM, by names: one set for each model that is trained on the same base."""

    def __init__(self, descriptions: Mapping[str, Mapping[str, object]], matrices: Mapping[str, Sequence[str]]) -> None:
        """Start empty.

        Args:
            descriptions: Configuration of each set in the format of `peft`.
            matrices: Names of all matrices of each set.
        """
        self._folders = {name: AdapterFolder(said, matrices[name]) for name, said in descriptions.items()}
        self._requests: dict[str, LoRARequest] = {}
        self._num_loaded = 0

    def add(self, adapter: str, name: str, matrix: Tensor) -> None:
        """Copy a matrix of a set to host memory."""
        self._folders[adapter].add(name, matrix)

    def request(self, adapter: str) -> LoRARequest | None:
        """Name of a set in a request; the set must have come. None for the base, which has no name."""
        return self._requests[adapter] if adapter else None

    def use(self, adapter: str, policy_version: int, engine: LLMEngine) -> None:
        """Load what has come of a set in place of what was there before.

        Its number is new and its folder is soon gone, so that a request cannot get any other.

        Raises:
            RuntimeError: Some matrix has not come or is unknown, or vLLM has not loaded them, or has lost other sets.
        """
        from vllm.lora.request import LoRARequest

        with self._folders[adapter].written() as folder:
            if (before := self._requests.pop(adapter, None)) is not None:
                engine.remove_lora(before.lora_int_id)
            self._num_loaded += 1
            request = LoRARequest(f"{adapter}-{policy_version}", self._num_loaded, folder)
            wanted = {request.lora_int_id, *(one.lora_int_id for one in self._requests.values())}
            if not engine.add_lora(request) or set(engine.list_loras()) != wanted:
                raise RuntimeError(
                    f"vLLM has not loaded the adapters of '{adapter}' of policy version {policy_version}"
                )
            self._requests[adapter] = request
