"""Requirements of a model that is sharded and trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import nn

from leaderless.models.decoder import Completion

if TYPE_CHECKING:
    from leaderless.models.parallel.expert import ExpertParallel
    from leaderless.models.parallel.pipeline import PipelineParallel
    from leaderless.models.parallel.tensor import TensorParallel
    from leaderless.models.routers import Routers


class Shardable(Protocol):
    """Model that `ShardedModel` can train, which is also a module of torch; see `Decoder`."""

    @property
    def model(self) -> nn.Module:
        """The module around which it is wrapped, whose weights it names."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens that it knows."""

    @property
    def tensor_parallel(self) -> TensorParallel | None:
        """How ranks divide the layers, if they do."""

    @property
    def pipeline(self) -> PipelineParallel | None:
        """Stages into which ranks divide the layers, if they do."""

    @property
    def expert_parallel(self) -> ExpertParallel | None:
        """How ranks divide the experts of each layer, if they do."""

    @property
    def routers(self) -> Routers | None:
        """Routers of all layers, if they were looked for before ranks divided these."""

    @property
    def shared_words(self) -> nn.Parameter | None:
        """The embeddings that both this stage of a pipeline and another one train."""

    @property
    def complete(self) -> Completion:
        """Function that gives weights their values once ranks have divided them."""

    def float32_modules(self) -> list[nn.Module]:
        """List modules that always compute in float32."""

    def is_frozen(self, name: str) -> bool:
        """Whether training leaves one of `trained_weights` as it is."""

    def trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that training changes, by name."""

    def write_description(self, folder: Path) -> None:
        """Write the files that describe the model next to its weights."""
