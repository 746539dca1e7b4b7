"""Adapters of low rank on the experts of a mixture.

`transformers` keeps the experts of a layer in two weights, [experts, outputs, inputs] each. Every expert has an A and a
B of its own next to each of them: [experts, rank, inputs] and [experts, outputs, rank]. So ranks along `ep` divide them
as they divide the experts, and send none of them.

`peft` (`target_parameters`) has the same matrices as linear layers: A with the ranks of one expert after the other in
its rows, [experts * rank, inputs], and B with an expert in each of `experts` neighboring columns, [outputs, rank *
experts].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_mm

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig
from leaderless.models.parallel.expert import expert_modules
from leaderless.planner.graph.adapters import EXPERT_WEIGHTS, A, B

GROUPED_BYTES = 16
"""Bytes of which the rows of what grouped products multiply must be multiples."""


@dataclass
class ExpertAdapters:
    """Description of the adapters of a module with experts.

    Attributes:
        scale: Factor of their products.
        plain: Class of the module without them.
        is_on: Whether they take part.
    """

    scale: float
    plain: type[nn.Module]
    is_on: bool = True


class LoraExperts(nn.Module):
    """Experts with adapters; it stands before the class of a module, whose weights keep their names.

    The adapters of a weight are called like it, with `_lora_A` and `_lora_B` at the end.
    """

    adapters: ExpertAdapters
    num_experts: int

    @staticmethod
    def make(module: nn.Module, config: LoraConfig, rank: int) -> None:
        """Give experts adapters of a rank, and add nothing to what they compute: A and B are 0."""
        plain = type(module)
        module.__class__ = type(f"Lora{plain.__name__}", (LoraExperts, plain), {})
        assert isinstance(module, LoraExperts)
        module.adapters = ExpertAdapters(config.scale_of(rank), plain)
        for name in EXPERT_WEIGHTS:
            count, outputs, inputs = (weight := module.weight(name)).shape
            for kind, shape in ((A, (count, rank, inputs)), (B, (count, outputs, rank))):
                module.register_parameter(f"{name}_{kind}", nn.Parameter(torch.zeros(shape, device=weight.device)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply experts [T, k] with weights [T, k] to tokens [T, hidden], as `transformers` does with grouped products.

        The adapters are not added to the weights first: what they add is often less than the rounding of weights in
        half precision, and the weights would need a gradient that is as large as they are.
        """
        if not self.adapters.is_on:
            return cast("Tensor", super().forward(hidden_states, top_k_index, top_k_weights))
        num_choices = top_k_index.shape[1]
        experts, order = torch.sort(top_k_index.flatten())
        ends = torch.bincount(experts, minlength=self.num_experts).cumsum(0, dtype=torch.int32)
        gate = self._adapted(hidden_states[order // num_choices], "gate_up_proj", ends)
        inner: Tensor = self._apply_gate(gate)  # type: ignore[operator]
        weighted = self._adapted(inner, "down_proj", ends) * top_k_weights.flatten()[order].unsqueeze(1)
        by_token = weighted[order.argsort()].view(*top_k_index.shape, hidden_states.shape[1])
        return by_token.sum(1).to(hidden_states.dtype)

    def weight(self, name: str) -> nn.Parameter:
        """A weight of all experts, by its name."""
        return cast("nn.Parameter", getattr(self, name))

    def matrices(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """A and B of the adapters of a weight."""
        return self.weight(f"{name}_{A}"), self.weight(f"{name}_{B}")

    def _adapted(self, rows: Tensor, name: str, ends: Tensor) -> Tensor:
        """Rows times a weight with its adapters: expert i has the rows up to `ends[i]`."""
        weight, (a, b) = self.weight(name), self.matrices(name)
        surplus = -a.shape[1] % (GROUPED_BYTES // a.element_size())
        inner = _grouped_mm(rows, pad(a, (0, 0, 0, surplus)).mT, ends)
        added = _grouped_mm(inner, pad(b, (0, surplus)).mT, ends)
        return cast("Tensor", _grouped_mm(rows, weight.mT, ends) + added * self.adapters.scale)

    def merged(self, weight: Tensor, offsets: tuple[int, int], matrices: tuple[Tensor, Tensor]) -> Tensor:
        """A part of a weight with its adapters added.

        Args:
            weight: [n, m, inputs], m rows of n experts.
            offsets: The first of these experts, among the experts of the matrices, and the first of these rows.
            matrices: A and B of some experts.
        """
        (first, begin), (count, rows, _) = offsets, weight.shape
        a, b = (one[first : first + count].to(weight.dtype) for one in matrices)
        return torch.baddbmm(weight, b[:, begin : begin + rows], a, alpha=self.adapters.scale)

    def merge(self) -> None:
        """Become the plain module, whole on this rank, that computes the same."""
        for name in EXPERT_WEIGHTS:
            a, b = (one.detach() for one in self.matrices(name))
            setattr(self, name, nn.Parameter(self.merged(self.weight(name).detach(), (0, 0), (a, b))))
            for kind in (A, B):
                delattr(self, f"{name}_{kind}")
        self.__class__ = self.adapters.plain  # type: ignore[assignment]


def adapted_experts(model: nn.Module) -> Iterator[tuple[str, LoraExperts]]:
    """The modules with experts that have adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraExperts):
            yield name, module


def adapt_experts(model: PreTrainedModel, config: LoraConfig, key: str) -> None:
    """Put adapters on all experts of a model.

    Args:
        model: Model whose modules are changed.
        config: Settings of the adapters; without `expert_rank`, nothing happens.
        key: Key of these settings, for errors.

    Raises:
        RecipeError: There are no experts, or they compute otherwise than the adapters would.
    """
    if config.expert_rank is None:
        return
    kind, modules = model.config.model_type, expert_modules(model)
    num_chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if not modules or not all(map(_has_known_form, modules)):
        form = "a gate and another factor in one weight, without biases"
        raise RecipeError.at(f"{key}.expert_rank", f"models of type {kind} have no experts with {form}: leave it out")
    if config.expert_rank == "auto" and not num_chosen:
        reason = f"it is not known how many experts a token goes through in models of type {kind}"
        raise RecipeError.at(f"{key}.expert_rank", f"{reason}: set a number")
    rank = config.rank_of_expert(num_chosen or 1)
    assert rank is not None
    for module in modules:
        LoraExperts.make(module, config, rank)


def _has_known_form(module: nn.Module) -> bool:
    """Whether experts have a gate above the other factor, in one weight with its inputs last, and nothing else."""
    weights = dict(module.named_parameters())
    if weights.keys() != {*EXPERT_WEIGHTS} or not hasattr(module, "_apply_gate"):
        return False
    if getattr(module, "has_post_expert_norm", False):
        return False
    above, below = (weights[name].shape for name in EXPERT_WEIGHTS)
    return above[1] == 2 * below[2] and above[2] == below[1]


def to_peft(name: str, matrix: Tensor) -> Tensor:
    """A matrix of an adapter as `peft` has it; only experts' matrices differ."""
    if matrix.ndim < 3:
        return matrix
    return matrix.flatten(0, 1) if name.endswith(A) else matrix.permute(1, 2, 0).flatten(1)


def from_peft(name: str, matrix: Tensor, num_experts: int) -> Tensor:
    """A matrix of experts from the matrix of `peft`; the reverse of `to_peft`."""
    if name.endswith(A):
        return matrix.view(num_experts, -1, matrix.shape[1])
    return matrix.view(len(matrix), -1, num_experts).permute(2, 0, 1)
