"""Training and transport on a GPU: the same numbers as on the CPU, within the limits of bfloat16."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RankPool
from tests.distributed.test_training import LENGTHS
from tests.end_to_end.cli import metrics, succeed
from tests.tiny import add_gradients, random_samples, tiny_model, write_recipe
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.base.devices import can_pin, setup_device
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.in_flight import MESSAGES_AHEAD, mark
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight
from leaderless.distributed.weights.copies import begin_copy, collected
from leaderless.models import uploads
from leaderless.models.attention.blocks import Repeats
from leaderless.models.attention.flash import activate_flash_attention_3, restore_flash_attention
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.shared_prompts import Family, VarlenAttention, attention_over
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import end_tokens, load_tokenizer
from leaderless.models.scoring import (
    Scoring,
    _can_add_float32,
    _can_write_float32,
    add_product,
    bmm_in_float32,
    linear_in_float32,
    score_tokens,
)
from leaderless.models.uploads import one_copy, placed
from leaderless.observability.metrics import Metrics
from leaderless.planner.memory.rank import LARGE_MAX_LOGITS
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.lean_forward import forward_of
from leaderless.rollout.native.segment_attention import attend_in_float32
from leaderless.training.fsdp import FsdpEngine

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="this machine has no CUDA device")
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="nccl needs a device for each of two ranks")

FAMILIES = [Family(150, (30, 41, 1)), Family(4, ()), Family(3, (6,)), Family(1, (2, 200)), Family(7, (1, 9))]

Numbers = dict[str, Tensor]


def join() -> tuple[Transport, torch.device]:
    """A process group on this rank's device, as a worker makes it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    setup = setup_device(rank, size)
    dist.init_process_group(setup.backend, rank=rank, world_size=size)
    return Transport(setup.device, timeout_s=60), setup.device


def train_one_update(model: str, compute_dtype: str, device_name: str) -> Numbers:
    """Log-probabilities, gradients and updated weights of one update, complete, in host memory."""
    transport, device = join()
    if device_name == "cpu":
        device = torch.device("cpu")
    config = ModelConfig(path=model, compute_dtype=compute_dtype)  # type: ignore[arg-type]
    engine = FsdpEngine(
        load_causal_lm(config, "policy"),
        config,
        transport.world,
        device,
        64,
        optimizer=OptimizerConfig(learning_rate=1e-3, epsilon=1e-3),
        num_updates=1,
    )
    samples = random_samples(LENGTHS, siblings=3)
    mine = torch.arange(transport.rank, len(LENGTHS), transport.world.size)
    batch = samples.select(mine)
    scores = engine.log_probs(batch).rows()
    numbers = {f"log_probs.{row}": values for row, values in zip(mine.tolist(), scores, strict=True)}
    add_gradients(engine, batch, lambda outputs, _: -outputs.log_probs.sum() / 50)
    for name, parameter in engine.named_weights():
        assert parameter.grad is not None
        numbers[f"gradients.{name}"] = _whole(parameter.grad)
        assert parameter.dtype == torch.float32, "master weights"
    numbers["grad_norm"] = torch.tensor(engine.optimizer_step().grad_norm)
    assert device.type == "cpu" or torch.cuda.max_memory_allocated(device) > 0
    return numbers | {f"weights.{name}": value.cpu().clone() for name, value in engine.full_weights()}


def _whole(value: Tensor) -> Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.cpu().clone()


def largest_difference(result: Numbers, expected: Numbers, kind: str) -> float:
    """Relative L2 distance over all tensors of a kind."""
    names = [name for name in expected if name.startswith(kind)]
    assert names
    difference = torch.cat([(result[name] - expected[name]).flatten().double() for name in names])
    return float(difference.norm() / torch.cat([expected[name].flatten().double() for name in names]).norm())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(("compute_dtype", "limit"), [("float32", 1e-4), ("bfloat16", 8e-2)])
