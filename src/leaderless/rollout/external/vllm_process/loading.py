"""How a model of vLLM gets its weights: layer by layer, packed and transposed as at the start.

These functions run with vLLM's worker, which owns the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


class _Copy(NamedTuple):
    """Values for a part of a weight: its size, its strides and its first element in the weight's memory."""

    values: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class UnseenCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what a model writes into its weights itself, as GPT-OSS does with experts and sinks.

    While vLLM loads by layers, weights have no values: it notes what comes by their loaders and writes it as soon as a
    layer is complete. What a model writes without a loader would be lost.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written: list[tuple[Tensor, Tensor]] = []
        self._kept: dict[torch.nn.Module, dict[str, list[_Copy]]] = defaultdict(lambda: defaultdict(list))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if function is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta:
            self._written.append((args[0], args[1]))
        return function(*args, **(kwargs or {}))

    def keep(self, model: torch.nn.Module) -> None:
        """Keep what was written into weights of layers that still wait, unless a loader wrote it."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        places = {
            weight.untyped_storage()._cdata: (layer, name)  # noqa: SLF001
            for layer in model.modules()
            for name, weight in layer.named_parameters(recurse=False)
            if weight.is_meta
        }
        for target, values in self._written:
            layer, name = places.get(target.untyped_storage()._cdata, (None, ""))  # noqa: SLF001
            if layer is not None and name not in {name for name, _ in get_layerwise_info(layer).loaded_weights}:
                part = _Copy(values, target.shape, target.stride(), int(target.storage_offset()))
                self._kept[layer][name].append(part)
        self._written.clear()

    def write(self) -> None:
        """Complete the layers that wait for what was kept."""
        from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        for layer, weights in self._kept.items():
            info = get_layerwise_info(layer)
            materialize_layer(layer, info)
            for name, copies in weights.items():
                for one in copies:
                    getattr(layer, name).data.as_strided(one.size, one.stride, one.offset).copy_(one.values)
            _layerwise_process(layer, info)
        self._kept.clear()


@dataclass
class Loading:
    """A set of weights on its way into a model.

    Attributes:
        wanted: Names of the model's weights that have to be loaded: not of those that vLLM makes of others.
        arrived: Names of those that have been.
        copies: Values that the model has written itself.
    """

    wanted: frozenset[str] = frozenset()
    arrived: set[str] = field(default_factory=set)
    copies: UnseenCopies = field(default_factory=UnseenCopies)


def load(worker: Worker, weights: Sequence[tuple[str, Tensor]], loading: Loading) -> None:
    """Load some weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    model = worker.get_model()
    with set_current_vllm_config(worker.vllm_config):
        if not loading.wanted:
            _forget_packed_experts(worker)
            initialize_layerwise_reload(model)
            loading.wanted = frozenset(name for name, _ in model.named_parameters())
        with torch.device(worker.device), loading.copies:
            loading.arrived |= set(model.load_weights(iter(weights)))
    loading.copies.keep(model)


def _forget_packed_experts(worker: Worker) -> None:
    """Let vLLM pack experts anew on the CPU, where it computes with packed ones.

    It packs them when it makes the kernel of a layer, and when it has one it takes weights for packed that are not.
    """
    if worker.device.type == "cpu":
        for module in worker.get_model().modules():
            method = getattr(module, "quant_method", None)
            if method is not None and hasattr(method, "moe_kernel"):
                method.moe_kernel = None


def finish(worker: Worker, loading: Loading) -> list[str]:
    """Finish loading, and name the weights that have not been loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    model = worker.get_model()
    with set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        loading.copies.write()
        finalize_layerwise_reload(model, worker.model_config)
        for module in model.modules():
            # On the CPU vLLM multiplies with packed copies. The copy of an output head that shares its weight with the
            # embedding is still the old one: nothing is loaded under the head's own name.
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
    # While a model is loaded, a weight that two layers share is two, of which one is never sent.
    own = {name for name, _ in model.named_parameters()}
    return sorted((loading.wanted & own) - loading.arrived)
