"""Megatron next to the ranks: with layouts in a stand-in that checks every call, and in processes of their own."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import torch
from tests.contracts.test_train_engine import BACKENDS, MEGATRON, local, weights_of
from tests.distributed.ranks import RankPool
from tests.distributed.test_experts import experts_model
from tests.distributed.test_experts import num_ranks as num_ranks_of
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS
from tests.fakes.in_process import ENVIRONMENT
from tests.tiny import add_gradients, at_temperature, random_samples, tiny_model
from torch import Tensor

from leaderless.base.values import Json
from leaderless.data.batch import Batch
from leaderless.distributed.remote.child_server import ChildServer
from leaderless.distributed.remote.messages import NUMBER
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.transport import Transport
from leaderless.distributed.weights.blocks import LocalWeight
from leaderless.planner import Layout
from leaderless.training.engine import ApartSetup, EngineSetup, TrainEngine, make_train_engine
from leaderless.training.megatron.processes import megatron_rank
from leaderless.training.micro_batches import MicroBatch

Numbers = dict[str, Tensor]
FSDP = BACKENDS[0]


def rows_of(engine: TrainEngine, layout: Layout, rank: int) -> Batch:
    """The samples of a rank's shard; the last shard has fewer."""
    batch = at_temperature(random_samples(LENGTHS, siblings=3), 0.7)
    shard, size = layout.shard_of(rank), -(-len(batch) // layout.dp)
    return batch.select(torch.arange(shard * size, min(len(batch), (shard + 1) * size)))


def trained(backend: str, setup: EngineSetup) -> Numbers:
    """Numbers before and after two updates, the second with a loss of log-probabilities and entropies."""
    engine, rank = make_train_engine(backend, setup), setup.process_group.rank
    rows = rows_of(engine, setup.layout, rank)
    numbers = {"log_probs": engine.log_probs(rows).values}

    def update(entropy: str) -> float:
        passes = engine.passes(rows)
        for micro_batch in passes:
            with passes.memory():
                outputs = engine.forward(micro_batch, entropy)  # type: ignore[arg-type]
                loss = (outputs.log_probs * torch.linspace(-1, 1, len(outputs.log_probs))).sum()
                if entropy == "gradient":
                    loss = loss - 0.5 * outputs.entropies.sum()
                loss.backward()
        return engine.optimizer_step().grad_norm

    numbers["norms"] = torch.tensor([update("value"), update("gradient")])
    with torch.no_grad():
        (first, *_) = engine.micro_batches(rows)
        numbers["entropies"] = engine.forward(first).entropies
    return numbers | weights_of(engine)


def compare_layouts(sizes: Mapping[str, int], path: str, apart: ApartSetup | None = None) -> None:
    """The stand-in, here or in processes of its own, and the other back end, with the same rows on each rank."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    found = trained("megatron" if apart else MEGATRON, replace(setup_of(transport, layout, path), apart=apart))
    expected = expected_of(transport, layout, path)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4, msg=name)


def expected_of(transport: Transport, layout: Layout, path: str) -> Numbers:
    """What the other back end computes on one rank alone, from the rows of all shards."""
    alone = replace(
        setup_of(transport, layout, path), layout=Layout((transport.rank,), 1), process_group=alone_group(transport)
    )
    alone = replace(alone, axis_groups={"dp": alone.process_group})
    engine = make_train_engine(FSDP, alone)
    firsts = [rank for rank in layout.ranks if layout.place_in_shard(rank) == 0]
    shards = [rows_of(engine, layout, rank) for rank in firsts]
    own = shards[layout.shard_of(transport.rank)]
    numbers = {"log_probs": engine.log_probs(own).values}
    norms = []
    for entropy in ("value", "gradient"):
        for rows in shards:
            for micro_batch in engine.micro_batches(rows):
                outputs = engine.forward(micro_batch, entropy)  # type: ignore[arg-type]
                loss = (outputs.log_probs * torch.linspace(-1, 1, len(outputs.log_probs))).sum()
                if entropy == "gradient":
                    loss = loss - 0.5 * outputs.entropies.sum()
                loss.backward()
        norms.append(engine.optimizer_step().grad_norm)
    numbers["norms"] = torch.tensor(norms)
    with torch.no_grad():
        numbers["entropies"] = engine.forward(engine.micro_batches(own)[0]).entropies
    return numbers | weights_of(engine)


def alone_group(transport: Transport) -> object:
    from leaderless.distributed.transport import ProcessGroup

    return ProcessGroup((transport.rank,), transport.rank)


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 1, "tp": 2},
        *(pytest.param(sizes, marks=pytest.mark.thorough) for sizes in ({"dp": 1, "pp": 2}, {"dp": 2})),
    ],
)
def test_layouts_of_two_ranks_give_the_numbers_of_one(ranks: RankPool, sizes: dict[str, int]) -> None:
    ranks.run(2, compare_layouts, sizes, tiny_model("qwen3"))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {"dp": 2, "ep": 2}),
        ("mixtral", {"dp": 2, "pp": 2, "ep": 2}),
        ("qwen3_moe", {"dp": 1, "tp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_experts_are_exchanged_under_the_names_of_folders(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    path, num_ranks = experts_model(tmp_path, family), num_ranks_of(sizes)
    ranks.run(num_ranks, compare_layouts, sizes, path)
    ranks.run(num_ranks, keep_masters, sizes, path)


def test_all_axes_at_once_give_the_numbers_of_one_rank(ranks: RankPool) -> None:
    ranks.run(4, compare_layouts, {"dp": 1, "pp": 2, "tp": 2}, tiny_model("qwen3"))


def test_ranks_have_places_in_the_order_of_megatron() -> None:
    layout = Layout(tuple(range(8)), 2, tp=2, pp=2)
    assert [megatron_rank(layout, rank) for rank in range(8)] == [0, 1, 4, 5, 2, 3, 6, 7]


def keep_masters(sizes: Mapping[str, int], path: str) -> None:
    """In bfloat16, what is saved is the float32 weights, and a new engine makes the same next update of them."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    setup = setup_of(transport, Layout(transport.world.ranks, **sizes), path)
    setup = replace(setup, model=setup.model.model_copy(update={"compute_dtype": "bfloat16"}))
    engine, other = (make_train_engine(MEGATRON, setup) for _ in range(2))
    rows = rows_of(engine, setup.layout, transport.rank)
    add_gradients(engine, rows, minus_log_probs)
    engine.optimizer_step()
    saved = {name: local(value).clone() for name, value in engine.state().items()}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    for name, value in other.state().items():
        local(value).copy_(saved[name])
    other.state_loaded(1)
    for name, value in other.state().items():
        assert torch.equal(local(value), saved[name]), name
    for one in (engine, other):
        add_gradients(one, rows, minus_log_probs)
        assert one.optimizer_step().grad_norm > 0.1
    assert all(torch.equal(value, weights_of(other)[name]) for name, value in weights_of(engine).items())


@pytest.mark.parametrize("sizes", [pytest.param({"dp": 2}, marks=pytest.mark.thorough), {"dp": 2, "tp": 2}])
def test_float32_weights_are_saved_of_a_model_that_computes_in_bfloat16(ranks: RankPool, sizes: dict[str, int]) -> None:
    ranks.run(2 * sizes.get("tp", 1), keep_masters, sizes, tiny_model())


def damaged(path: str, change: Json, problem: str) -> None:
    """Weights of which something is changed on their way."""
    engine = make_train_engine(MEGATRON, setup_of(Transport(torch.device("cpu"), timeout_s=60), Layout((0,), 1), path))
    call = engine._server.call_numbered  # type: ignore[attr-defined]

    def wrong(name: str, body: Json) -> Json:
        answer = call(name, body)
        if name == "/bucket" and answer["weights"]:
            (answer if "checksum" in change else answer["weights"][0]).update(change)  # type: ignore[operator]
        return answer

    engine._server.call_numbered = wrong  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=problem):
        [*engine.full_weights()]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"checksum": 7}, "weights of role 'policy' have changed on their way from Megatron"),
        ({"shape": [2, 4]}, r"Megatron's 'model.embed_tokens.weight' has shape \(2, 4\), and the model of role"),
        ({"name": "strange"}, "Megatron has no 'model.embed_tokens.weight', which the model of role 'policy' has"),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_refused(ranks: RankPool, change: Json, problem: str) -> None:
    ranks.run(1, damaged, tiny_model(), change, problem)


