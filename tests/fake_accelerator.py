"""Passes on an accelerator that does not exist: `python -m tests.fake_accelerator NAME` runs one of them.

Tensors of the device have shapes and types, but no values. Everything on the host is computed. So a tensor that was
made on the host and forgotten there, or an operation across devices, fails as it would on a real accelerator. What is
copied from the device to the host is zeros; copies and reads of single values are counted. An operation whose result
has a size that depends on values, such as `nonzero`, fails: the host would have to wait for it.

Registering a device changes torch for good, so each pass has a process of its own.
"""

from __future__ import annotations

import json
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import cast

import torch
from tests.preferences import batch_of
from tests.tiny import add_gradients, at_temperature, random_samples, tiny_model
from tests.unit.recipes import make_recipe
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from leaderless.algorithms import LossInputs, importance_ratios
from leaderless.algorithms import losses as policy_losses
from leaderless.algorithms.policy_loss import compute
from leaderless.algorithms.settings import AlgorithmConfig
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Jagged
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup
from leaderless.models import decoder
from leaderless.models.attention.shared_prompts import VarlenAttention
from leaderless.models.causal_lm import TokenOutputs, load_causal_lm
from leaderless.models.scoring import _can_write_float32
from leaderless.models.value_model import load_value_model
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.rollout.native import engine as native
from leaderless.rollout.native import kv_cache
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.sampling import sample_tokens
from leaderless.stages.context import Grader, ModelRole, StageContext
from leaderless.stages.preferences import loss_of_rows, side_by_side, totals_of
from leaderless.stages.update import update
from leaderless.training.fsdp import FsdpEngine, FsdpValueEngine
from leaderless.training.micro_batches import response_lengths

KIND = "npu"
DEVICE = torch.device("cpu")  # until it is registered
LENGTHS = [(3, 9), (3, 1), (3, 14), (12, 2), (12, 4), (12, 21), (2, 5), (2, 0), (2, 17)]
ALONE = ProcessGroup((0,), 0)
MODEL = tiny_model(num_layers=1)
"""Made on the host. All layers are alike, and each operation takes milliseconds."""


class Accelerator(TorchDispatchMode):
    """Gives operations on the device to fake tensors, and lets those on the host be computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = self.num_copies = 0
        self.num_sent = self.num_waits = 0  # copies to the device, and those for which the host waits
        self.refused: dict[str, torch.dtype | None] = {}  # operations that the device has not, for a type or for all
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = pytree.tree_leaves((args, kwargs or {}))
        is_there = any(isinstance(leaf, Tensor) and leaf.device.type == KIND for leaf in leaves)
        if not is_there and not any(isinstance(leaf, torch.device) and leaf.type == KIND for leaf in leaves):
            return func(*args, **kwargs or {})
        name, dtypes = func.overloadpacket.__name__, {leaf.dtype for leaf in leaves if isinstance(leaf, Tensor)}
        if name in self.refused and self.refused[name] in {None, *dtypes}:
            raise NotImplementedError(f"could not run '{name}' with {dtypes} on '{KIND}'")
        if func is torch.ops.aten._local_scalar_dense.default:
            self.num_reads += 1
            return torch.zeros((), dtype=args[0].dtype).item()
        if name in {"_to_copy", "copy_"}:
            source, options = args[1] if name == "copy_" else args[0], kwargs or {}
            goes_there = name == "copy_" or torch.device(options.get("device") or "cpu").type == KIND
            if goes_there and source.device.type == "cpu":
                self.num_sent += 1
                self.num_waits += not (args[2] if len(args) > 2 else options.get("non_blocking"))
        if name in {"index", "index_put", "index_put_"} and args[0].device.type == KIND:
            here = [one for one in args[1] if one is not None and one.ndim and one.device.type == "cpu"]
            self.num_sent, self.num_waits = self.num_sent + len(here), self.num_waits + len(here)
        if any(isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) for leaf in leaves):
            args = pytree.tree_map_only(Tensor, self._as_fake, args)
        with self._fake:
            result = func(*args, **kwargs or {})
        if isinstance(result, FakeTensor) and result.device.type == KIND:
            return result  # most results: a map over one takes long
        return pytree.tree_map_only(Tensor, self._on_host, result)

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _on_host(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        self.num_copies += 1
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


class Event:
    """A place in the work of the device, which it has always reached."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def moved(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module with its weights on the device."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to(DEVICE, dtype), parameter.requires_grad)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = buffer.to(DEVICE)
    if hasattr(module, "model") and hasattr(module.model, "tie_weights"):
        module.model.tie_weights()
    module.to = lambda *_: module  # engines would move it again, which fake tensors do not support
    return module


