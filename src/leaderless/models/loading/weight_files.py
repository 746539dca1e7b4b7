"""The files with the weights of a model: where they are, and what their headers say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from leaderless.config.models import ModelConfig
from leaderless.distributed.weights.files import StoredTensor, read_block, read_header


@dataclass
class WeightFiles:
    """The tensors of a model's files, none of which has been read yet.

    Attributes:
        tensors: The tensors by their names in the files.
        num_bytes: Bytes of tensors that have been read.
    """

    tensors: Mapping[str, StoredTensor]
    num_bytes: int = field(default=0, compare=False)

    @classmethod
    def find(cls, config: ModelConfig) -> WeightFiles | None:
        """Find a model's files, download them if need be, and read their headers; None if they are no safetensors.

        Raises:
            OSError: A file cannot be read, or is not there.
            SafetensorError: A file is damaged.
            ValueError: An index does not fit its files.
        """
        if (single := _file(config, SAFE_WEIGHTS_NAME)) is not None:
            return cls(_read(single))
        index = _file(config, SAFE_WEIGHTS_INDEX_NAME)
        return None if index is None else cls(_indexed(config, index))

    def read(self, name: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Read a block of a tensor in place, of which `offsets` is the first element."""
        self.num_bytes += read_block(self.tensors[name], offsets, target)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same values; a few rows are in memory at a time."""
        one, two = self.tensors[name], self.tensors[other]
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        num_rows = max(1, (1 << 22) // max(1, one.shape[-1]))
        for first in range(0, one.shape[0], num_rows):
            blocks = [torch.empty(min(num_rows, one.shape[0] - first), *one.shape[1:], dtype=one.dtype) for _ in "12"]
            for block, own in zip(blocks, (name, other), strict=True):
                self.read(own, (first,) + (0,) * (len(one.shape) - 1), block)
            if not torch.equal(*blocks):
                return False
        return True


def _file(config: ModelConfig, name: str) -> Path | None:
    """A file of a model's folder, on this machine or on the hub."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    found = cached_file(config.path, name, revision=config.revision, **options)
    return None if found is None else Path(found)


def _read(file: Path) -> Mapping[str, StoredTensor]:
    try:
        return read_header(file).tensors
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise OSError(f"{file.name} is damaged, or not there: {error}") from error
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def _indexed(config: ModelConfig, index: Path) -> Mapping[str, StoredTensor]:
    """The tensors of all files that an index names."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index.name} is no index of files: {type(error).__name__}: {error}") from error
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        if (file := _file(config, name)) is None:
            raise OSError(f"{index.name} names {name}, which is not there")
        tensors |= _read(file)
    for name, place in places.items():
        if name not in tensors or tensors[name].file.name != place:
            raise ValueError(f"{index.name} says that {name} is in {place}, which lacks it")
    return tensors
