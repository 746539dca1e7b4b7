"""What a model has besides its weights, and training never changes, such as the biases of routers.

`transformers` saves these buffers with the weights. They go with a model from its files into its checkpoints and into
what is exported. Between ranks only weights are sent: a rank that gets these reads the buffers from the model's files,
and gives them to an engine in another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

FILE, KEY = "buffers.safetensors", "buffers.{}"
"""File of a checkpoint with buffers, and their names there."""


def saved_buffers(model: nn.Module) -> Mapping[str, Tensor]:
    """The buffers that are saved with the weights of a model, by name."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def write_buffers(folder: Path, buffers: Mapping[str, Tensor]) -> None:
    """Write buffers into a folder, if there are any."""
    if buffers:
        save_file({KEY.format(name): one.detach().cpu().contiguous() for name, one in buffers.items()}, folder / FILE)
