"""Compiled decoder layers compute what the layers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tests.engines import ALONE
from tests.tiny import mixture_model, random_samples, tiny_model
from torch import Tensor, fx
from torch._dynamo import mark_static
from torch._dynamo.backends.debugging import aot_eager

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.models import compiled_layers
from leaderless.models.causal_lm import CausalLM
from leaderless.models.compiled_layers import compile_layers, compiled, compiler_failure, why_not_compiled
from leaderless.models.fused_scores import PLAIN
from leaderless.models.loading.sharded_loading import open_model
from leaderless.training import fsdp
from leaderless.training.engine import EngineSetup, ShardingSetup
from leaderless.training.micro_batches import MicroBatch, make_micro_batches

CPU = torch.device("cpu")
LENGTHS = ([(3, 5), (7, 4), (4, 2)], [(9, 2)])


class Backend:
    """Computes graphs as they are, and counts them and their calls."""

    def __init__(self) -> None:
        self.num_graphs = self.num_calls = 0

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        self.num_graphs += 1
        compute = aot_eager(graph, inputs)

        def call(*arguments: object) -> object:
            self.num_calls += 1
            return compute(*arguments)

        return call


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    one = Backend()
    monkeypatch.setattr(compiled_layers, "BACKEND", one)
    yield one
    torch._dynamo.reset()


def opened(path: str, **settings: object) -> CausalLM:
    model = open_model(ModelConfig.model_validate({"path": path, "compute_dtype": "float32", **settings}), "policy")
    assert isinstance(model.decoder, CausalLM)
    model.decoder.complete(lambda _, value: value, CPU)
    model.decoder.requires_grad_(False)
    for _, weight in model.decoder.trained_weights():
        weight.requires_grad_()
    return model.decoder.eval()


def numbers(model: CausalLM, lengths: list[tuple[int, int]], *, has_gradient: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of samples, and the gradient of their sum."""
    model.zero_grad()
    found = []
    for one in make_micro_batches(random_samples(lengths, siblings=2), 64, ALONE):
        attention = model.attention(one.families, CPU, torch.float32)
        with torch.set_grad_enabled(has_gradient):
            outputs = model(one.tokens, one.positions, attention, one.select, one.targets, one.temperature, "none")
        found.append(outputs.log_probs)
        if has_gradient:
            outputs.log_probs.sum().backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return torch.cat(found).detach(), gradients


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        pytest.param({}, marks=pytest.mark.thorough),
        pytest.param({"lora": {"rank": 2}}, marks=pytest.mark.thorough),
        pytest.param({"gradient_checkpointing": True, "lora": {"rank": 2}}, marks=pytest.mark.thorough),
    ],
    ids=["recomputed", "whole", "adapters", "recomputed adapters"],
)
def test_compiled_layers_compute_the_same_from_the_same_few_graphs(settings: dict, backend: Backend) -> None:
    plain, compiled = opened(tiny_model(), **settings), opened(tiny_model(), **settings)
    assert not why_not_compiled(compiled, has_dropout=False)
    compile_layers(compiled)
    num_graphs = []
    for lengths in LENGTHS:
        for has_gradient in (True, False):
            expected, gradients = numbers(plain, lengths, has_gradient=has_gradient)
            found, others = numbers(compiled, lengths, has_gradient=has_gradient)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
            assert gradients.keys() == others.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-5)
        num_graphs.append(backend.num_graphs)
    one, none = MicroBatch.empty(), torch.zeros(1, dtype=torch.int64)  # of a rank without samples
    attention = compiled.attention(one.families, CPU, torch.float32)
    compiled(one.tokens, one.positions, attention, none, none, 1.0, "none").log_probs.sum().backward()
    num_graphs.append(backend.num_graphs)
    # Before and after attention; with a gradient and without; and the first layer's input may need no gradient.
    assert 4 <= num_graphs[0] <= 16
    assert set(num_graphs) == {num_graphs[0]}, "other lengths need no others"


def test_layers_that_recompute_do_so_with_the_same_graphs(backend: Backend) -> None:
    calls = []
    for recomputes in (False, True):
        model = opened(tiny_model(num_layers=1), gradient_checkpointing=recomputes)
        compile_layers(model)
        numbers(model, LENGTHS[1], has_gradient=True)
        before, graphs = backend.num_calls, backend.num_graphs
        numbers(model, LENGTHS[1], has_gradient=True)
        calls.append(backend.num_calls - before)
        assert backend.num_graphs == graphs
    assert calls[1] > calls[0] > 0
    # The last graph of a layer need not run to its end: what it would save last is there before.
    assert calls[1] >= 1.5 * calls[0]