def moved_to(module: nn.Module, *_: object) -> nn.Module:
    """In the place of `Module.to`."""
    return moved(module, torch.float32)


@contextmanager
def varlen_attention(*, is_used: bool) -> Iterator[None]:
    """CUDA's attention in half precision, on this device."""
    before = decoder.attention_over
    if is_used:
        decoder.attention_over = lambda families, device, _: VarlenAttention(families, device)
    try:
        yield
    finally:
        decoder.attention_over = before


def check_gradients(engine: FsdpEngine | FsdpValueEngine) -> int:
    gradients = [(name, parameter.grad) for name, parameter in engine.named_weights()]
    for name, gradient in gradients:
        assert gradient is not None, name
        assert gradient.device.type == KIND, name
    return len(gradients)


def train(accelerator: Accelerator) -> dict[str, int]:
    """Log-probs, updates with and without a gradient of entropies, and an optimizer step, in both types."""
    counts: dict[str, int] = {}
    for dtype in (torch.float32, torch.bfloat16):
        config = ModelConfig(path=MODEL, compute_dtype="float32")
        model = moved(load_causal_lm(config, "policy"), dtype)
        engine = FsdpEngine(model, config, ALONE, DEVICE, 64, optimizer=OptimizerConfig(), num_updates=2)
        engine.compute_dtype = dtype
        batch = at_temperature(random_samples(LENGTHS, siblings=3), 0.7)
        first = batch.select(torch.arange(3))  # backward passes take longest, and all of them are alike
        with varlen_attention(is_used=dtype == torch.bfloat16):
            assert engine.log_probs(batch).values.device.type == "cpu"
            for entropy in ("value", "gradient"):
                before, sent, waits = accelerator.num_reads, accelerator.num_sent, accelerator.num_waits
                num_passes = len(engine.micro_batches(first))
                add_gradients(engine, first, loss, entropy=entropy)
                counts[f"reads in {dtype}"] = accelerator.num_reads - before
                counts[f"copies to the device in {dtype}"] = (accelerator.num_sent - sent) / num_passes
                assert accelerator.num_waits == waits
        counts["gradients"] = check_gradients(engine)
        engine.optimizer_step()
    assert _can_write_float32(KIND), "products in float32 were traced as well"
    return counts


def loss(outputs: TokenOutputs, micro_batch: object) -> Tensor:
    return outputs.log_probs.sum() + outputs.entropies.sum()


def critic(dtype: torch.dtype) -> FsdpValueEngine:
    """A value model on the device, whose head stays in float32."""
    config = ModelConfig(path=MODEL, compute_dtype="float32")
    model = moved(load_value_model(config, "critic"), dtype)
    for module in model.float32_modules():
        module.weight = nn.Parameter(module.weight.detach().float())
    engine = FsdpValueEngine(model, config, ALONE, DEVICE, 64, optimizer=OptimizerConfig(), num_updates=2)
    engine.compute_dtype = dtype
    return engine


def values(accelerator: Accelerator) -> dict[str, int]:
    """A value model's scores and update."""
    engine = critic(torch.bfloat16)
    batch = random_samples(LENGTHS, siblings=3)
    assert engine.values(batch).values.device.type == "cpu"
    add_gradients(engine, batch.select(torch.arange(3)), lambda outputs, _: outputs.sum())
    return {"gradients": check_gradients(engine)}