def test_an_update_on_cuda_is_that_of_the_cpu(ranks: RankPool, family: str, compute_dtype: str, limit: float) -> None:
    model = tiny_model(family)  # type: ignore[arg-type]
    (expected,) = ranks.run(1, train_one_update, model, "float32", "cpu", init_group=False)
    (result,) = ranks.run(1, train_one_update, model, compute_dtype, "cuda", init_group=False)
    assert result.keys() == expected.keys()
    for kind in ("log_probs", "gradients", "weights"):
        difference = largest_difference(result, expected, kind)
        print(f"{family}, {compute_dtype}, {kind}: {difference:.1e}")
        assert difference < limit
    assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=limit)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("families", [FAMILIES, [Family(40, (9,)), Family(300, ())]], ids=["siblings", "alone"])
def test_shared_prompts_are_attended_to_on_cuda_as_on_the_cpu(
    families: list[Family], dtype: torch.dtype, limit: float
) -> None:
    num_tokens = sum(family.num_tokens for family in families)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(num_tokens, heads, 64, generator=generator) for heads in (4, 2, 2)]
    slope = torch.randn(num_tokens, 4, 64, generator=generator)
    results = []
    for device, kind in ((torch.device("cpu"), torch.float32), (torch.device("cuda"), dtype)):
        taken = [tensor.to(device, kind).requires_grad_() for tensor in inputs]
        output = attention_over(families, device, kind).attend(0, *taken, AttentionForm(0.2))
        grads = torch.autograd.grad((output.float() * slope.to(device)).sum(), taken)
        results.append([tensor.detach().float().cpu() for tensor in (output, *grads)])
    for expected, result in zip(*results, strict=True):
        assert (result - expected).norm() / expected.norm() < limit


def test_bfloat16_is_multiplied_into_float32_on_cuda() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 64, generator=generator).mul(3).to(torch.bfloat16) for n in (32, 128))
    expected = rows.double() @ weight.double().t()
    rows, weight = rows.cuda(), weight.cuda()
    assert _can_write_float32("cuda")
    for result in (linear_in_float32(rows, weight), bmm_in_float32(rows[None], weight.t()[None])[0]):
        assert result.dtype == torch.float32
        assert float((result.cpu() - expected).abs().max()) < 1e-3


def test_products_are_added_to_float32_on_cuda() -> None:
    """With `_can_add_float32`, in one kernel; without it in two, which torch may decide."""
    generator = torch.Generator().manual_seed(0)
    print(f"in one kernel: {_can_add_float32('cuda')}")
    total, expected = torch.ones(64, 48, device="cuda"), torch.ones(64, 48, dtype=torch.float64)
    for _ in range(64):
        left, right = (torch.randn(n, m, generator=generator).to(torch.bfloat16) for n, m in ((32, 64), (32, 48)))
        add_product(total, left.cuda().t(), right.cuda())
        expected += left.double().t() @ right.double()
    assert float((total.cpu() - expected).norm() / expected.norm()) < 1e-6