def recomputed(path: str, is_asked: bool) -> tuple[object, ...]:
    setup = setup_of(Transport(torch.device("cpu"), timeout_s=60), Layout((0,), 1), path)
    model = setup.model.model_copy(update={"gradient_checkpointing": is_asked})
    engine = make_train_engine(MEGATRON, replace(setup, model=model))
    (chunk,) = engine._server._calls._model._chunks  # type: ignore[attr-defined]
    return chunk.config.recompute_granularity, chunk.config.recompute_method, chunk.config.recompute_num_layers


def test_activations_are_recomputed_where_the_recipe_asks_for_it(ranks: RankPool) -> None:
    assert ranks.run(1, recomputed, tiny_model(), True) == [("full", "uniform", 1)]
    assert ranks.run(1, recomputed, tiny_model(), False) == [(None, None, None)]


def environment(folder: Path, *paths: Path | str) -> str:
    """An interpreter with an environment of its own, which has the packages in some folders."""
    packages = folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    base = Path(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n", encoding="utf-8")
    (folder / "bin/python").symlink_to(base)
    (packages / "other.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    return str(folder / "bin/python")


@contextmanager
def losing_answers(server: ChildServer) -> Iterator[None]:
    """A server whose connection is lost before each answer has come, once."""
    exchange, lost = server._exchange, set[str]()

    def lose(path: str, text: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        answer = exchange(path, text, headers)
        if headers[NUMBER] not in lost:
            lost.add(headers[NUMBER])
            raise ConnectionResetError(path)
        return answer

    with patch.object(server, "_exchange", lose):
        yield
    assert lost


def train_apart(python: str, logs: str, path: str) -> None:
    """Real processes, which meet, train, and hand out what they have."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    setup = setup_of(transport, Layout(transport.world.ranks, 2), path)
    setup = replace(setup, apart=ApartSetup(python, 120.0, 60.0, Path(logs)))
    engine, same = make_train_engine("megatron", setup), make_train_engine(FSDP, setup)
    rows = rows_of(engine, setup.layout, transport.rank)
    server = cast("ChildServer", engine._server)  # type: ignore[attr-defined]
    for one in (engine, same):
        add_gradients(one, rows, minus_log_probs)
    kept = server._kept
    assert kept is not None, "calls go over one connection"
    same.optimizer_step()
    with losing_answers(server):
        engine.optimizer_step()
    assert server._kept is not kept, "and over another one if it is lost, and then nothing is done twice"
    torch.testing.assert_close(engine.log_probs(rows).values, same.log_probs(rows).values, atol=1e-5, rtol=1e-5)
    parts: dict[str, LocalWeight] = {one.name: one for one in same.local_weights()}
    for weight in engine.local_weights():
        assert weight.block == parts[weight.name].block
        torch.testing.assert_close(weight.local, parts[weight.name].local, atol=1e-5, rtol=1e-4)
    for name, value in same.state().items():
        torch.testing.assert_close(local(engine.state()[name]), local(value), atol=1e-5, rtol=1e-4, msg=name)
    assert server._process is not None
    assert server._process.poll() is None
    del engine
    assert server._process is None, "the process ends with the engine"


def minus_log_probs(outputs: object, micro_batch: MicroBatch) -> Tensor:
    total: Tensor = -outputs.log_probs.sum() / 10  # type: ignore[attr-defined]
    return total


def test_processes_of_another_environment_train_as_the_ranks_would(ranks: RankPool, tmp_path: Path) -> None:
    python = environment(tmp_path / "megatron", ENVIRONMENT, *site.getsitepackages())
    ranks.run(2, train_apart, python, str(tmp_path / "logs"), tiny_model())
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "megatron-policy-rank-0.log",
        "megatron-policy-rank-1.log",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"dp": 2, "pp": 2, "ep": 2}, marks=pytest.mark.thorough),  # above, it is in the ranks' processes
        {"dp": 1, "tp": 2, "ep": 2},
    ],
    ids=str,
)
def test_processes_that_divide_experts_give_the_numbers_of_one_rank(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, int]
) -> None:
    python = environment(tmp_path / "megatron", ENVIRONMENT, *site.getsitepackages())
    path, apart = experts_model(tmp_path, "qwen3_moe"), ApartSetup(python, 240.0, 60.0, tmp_path / "logs")
    ranks.run(num_ranks_of(sizes), compare_layouts, sizes, path, apart)


def start_without(python: str, logs: str, path: str) -> None:
    transport = Transport(torch.device("cpu"), timeout_s=60)
    setup = setup_of(transport, Layout(transport.world.ranks, 1), path)
    with pytest.raises(EngineError, match=r'has no megatron-core: install "megatron-core==0.18.0"'):
        make_train_engine("megatron", replace(setup, apart=ApartSetup(python, 120.0, 60.0, Path(logs))))


def test_an_environment_without_megatron_is_refused_with_the_remedy(ranks: RankPool, tmp_path: Path) -> None:
    python = environment(tmp_path / "empty", *site.getsitepackages())
    ranks.run(1, start_without, python, str(tmp_path / "logs"), tiny_model())