def decode(accelerator: Accelerator) -> dict[str, float]:
    """Prefill in one and in several parts, and decoding with all ways to sample."""
    native.PREFILL_TOKENS, kv_cache.SMALLEST_SLOT = 64, 2
    num_tokens = num_draws = 0
    config = ModelConfig(path=MODEL, compute_dtype="float32")
    model = moved(load_causal_lm(config, "policy").eval(), torch.bfloat16)

    def counted(*arguments: object) -> tuple[Tensor, Tensor]:
        nonlocal num_draws
        num_draws += 1
        return sample_tokens(*arguments)

    native.sample_tokens = counted
    before = accelerator.num_copies
    ways = [SamplingConfig(), SamplingConfig(temperature=0), SamplingConfig(temperature=0.5, top_p=0.9, top_k=5)]
    for way in [*ways, SamplingConfig(min_p=0.1)]:
        engine, is_first = NativeEngine(model, None, frozenset(), 7, DEVICE), way == ways[0]
        prompts = [[5] * 3, [6] * 70, [7] * 20, [8] * 150] if is_first else [[5] * 3, [6] * 70]
        requests = [Request(prompt, [10 * i + j for j in range(2)]) for i, prompt in enumerate(prompts)]
        requests.append(Request([9] * 30, [99]))
        groups = generate(engine, requests, SamplingParams(way, 4 if is_first else 2, (), seed=1))
        num_tokens += sum(len(completion.tokens) for group in groups for completion in group)
        # Conversations with a shared beginning, which are joined, kept, moved to larger slots and continued.
        texts = {number: [5] * 3 for number in range(4)}
        for _ in range(3 if is_first else 0):
            turns = [Request(list(text), [number], (), number) for number, text in texts.items()]
            for number, (completion,) in enumerate(generate(engine, turns, SamplingParams(way, 4, (), seed=1))):
                texts[number] += [*completion.tokens, *[6] * (1 + 9 * number)]
                num_tokens += len(completion.tokens)
    return {"tokens": num_tokens, "copies to the host for each draw": (accelerator.num_copies - before) / num_draws}


def losses(accelerator: Accelerator) -> dict[str, int]:
    """An update on the policy loss of a recipe: copies to the device, and those for which the host waits."""
    workflow = resolve_workflow("grpo")
    recipe = make_recipe(algorithm={**workflow.algorithm, "kl": {"coefficient": 0.1}})
    batch = at_temperature(random_samples(LENGTHS, siblings=3), 0.7)
    counts = response_lengths(batch.jagged("response_mask"))
    zeros = torch.zeros(int(counts.sum()))
    names = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages")
    batch = batch.with_columns(
        policy_versions=Jagged(zeros.int(), counts, "response_tokens"),
        reward_valid=torch.ones(len(batch), dtype=torch.bool),
        **{name: Jagged(zeros, counts, "response_tokens") for name in names},
    )
    config = ModelConfig(path=MODEL, compute_dtype="float32")
    engine = FsdpEngine(
        moved(load_causal_lm(config, "policy"), torch.bfloat16), config, ALONE, DEVICE, 64, optimizer=OptimizerConfig()
    )
    engine.compute_dtype = torch.bfloat16
    context = StageContext(
        recipe=recipe,
        node=make_plan(recipe, workflow, Cluster(1))["policy"],
        step=2,
        process_group=ALONE,
        metrics=Metrics(),
        run_directory=cast("RunDirectory", None),
        tokenizer=cast("Tokenizer", None),
        model=ModelRole(engine, None),
        grade=cast("Grader", None),
    )
    num_passes = len(engine.micro_batches(batch))
    sent, waits = accelerator.num_sent, accelerator.num_waits
    update(batch, context)
    copies, waits = accelerator.num_sent - sent, accelerator.num_waits - waits
    return {"passes": num_passes, "copies": copies, "waits": waits}


def formulas(accelerator: Accelerator) -> dict[str, int]:
    """All policy losses, and all ratios by which a loss is corrected, with their backward passes."""
    lengths = torch.tensor([3, 5, 0, 2]).to(DEVICE)
    values = torch.randn(10).to(DEVICE)
    before = accelerator.num_reads + accelerator.num_copies + accelerator.num_waits
    kinds = [module.name for module in pkgutil.iter_modules(policy_losses.__path__)]
    for kind in kinds:
        loss = AlgorithmConfig.model_validate({"policy_loss": {"type": kind}}).policy_loss
        log_probs = values.clone().requires_grad_()
        columns = dict.fromkeys(loss.reads, values)
        inputs = LossInputs(log_probs, values, values, lengths, values > 0, values > 0, columns, step=2)
        compute(loss, inputs).loss.sum().backward()
        assert log_probs.grad is not None
    for level in ("token", "sequence", "geometric"):
        importance_ratios(values, values, lengths, level)
    waits = accelerator.num_reads + accelerator.num_copies + accelerator.num_waits - before
    return {"losses": len(kinds), "waits": waits}