def test_the_head_is_scored_in_large_chunks_as_in_small_ones_on_cuda() -> None:
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(64, 2000, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(900, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    targets = torch.randint(0, 2000, (900,), generator=generator).cuda()
    found = []
    for max_logits in (2000 * 16, LARGE_MAX_LOGITS):
        scores, entropies = score_tokens(hidden, head, targets, 0.7, "value", how=Scoring(max_logits))
        found.append((scores, entropies, *torch.autograd.grad(scores.mean(), [hidden, head.weight])))
    for small, large in zip(*found, strict=True):
        assert float((small.float() - large.float()).norm() / large.float().norm()) < 5e-3


@pytest.mark.parametrize("bias", [0, 60, 150])
def test_large_keys_cost_the_rollout_no_digits_on_cuda(bias: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 8, n, 128, generator=generator) for n in (6, 64, 64))
    key = key + bias * torch.randn(2, 1, 1, 128, generator=generator).sign() / 4
    inputs = [tensor.to(torch.bfloat16) for tensor in (query, key, value)]
    q, k, v = (tensor.double() for tensor in inputs)
    expected = (q @ k.transpose(2, 3) * 128**-0.5).softmax(dim=-1) @ v
    q, k, v = (tensor.cuda() for tensor in inputs)
    result, _ = attend_in_float32(q, k, v, None, 128**-0.5)
    assert float((result.cpu().double() - expected).norm() / expected.norm()) < 0.006


def test_gradients_of_shared_prompts_repeat_bit_for_bit_on_cuda() -> None:
    attention = VarlenAttention([Family(200, (7,) * 64)], torch.device("cuda"))
    assert attention._copies is not None
    key = torch.randn(200 + 7 * 64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    slope = torch.randn_like(attention._copies.take(key))
    first, second = (torch.autograd.grad(attention._copies.take(key), key, slope)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_gradients_of_tokens_that_are_selected_again_repeat_bit_for_bit_on_cuda() -> None:
    rows = torch.cat([torch.arange(200), torch.full((64,), 7)])
    repeats = Repeats(rows, 300, torch.device("cuda"))
    values = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    slope = torch.randn(264, 256, device="cuda", dtype=torch.bfloat16)
    first, second = (torch.autograd.grad(repeats.take(values), values, slope)[0] for _ in range(2))
    assert torch.equal(first, second)
    expected = torch.zeros(300, 256, dtype=torch.float64).index_add_(0, rows, slope.double().cpu())
    assert float((first.cpu() - expected).norm() / expected.norm()) < 3e-3


def test_tensors_go_to_cuda_while_it_computes_and_arrive_as_they_were() -> None:
    device = torch.device("cuda", 0)
    assert can_pin("cuda")
    tensors = [torch.randint(0, 1 << 40, (n,)) for n in (3, 40_000, 1_000_000)]
    for round_number in range(20):  # memory of the host is used again while copies from it are under way
        begin = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(100_000_000)
        begin.record()
        with one_copy(device):
            arrived = [placed(tensor + round_number, device) for tensor in tensors]
        if round_number:  # memory is allocated in the first round, which may wait
            assert not begin.query(), "the host did not wait"
        expected = [tensor + round_number for tensor in tensors]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(arrived, expected, strict=True))


def test_log_probs_do_not_depend_on_how_inputs_go_to_cuda(ranks: RankPool) -> None:
    ways = [ranks.run(1, score_once, tiny_model(), is_pinned, init_group=False)[0] for is_pinned in (True, False)]
    assert torch.equal(*ways)


def score_once(model: str, is_pinned: bool) -> Tensor:
    transport, device = join()
    config, before = ModelConfig(path=model, compute_dtype="bfloat16"), uploads.can_pin
    engine = FsdpEngine(load_causal_lm(config, "policy"), config, transport.world, device, 64)
    uploads.can_pin = lambda _: is_pinned
    try:
        return engine.log_probs(random_samples(LENGTHS, siblings=3)).values
    finally:
        uploads.can_pin = before


def test_flash_attention_3_is_used_or_says_why_not() -> None:
    reason = activate_flash_attention_3(torch.device("cuda", 0), [(12, 2, 128), (14, 2, 64)])
    if reason is None:
        restore_flash_attention()
    print(f"FlashAttention-3: {'used' if reason is None else reason or 'not installed'}")
    assert reason is None or "a trial" not in reason


@needs_two
def test_two_gpus_give_the_update_of_one(ranks: RankPool) -> None:
    (expected,) = ranks.run(1, train_one_update, tiny_model(), "float32", "cuda", init_group=False)
    results = ranks.run(2, train_one_update, tiny_model(), "float32", "cuda", init_group=False)
    merged = results[0] | results[1]
    for kind in ("log_probs", "gradients", "weights"):
        assert largest_difference(merged, expected, kind) < 1e-4


def answer(model: str, device_name: str, temperature: float) -> list[tuple[list[int], list[float]]]:
    """Tokens of each response with their log-probabilities."""
    config, device = ModelConfig(path=model), torch.device(device_name)
    tokenizer = load_tokenizer(config, "policy")
    module = load_causal_lm(config, "policy").to(device)
    engine = NativeEngine(module, tokenizer, end_tokens(config, tokenizer), 5, device)
    requests = [Request([7 + i, 3, 12], [10 * i + sibling for sibling in range(3)]) for i in range(4)]
    params = SamplingParams(SamplingConfig(temperature=temperature), 12, (), seed=5)
    groups = generate(engine, requests, params)
    return [(completion.tokens, completion.log_probs) for group in groups for completion in group]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_native_engine_samples_the_same_tokens_on_cuda(temperature: float) -> None:
    expected, result = (answer(tiny_model(), device, temperature) for device in ("cpu", "cuda"))
    assert [tokens for tokens, _ in result] == [tokens for tokens, _ in expected]
    for (_, log_probs), (_, others) in zip(result, expected, strict=True):
        assert log_probs == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::UserWarning:leaderless")
def test_compiled_and_recorded_passes_sample_what_the_eager_path_samples(family: str) -> None:
    device, config = torch.device("cuda"), ModelConfig(path=tiny_model(family))  # type: ignore[arg-type]
    model = load_causal_lm(config, "policy").to(device).eval()
    requests = [Request([7 + i, 3, 12], [10 * i + sibling for sibling in range(3)]) for i in range(8)]
    params = SamplingParams(SamplingConfig(), 60, (), seed=5)
    fast, eager = (NativeEngine(model, load_tokenizer(config, "policy"), frozenset(), 20, device) for _ in range(2))
    assert fast._graphs is not None
    eager._graphs, eager._pass = None, forward_of(model, enable_compile=False)
    results, expected = (generate(engine, requests, params) for engine in (fast, eager))
    assert fast._graphs._recorded, "some shapes came again"
    for group, others in zip(results, expected, strict=True):
        for completion, other in zip(group, others, strict=True):
            assert completion.tokens == other.tokens
            assert completion.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_metrics_mix_numbers_of_host_and_device() -> None:
    metrics_of_step = Metrics()
    for value in (0.5, torch.tensor(2.0, device="cuda"), 1.0):
        metrics_of_step.max("max", value)
        metrics_of_step.mean("mean", value, 1)
        metrics_of_step.total("total", value)
    metrics_of_step.spread("spread", torch.tensor([1.0, 3.0], device="cuda"))

    class Alone:
        def sum(self, values: Tensor, what: str) -> Tensor:  # noqa: ARG002
            return values

        def max(self, values: Tensor, what: str) -> Tensor:  # noqa: ARG002
            return values

    numbers = metrics_of_step.reduce(Alone())
    assert numbers == pytest.approx({"max": 2.0, "mean": 3.5 / 3, "total": 3.5, "spread/mean": 2.0, "spread/std": 1.0})


@pytest.mark.parametrize(("compute_dtype", "mismatch"), [("bfloat16", 0.05), ("float32", 1e-4)])
def test_a_whole_run_on_cuda_logs_what_the_cpu_logs(
    ranks: RankPool, tmp_path: Path, compute_dtype: str, mismatch: float
) -> None:
    changes = {
        "reward": {"format": {"pattern": r".*\d.*"}},
        "batch.updates_per_step": 2,
        "algorithm.kl.coefficient": 0.1,
    }
    recipe = write_recipe(tmp_path, tiny_model(), changes)
    succeed(ranks, tmp_path, "train", recipe, "name=cuda", f"models.policy.compute_dtype={compute_dtype}")
    lines = metrics(tmp_path / "runs/cuda")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["policy/grad_norm"] > 0
        assert line["mismatch/abs_mean"] < mismatch


def exchange_over_nccl() -> list[bytes]:
    """The tensors that this rank receives, through the device."""
    transport, device = join()
    world = transport.world
    assert world.payload_device == device
    peers = [rank for rank in world.ranks if rank != world.rank]
    messages = {peer: torch.full((1000 + peer,), 10 * world.rank + peer, dtype=torch.uint8) for peer in peers}
    assert int(world.sum(torch.tensor(world.rank), "host memory")) == sum(world.ranks)
    arrived = world.exchange(messages, peers, "bytes")
    return [bytes(arrived[peer].numpy()) for peer in peers]


@needs_two
def test_bytes_cross_from_gpu_to_gpu(ranks: RankPool) -> None:
    for rank, received in enumerate(ranks.run(2, exchange_over_nccl, init_group=False)):
        assert received == [bytes([10 * (1 - rank) + rank]) * (1000 + rank)]


def test_a_process_group_on_one_gpu_sums_on_host_and_device(ranks: RankPool) -> None:
    assert ranks.run(1, sum_on_both, init_group=False) == [(3.0, 4.0)]


def sum_on_both() -> tuple[float, float]:
    _, device = join()
    host, there = torch.tensor(3.0), torch.tensor(4.0, device=device)
    dist.all_reduce(host)
    dist.all_reduce(there)
    return float(host), float(there)


def test_a_mark_is_reached_when_the_work_before_it_is_done() -> None:
    device, group = torch.device("cuda"), ProcessGroup((0, 1), 0, timeout_s=60.0)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    place = mark(device)
    assert not place.query()
    for _ in range(MESSAGES_AHEAD):
        group.backlog.add(group, "words", device, MESSAGES_AHEAD)
    assert not place.query(), "the host has not waited"
    group.backlog.add(group, "rows", device, 0)
    assert place.query()
    assert not group.backlog


def test_copies_of_weights_are_what_they_were_while_cuda_and_the_host_continue() -> None:
    weight = torch.randn(1 << 20, device="cuda")
    expected = weight.bfloat16().cpu()
    held = HeldWeights.of([LocalWeight.of("weight", weight)], 3)
    begin_copy(held, torch.bfloat16).wait()  # pinned memory is there from now on
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    copy = begin_copy(held, torch.bfloat16)
    assert copy.done is not None
    assert not copy.done.query(), "the host has not waited"
    weight.fill_(float("nan"))
    found = copy.wait().weights["weight"].local
    assert found.is_pinned()
    assert torch.equal(found, expected)


def test_weights_that_come_for_cuda_are_in_pinned_memory() -> None:
    weights = {f"weight {n}": torch.randn(n, 3).bfloat16() for n in (5, 1000, 7)}
    found = dict(collected(weights.items(), [weight.nbytes for weight in weights.values()], torch.device("cuda")))
    assert all(tensor.is_pinned() for tensor in found.values())
    assert all(torch.equal(found[name].cuda().cpu(), weight) for name, weight in weights.items())


def exchange_in_a_pass() -> list[bool]:
    """What a rank gets by each message of a pass, compared with what it should be."""
    transport, device = join()
    group, rank = transport.world, transport.rank
    values = torch.arange(4.0, device=device).view(2, 2) + 10 * rank
    found = []
    for _ in range(2 * MESSAGES_AHEAD):
        other = values + 10 - 20 * rank
        swapped = torch.stack([(values if peer == rank else other)[rank] for peer in range(2)])
        found.append(torch.equal(group.swap(values, "rows"), swapped))
        found.append(torch.equal(group.swap_uneven(values, [1, 1], [1, 1], "rows"), swapped))
        found.append(torch.equal(group.pass_on(values, "rows").wait(), other))
        found.append(torch.equal(group.sum(values, "rows", most_ahead=MESSAGES_AHEAD), values + other))
        numbers = values[:, 0].long()
        found.append(group.swap_numbers(numbers, "counts") == [swapped[:, 0].long().tolist(), numbers.tolist()])
    return found


@needs_two
def test_messages_of_a_pass_are_right_while_the_host_runs_ahead(ranks: RankPool) -> None:
    for found in ranks.run(2, exchange_in_a_pass, init_group=False):
        assert all(found)
