"""Tensor parallelism: ranks divide the heads of attention, the inner features of a layer, and the words.

What enters attention or a feed-forward part is the same on all ranks. Each rank computes some heads or features of it,
and of what leaves the part, the ranks compute addends that they sum (Megatron-LM, arXiv 1909.08053). Norms and what
enters the next part are again the same on all ranks, to the last bit; so is what a model sees, and its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import AutoConfig

from leaderless.config import RecipeError
from leaderless.distributed.in_flight import MESSAGES_AHEAD
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.tensor_parallel import NARROWING, WIDENING, WORDS, divided_dim
from leaderless.models.decoder import Decoder
from leaderless.models.lora.linear import LoraLinear, is_adapter
from leaderless.models.lora.nf4 import FrozenLinear
from leaderless.models.parallel.expert import expert_modules
from leaderless.models.parallel.reductions import ADDENDS, VocabularyPart, copied, summed
from leaderless.planner.checks.capabilities import whole_experts
from leaderless.planner.memory.layers import check_block, sees

SAME_LAYERS = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
"""Families with the layers of another one, which says how they can be divided while they do not."""
HEAD_NORMS = {"q_norm", "k_norm"}
"""Norms of single heads: all ranks have their weights, but each computes the gradient of its own heads."""

SCALED_WORDS = {"GemmaTextScaledWordEmbedding"}
"""Embeddings that multiply what `nn.Embedding` gives by a number."""


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that divide the layers of a model.

    Attributes:
        peers: These ranks.
        shapes: Shapes of the whole weights, by name.
    """

    peers: ProcessGroup
    shapes: Mapping[str, torch.Size]

    @classmethod
    def divide(cls, decoder: Decoder, peers: ProcessGroup, key: str) -> None:
        """Leave a rank only its part of a model that is whole, and have the ranks exchange what they compute.

        Raises:
            RecipeError: The model cannot be divided; the error is at its setting `key`.
        """
        model = decoder.model
        _check_family(decoder, key, peers.size)
        parallel = cls(peers, {name: weight.shape for name, weight in model.named_parameters(remove_duplicate=False)})
        for path, module in [*model.named_modules()]:
            if any(name in WIDENING for name, _ in module.named_children()) and not sees(path):
                module.register_forward_pre_hook(parallel._copy_input, with_kwargs=True)
        for name, module in [one for one in model.named_modules() if not sees(one[0])]:
            kind = name.rpartition(".")[2]
            if kind in NARROWING:
                (_SummedLora if isinstance(module, LoraLinear) else _SummedLinear).make(module, peers)
            elif kind in WORDS and parallel.dim_of(f"{name}.weight") is not None:
                part = VocabularyPart(peers, parallel.shapes[f"{name}.weight"][0] // peers.size)
                if isinstance(module, nn.Embedding):
                    _WordsPart.make(module, part)
                else:
                    decoder.vocabulary_part = part
        for name, weight in model.named_parameters():  # tied weights come once
            if (dim := parallel.dim_of(name)) is not None:
                weight.data = weight.chunk(peers.size, dim)[parallel.place].clone()
        for name, one in model.named_modules():
            if isinstance(one, FrozenLinear) and one.block:
                check_block(key, name, one.in_features, one.block, one.in_features // one.weight.shape[1])
        decoder.tensor_parallel = parallel

    @property
    def place(self) -> int:
        """The place of this rank's part."""
        return self.peers.ranks.index(self.peers.rank)

    def dim_of(self, name: str) -> int | None:
        """The dimension along which the ranks divide a weight; None if all have the whole."""
        return divided_dim(name, self.shapes[name], self.peers.size)

    def sum_gradients(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Sum the gradients of weights of which each rank has computed an addend; others stay as they are."""
        addends = [gradient for name, gradient in gradients if self._is_addend(name)]
        if addends:
            together = torch.cat([gradient.flatten() for gradient in addends])
            total = self.peers.sum(together, ADDENDS, most_ahead=MESSAGES_AHEAD)
            for gradient, values in zip(addends, torch.split(total, [one.numel() for one in addends]), strict=True):
                gradient.copy_(values.view_as(gradient))

    def _is_addend(self, name: str) -> bool:
        """Whether each rank computes an addend of a gradient: of its heads, or of its inputs or outputs.

        Layers that are not divided, such as the gate of a shared expert, have whole gradients on all ranks.
        """
        if sees(name):
            return False
        layer = name.split(".")[-2]
        is_divided = layer in WIDENING | NARROWING
        return layer in HEAD_NORMS or (is_adapter(name) and is_divided and self.dim_of(name) is None)

    def counts(self, name: str) -> bool:
        """Whether the gradient of a weight counts on this rank, so that each number of the whole counts once."""
        return self.place == 0 or self.dim_of(name) is not None

    def _copy_input(
        self, _: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        if arguments:
            return (copied(arguments[0], self.peers), *arguments[1:]), named
        return arguments, {**named, "hidden_states": copied(named["hidden_states"], self.peers)}


def _check_family(decoder: Decoder, key: str, tp: int) -> None:
    """Refuse a model whose layers are not those that can be divided, or are divided otherwise.

    What chooses experts is small, and each rank has it; the experts themselves are divided along `ep`.
    """
    model = decoder.model
    if decoder.expert_parallel is None and expert_modules(model):
        raise RecipeError.at(key, whole_experts(tp))
    mixed = {*(decoder.expert_parallel.modules if decoder.expert_parallel else ())}
    mixtures = tuple(f"{name}." for name, one in model.base_model.named_modules() if mixed & {*one.children()})
    plan = dict.fromkeys(WIDENING, "colwise") | dict.fromkeys(NARROWING, "rowwise")
    plan |= dict.fromkeys(HEAD_NORMS, "replicated_with_grad_allreduce")
    text = model.config.get_text_config()
    family = SAME_LAYERS.get(text.model_type)
    own = (text if family is None else AutoConfig.for_model(family)).base_model_tp_plan or {}
    found = {name.rpartition(".")[2]: kind for name, kind in own.items()}
    refused = f"models of type {model.config.model_type} cannot be divided by tp: "
    for name, module in model.named_modules():
        children = {child for child, _ in module.named_children()}
        if sees(name) or not children & (WIDENING | NARROWING):
            continue
        other = {name.split(".")[0] for name, _ in module.named_parameters()} - set(plan)
        wrong = sorted(other | {child for child in children & set(plan) if found.get(child) != plan[child]})
        if wrong:
            raise RecipeError.at(key, f"{refused}it is not known how to divide {name}.{wrong[0]}; leave out tp")
    weights = model.base_model.named_parameters()
    matrices = {name: weight.shape for name, weight in weights if weight.ndim > 1 and not sees(name)}
    layers = {n: shape for n, shape in matrices.items() if not (n.split(".")[-2] in WORDS or is_adapter(n))}
    undivided = [name for name, shape in layers.items() if divided_dim(name, shape, tp) is None]
    divisible = WIDENING | NARROWING
    unknown = [n for n in undivided if n.split(".")[-2] in divisible or not n.startswith(mixtures)]
    words = model.get_input_embeddings()
    if unknown or not (type(words) is nn.Embedding or type(words).__name__ in SCALED_WORDS):
        what = unknown[0] if unknown else f"embeddings of type {type(words).__name__}"
        raise RecipeError.at(key, f"{refused}it is not known how to divide {what}; leave out tp")


class _SummedLinear(FrozenLinear):
    """A linear layer whose inputs are divided over ranks."""

    peers: ProcessGroup

    @classmethod
    def make(cls, module: nn.Module, peers: ProcessGroup) -> None:
        """Make one of a linear layer."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module.peers = peers

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        result = summed(self.product(input), self.peers)
        return result if self.bias is None else result + self.bias


class _SummedLora(LoraLinear):
    """A linear layer with an adapter whose inputs are divided over ranks; one sum serves both."""

    peers: ProcessGroup

    @classmethod
    def make(cls, module: nn.Module, peers: ProcessGroup) -> None:
        """Make one of a layer with an adapter."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module.peers, place = peers, peers.ranks.index(peers.rank)
        module.first_input = module.in_features // peers.size * place

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        result = summed(self.adapted(input, self.product(input)), self.peers)
        return result if self.bias is None else result + self.bias


class _WordsPart(nn.Embedding):
    """Embeddings of words that are divided over ranks."""

    part: VocabularyPart

    @classmethod
    def make(cls, module: nn.Embedding, part: VocabularyPart) -> None:
        """Make one of an embedding. One that scales what `nn.Embedding` gives then scales what this class gives."""
        kind = type(module)
        module.__class__ = cls if kind is nn.Embedding else type(kind.__name__, (kind, cls), {})
        assert isinstance(module, cls)
        module.part, module.padding_idx = part, part.place_of(module.padding_idx)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        places, are_here = self.part.locate(input)
        found = embedding(places, self.weight, self.padding_idx) * are_here.unsqueeze(-1)
        return summed(found, self.part.peers)