def test_functions_have_kernels_for_many_models_in_every_thread(backend: Backend) -> None:
    """Backward passes of a GPU, and engines that serve, have threads of their own."""
    function, sizes = compiled(lambda values: values + 1, backend), range(2, 12)

    def work() -> None:
        for size in sizes:
            mark_static(values := torch.ones(3, size), 1)
            function(values)

    for thread in [Thread(target=work) for _ in range(2)]:
        thread.start()
        thread.join()
    assert backend.num_graphs == len(sizes)


def test_some_layers_are_not_compiled() -> None:
    assert why_not_compiled(opened(mixture_model(tiny_model("qwen3"))), has_dropout=False) == "it has experts"
    assert why_not_compiled(opened(tiny_model()), has_dropout=True) == "its adapters have dropout"


def test_a_compiler_that_does_not_work_is_noticed_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        raise RuntimeError("no compiler")

    def wrong(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        def call(*arguments: Tensor) -> list[Tensor]:
            return [1.2 * one for one in graph(*arguments)]

        return call

    for backend, expected in ((broken, "no compiler"), (wrong, "its results differ by"), (aot_eager, "")):
        torch._dynamo.reset()
        monkeypatch.setattr(compiled_layers, "BACKEND", backend)
        failure = compiler_failure(CPU, torch.float32)
        assert (expected in failure) if expected else not failure


@pytest.mark.parametrize("compiles", ["auto", True])
def test_layers_are_left_as_they_are_unless_all_ranks_can_compile_them(
    compiles: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, said = opened(tiny_model()), []
    kind = "cuda" if compiles == "auto" else "cpu"
    setup = SimpleNamespace(
        role="policy",
        model=ModelConfig(path=tiny_model()),
        device=SimpleNamespace(type=kind),
        process_group=ALONE,
        sharding=ShardingSetup(compiles=compiles),
    )
    monkeypatch.setattr(fsdp, "compile_layers", said.append)
    monkeypatch.setattr(fsdp, "scores_failure", lambda *_: "")
    for failure in ("", "no compiler"):
        monkeypatch.setattr(fsdp, "compiler_failure", lambda *_, failure=failure: failure)
        if not failure:
            fsdp._compile(model, cast("EngineSetup", setup), "models.policy")
            assert said == [model]
        elif compiles == "auto":
            with pytest.warns(RuntimeWarning, match="training is slower, since torch.compile failed: no compiler"):
                fsdp._compile(model, cast("EngineSetup", setup), "models.policy")
        else:
            with pytest.raises(RecipeError, match=r"^training.compile: role 'policy' cannot have it, since no compil"):
                fsdp._compile(model, cast("EngineSetup", setup), "models.policy")
    assert said == [model]


@pytest.mark.parametrize(
    ("path", "dropout", "reason"),
    [(mixture_model(tiny_model("qwen3")), 0, "it has experts"), (tiny_model(), 0.1, "its adapters have dropout")],
    ids=["experts", "dropout"],
)
def test_scores_are_compiled_where_layers_cannot_be(
    path: str, dropout: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, device, fused = opened(path), SimpleNamespace(type="cuda"), PLAIN
    lora = LoraConfig(rank=2, dropout=dropout) if dropout else None
    setup = SimpleNamespace(
        role="policy",
        model=ModelConfig(path=path, compute_dtype="float32", lora=lora),
        device=device,
        process_group=ALONE,
        sharding=ShardingSetup(compiles="auto"),
    )
    tried = []
    monkeypatch.setattr(fsdp, "compiler_failure", lambda *_: "")
    monkeypatch.setattr(fsdp, "scores_failure", lambda *given: tried.append(given) or "")
    monkeypatch.setattr(fsdp, "compile_scores", lambda: fused)
    monkeypatch.setattr(fsdp, "compile_layers", lambda _: pytest.fail("they cannot be compiled"))
    assert fsdp._compile(model, cast("EngineSetup", setup), "models.policy") == reason
    assert tried == [(device, torch.float32, len(model.head.weight), None)]
    assert model.fused_scores is fused
