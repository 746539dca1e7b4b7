"""AdamW whose moments have 8 bits, by torchao."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from leaderless.config import RecipeError
from leaderless.config.models import OptimizerConfig
from leaderless.config.packaged_files import how_to_install
from leaderless.distributed.weights.blocks import Shape
from leaderless.planner.memory.optimizer_states import BLOCK, is_in_blocks
from leaderless.training.optimizers.adamw import MOMENTS, AdamW
from leaderless.training.optimizers.optimizer import Optimizer, TrainedWeight
from leaderless.training.optimizers.state_memory import Kept, StateMemory, StateSpec

if TYPE_CHECKING:
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit


class QuantizedAdamW(Optimizer):
    """AdamW that keeps moments of matrices with 8 bits each, and moments of other weights in float32.

    Source: Dettmers et al., "8-bit optimizers via block-wise quantization", arXiv 2110.02861, with blocks of 256
    numbers, as in torchao, which computes the steps. Each number is one of 256 values times the largest of its block;
    the values are closer to each other near 0. A step computes in float32, and changes the weights by the moments
    before they are quantized. Embeddings have 8 bits like all matrices, and no norm of their own, which the paper adds.

    A block is part of a row of the whole weight, on any number of ranks: weights whose rows are no multiple of 256
    numbers, as a rank holds them, keep float32. So ranks along `dp` quantize as one does. Where `tp` divides rows into
    parts that are no multiple, these weights keep float32, unlike on one rank.
    """

    def __init__(
        self,
        weights: Iterable[TrainedWeight],
        config: OptimizerConfig,
        *,
        is_fused: bool,
        memory: StateMemory | None = None,
    ) -> None:
        """Take weights, and memory for moments.

        Raises:
            RecipeError: torchao is not installed.
        """
        super().__init__(weights, config, memory)
        if find_spec("torchao") is None:
            raise RecipeError.at("optimizer.type", f"'adamw_8bit' needs torchao: {how_to_install('adamw-8bit')}")
        self._own = [one for one in self.weights if is_in_blocks(one.shape, one.block.sizes)]
        self._keep(self._own, lambda one: _kinds(one.block.sizes))
        others = [one for one in self.weights if one.parameter not in self._keeps]
        self._others = AdamW(others, config, is_fused=is_fused, memory=self._memory)
        # Steps take memory alone, however ranks divide weights; some may have no part of a weight.
        self._aliases = {one: nn.Parameter(one.local) for one in self._own if one.local.numel()}
        self._torchao = self._make() if self._aliases else None

    def _make(self) -> AdamW8bit:
        from torchao.optim import AdamW8bit

        config = self.config
        made = AdamW8bit(
            [{"params": [*self._aliases.values()], "weight_decay": config.weight_decay}],  # all are matrices
            lr=config.peak,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            block_size=BLOCK,
        )
        for alias in self._aliases.values():
            made.state[alias] = {"step": torch.tensor(0.0)}
        return made

    def _step(self, learning_rate: float) -> None:
        self._others.step(learning_rate)
        if self._torchao is None:
            return
        for group in self._torchao.param_groups:
            group["lr"].fill_(learning_rate)
        for some in self._groups([*self._aliases]):
            for weight, kept in some:
                alias = self._aliases[weight]
                alias.data, alias.grad = weight.local, weight.gradient
                # Made here: torchao would decide by the size of a rank's part whether to quantize.
                self._torchao.state[alias].update(_for_steps(kept))
            self._torchao.step()  # of those with a gradient
            for weight, _ in some:
                self._aliases[weight].grad = None

    def states(self, parameter: nn.Parameter) -> Mapping[str, Tensor]:
        """Codes, uint8, and scales of blocks, float32, of both moments; or both moments in float32."""
        return super().states(parameter) if parameter in self._keeps else self._others.states(parameter)

    def resume(self, num_updates: int) -> None:
        """Continue behind some steps."""
        super().resume(num_updates)
        self._others.resume(num_updates)
        for kept in [] if self._torchao is None else self._torchao.state.values():
            kept["step"].fill_(float(num_updates))


def _kinds(sizes: Shape) -> dict[str, StateSpec]:
    """Codes of both moments, as the weight, and scales of blocks, [..., row / 256].

    Zeros are moments of 0, which the scales say, whatever the codes are.
    """
    codes = {f"{kind}_codes": StateSpec(sizes, torch.uint8) for kind in MOMENTS}
    return codes | {f"{kind}_scales": StateSpec((*sizes[:-1], sizes[-1] // BLOCK), torch.float32) for kind in MOMENTS}


def _for_steps(kept: Kept) -> dict[str, OptimState8bit]:
    """Both moments as torchao has them, in the same memory; the first has a sign."""
    from torchao.optim.subclass_8bit import OptimState8bit

    found = {}
    for kind in MOMENTS:
        codes, scales, has_sign = kept[f"{kind}_codes"], kept[f"{kind}_scales"], kind == MOMENTS[0]
        values = _values(codes.device, has_sign=has_sign)
        found[kind] = OptimState8bit(codes, scales.view(-1), values, has_sign, dtype=torch.float32)
    return found


@cache
def _values(device: torch.device, *, has_sign: bool) -> Tensor:
    """The value of each code."""
    from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

    return torch.tensor(get_qmap_signed() if has_sign else get_qmap_unsigned(), device=device)