def preferences(accelerator: Accelerator) -> dict[str, int]:
    """The same for the loss of pairs of responses."""
    loss = AlgorithmConfig.model_validate({"preference_loss": {"type": "sigmoid"}}).preference_loss
    rows = batch_of(loss)  # scored on the host
    config = ModelConfig(path=MODEL, compute_dtype="float32")
    engine = FsdpEngine(moved(load_causal_lm(config, "policy"), torch.bfloat16), config, ALONE, DEVICE, 4096)
    engine.compute_dtype = torch.bfloat16
    totals = totals_of(engine, loss, rows, torch.Tensor.clone)
    micro_batches = engine.micro_batches(side_by_side(rows))
    sent, waits, reads = accelerator.num_sent, accelerator.num_waits, accelerator.num_reads
    for micro_batch in micro_batches:
        found = loss_of_rows(engine, loss, rows, totals, micro_batch)
        assert found.value.device.type == KIND
    copies, waits = accelerator.num_sent - sent, accelerator.num_waits - waits
    return {"passes": len(micro_batches), "copies": copies, "waits": waits, "reads": accelerator.num_reads - reads}


def refusals(accelerator: Accelerator) -> dict[str, int]:
    """Sampling and an update on a device without sums of float64 and without a fused optimizer step."""
    accelerator.refused = {"cumsum": torch.float64, "searchsorted": None, "_fused_adamw_": None}
    config = ModelConfig(path=MODEL, compute_dtype="float32")
    model = moved(load_causal_lm(config, "policy"), torch.bfloat16)
    before, num_warnings = accelerator.num_copies, 0
    generated = NativeEngine(model.eval(), None, frozenset(), 7, DEVICE)
    groups = generate(generated, [Request([5] * 3, [1, 2])], SamplingParams(SamplingConfig(), 4, (), seed=1))
    num_tokens = sum(len(completion.tokens) for group in groups for completion in group)
    copies = accelerator.num_copies - before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = FsdpEngine(model, config, ALONE, DEVICE, 64, optimizer=OptimizerConfig(), num_updates=2)
        num_warnings = sum("AdamW starts many kernels" in str(one.message) for one in caught)
    engine.compute_dtype = torch.bfloat16
    add_gradients(engine, random_samples(LENGTHS[:3], siblings=3), loss, entropy="value")
    engine.optimizer_step()
    steps = {number.device.type for number in engine._optimizer._numbers.values()}
    assert steps == {"cpu"}
    return {"tokens": num_tokens, "copies to the host": copies, "warnings": num_warnings}


def mistakes(accelerator: Accelerator) -> dict[str, int]:
    """Check that the mistakes are found."""
    there, here = torch.zeros(3, device=DEVICE), torch.arange(3)
    found = 0
    for function in (lambda: there + here, lambda: there.index_select(0, here), lambda: torch.cat([there, here])):
        try:
            function()
        except RuntimeError as error:
            found += "same device" in str(error)
    return {"found": found}


PASSES: dict[str, Callable[[Accelerator], dict[str, float]]] = {
    function.__name__: function
    for function in (train, values, losses, formulas, preferences, decode, refusals, mistakes)
}
OTHERS = {"updates": "tests.fake_updates", "bodies": "tests.fake_bodies"}
"""Modules of further passes."""


def main() -> None:
    name = sys.argv[1]
    passes = PASSES[name] if name in PASSES else getattr(import_module(OTHERS[name]), name)
    register()
    with Accelerator() as accelerator, torch.autograd.set_multithreading_enabled(False):
        counts = passes(accelerator)
    print(json.dumps(counts))


def register() -> None:
    """Register the device, for good."""
    global DEVICE  # noqa: PLW0603
    _setup_privateuseone_for_python_backend(KIND)
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes tensors on the host, and moves them visibly
    DEVICE = torch.device(KIND, 0)
    torch.get_device_module(DEVICE).Event = Event


if __name__ == "__main__":
    # Other modules import it by its name, and want the same device.
    import_module("tests.fake_accelerator").main()
