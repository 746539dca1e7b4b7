"""A language model in Megatron-Core, in one of the processes that have it together. No other module uses Megatron."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("weights", "exp_avg", "exp_avg_sq")
"""Tensors that a model keeps for each weight: itself in float32, and Adam's moments, which a frozen model lacks."""


@dataclass(frozen=True)
class MegatronSettings:
    """Settings of a Megatron process.

    Attributes:
        model: Folder or hub name of the model.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Whether code that comes with the model may run.
        dtype: Type in which the model computes.
        recompute: Whether activations are recomputed in the backward pass.
        vocab_size: Number of tokens with an embedding, without those that only make it divisible.
        rank: Place of this process among those that have the model.
        world_size: Number of these processes.
        meeting: Place where they find each other, as torch's `init_method`.
        timeout_s: Longest wait for one another.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.
        optimizer: Settings of Adam by their names in Megatron's `OptimizerConfig`; None for a model that is only
            scored.
    """

    model: str
    revision: str | None
    trust_remote_code: bool
    dtype: str
    recompute: bool
    vocab_size: int
    rank: int
    world_size: int
    meeting: str
    timeout_s: float
    tp: int
    pp: int
    ep: int
    optimizer: dict[str, float] | None


@dataclass(frozen=True)
class MegatronPass:
    """Texts of one pass, and the tokens that are scored in them.

    Attributes:
        texts: Tokens of each text.
        text: Text of each scored token, [R].
        place: Place in it of the token before each scored one, [R].
        targets: The scored tokens, [R].
        temperature: Temperature of all of them, or of each.
        entropy: Whether entropies are computed.
    """

    texts: Sequence[Sequence[int]]
    text: Sequence[int]
    place: Sequence[int]
    targets: Sequence[int]
    temperature: float | Sequence[float]
    entropy: bool


@dataclass(frozen=True)
class Slope:
    """Derivatives of a loss by the log-probability of each scored token of a pass, [R], and its entropy, [R] or [0]."""

    log_probs: Sequence[float]
    entropies: Sequence[float]


VERSIONS = {"megatron-core": "0.18", "megatron-bridge": "0.5"}
"""Releases whose interfaces are used here."""


def check_versions() -> None:
    """Refuse an environment without Megatron, or with releases that may have other interfaces.

    Raises:
        RuntimeError: A package is missing, or is another release.
    """
    remedy = 'install "megatron-core==0.18.0" and "megatron-bridge==0.5.0" there, which need Python 3.12'
    for package, wanted in VERSIONS.items():
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise RuntimeError(f"the environment of training.megatron.python has no {package}: {remedy}") from None
        if not f"{found}.".startswith(f"{wanted}."):
            raise RuntimeError(
                f"the environment of training.megatron.python has {package} {found}, and {wanted} is needed: {remedy}"
            )


class MegatronModel:
    """The model in Megatron's processes; most methods of `TrainEngine` have a counterpart, called by all together.

    Losses are computed by the rank: a pass without gradient gives it log-probabilities, and what comes back are the
    derivatives of the loss by them. Their sum of products with the log-probabilities has the gradient of the loss. All
    passes of an update go through Megatron's schedule at once, so that stages of a pipeline work at the same time.
    """

    def __init__(self, settings: MegatronSettings) -> None:
        """Load the model; the processes have met."""
        from megatron.bridge import AutoBridge

        self._settings = settings
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
        if settings.revision is not None:
            options["revision"] = settings.revision
        self._bridge: Any = AutoBridge.from_hf_pretrained(settings.model, **options)
        self._chunks = self._load()
        self._optimizer: Any = None if settings.optimizer is None else self._make_optimizer(settings.optimizer)

    def _load(self) -> list[Any]:
        """Make this process's part of the model."""
        from megatron.core.distributed import DistributedDataParallelConfig

        settings, provider = self._settings, self._bridge.to_megatron_provider(load_weights=True)
        dtype: torch.dtype = getattr(torch, settings.dtype)
        provider.tensor_model_parallel_size = settings.tp
        provider.pipeline_model_parallel_size = settings.pp
        provider.context_parallel_size = 1
        provider.expert_model_parallel_size = settings.ep
        provider.expert_tensor_parallel_size = 1 if settings.ep > 1 else settings.tp
        provider.sequence_parallel = settings.tp > 1
        provider.variable_seq_lengths = True  # stages of a pipeline tell each other the shape of each pass
        provider.calculate_per_token_loss = True  # gradients are summed and never averaged
        provider.hidden_dropout = provider.attention_dropout = 0.0
        provider.moe_aux_loss_coeff = 0.0
        provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = dtype
        provider.bf16, provider.fp16 = dtype == torch.bfloat16, False
        if settings.recompute:
            provider.recompute_granularity, provider.recompute_method = "full", "uniform"
            provider.recompute_num_layers = 1
        provider.finalize()
        provider.initialize_model_parallel(seed=0)
        is_trained = settings.optimizer is not None
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        chunks: list[Any] = provider.provide_distributed_model(ddp_config=ddp, wrap_with_ddp=is_trained)
        return chunks

    def _make_optimizer(self, settings: dict[str, float]) -> object:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.utils import get_model_config

        is_bfloat16 = self._settings.dtype == "bfloat16"
        config = OptimizerConfig(
            optimizer="adam",
            bf16=is_bfloat16,
            params_dtype=torch.bfloat16 if is_bfloat16 else torch.float32,
            use_distributed_optimizer=False,
            **settings,
        )
        for chunk in self._chunks:
            get_model_config(chunk).finalize_model_grads_func = finalize_model_grads
        return get_megatron_optimizer(config, self._chunks)

    @torch.no_grad()
    def score(self, one: MegatronPass) -> tuple[list[float], list[float]]:
        """Log-probabilities, and entropies if they are asked for, of the scored tokens of a pass."""
        from megatron.core import parallel_state

        for chunk in self._chunks:
            chunk.eval()
        rows = 2 if one.entropy else 1
        results = torch.zeros(rows, len(one.targets), device=self._device)
        for found in self._run([one], None):
            results.copy_(torch.stack(found[:rows]))
        if self._settings.pp > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            group = parallel_state.get_pipeline_model_parallel_group()
            torch.distributed.broadcast(results, src=last, group=group)
        log_probs, *entropies = results.tolist()
        return log_probs, entropies[0] if entropies else []

    def gradient(self, passes: Sequence[MegatronPass], slopes: Sequence[Slope]) -> float:
        """Compute the gradient of an update from nothing; returns its norm."""
        self.discard()
        for chunk in self._chunks:
            chunk.train()
        if passes:
            self._run(passes, slopes)
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def step(self, learning_rate: float) -> None:
        """Clip the gradient and change the weights."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self._optimizer.config.weight_decay * group.get("wd_mult", 1.0)
        is_made, *_ = self._optimizer.step()
        if not is_made:
            raise RuntimeError("Megatron has refused a step whose gradient is finite")
        self.discard()

    def discard(self) -> None:
        """Discard the gradient."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _run(self, passes: Sequence[MegatronPass], slopes: Sequence[Slope] | None) -> list[tuple[Tensor, Tensor]]:
        """Send passes through the pipeline; without slopes, returns what its last stage computes."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        slopes_of: Sequence[Slope | None] = [None] * len(passes) if slopes is None else slopes
        longest = max(len(text) for one in passes for text in one.texts)
        found: list[tuple[Tensor, Tensor]] = get_forward_backward_func()(
            forward_step_func=self._step_forward,
            data_iterator=iter(zip(passes, slopes_of, strict=True)),
            model=self._chunks,
            num_microbatches=len(passes),
            seq_length=self._padded(longest),
            micro_batch_size=max(len(one.texts) for one in passes),
            forward_only=slopes is None,
            collect_non_loss_data=slopes is None,
        )
        return found

    def _padded(self, length: int) -> int:
        """The length of texts that Megatron can divide along `tp`."""
        return -(-length // self._settings.tp) * self._settings.tp

    def _step_forward(self, data: Iterator[tuple[MegatronPass, Slope | None]], model: Any) -> tuple[Tensor, object]:  # noqa: ANN401
        """One pass of a stage, and the function that computes the loss from the output of the last one."""
        one, slope = next(data)
        texts = torch.zeros(len(one.texts), self._padded(max(map(len, one.texts))), dtype=torch.int64)
        for row, text in enumerate(one.texts):
            texts[row, : len(text)] = torch.tensor(text)
        positions = torch.arange(texts.shape[1]).expand_as(texts)
        # Attention is causal, so that what comes after the end of a text changes nothing before it.
        output = model(texts.to(self._device), positions.to(self._device), None)

        def compute(logits: Tensor, *, non_loss_data: bool = False) -> object:
            log_probs, entropies = self._score_tokens(logits, one)
            if non_loss_data:
                return log_probs, entropies
            assert slope is not None
            loss = (torch.tensor(slope.log_probs, device=self._device) * log_probs).sum()
            if slope.entropies:
                loss = loss + (torch.tensor(slope.entropies, device=self._device) * entropies).sum()
            return loss, torch.zeros((), dtype=torch.int, device=self._device), {}

        return output, compute

    def _score_tokens(self, logits: Tensor, one: MegatronPass) -> tuple[Tensor, Tensor]:
        """[R] log-probabilities and [R] entropies from the logits of this process's part of the vocabulary."""
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        at = torch.tensor([one.text, one.place], dtype=torch.int64, device=self._device)
        temperature = torch.tensor(one.temperature, device=self._device)
        chosen = gather_from_tensor_model_parallel_region(logits[at[0], at[1]].float())
        scores = (chosen[:, : self._settings.vocab_size] / temperature.unsqueeze(-1)).log_softmax(-1)
        targets = torch.tensor(one.targets, dtype=torch.int64, device=self._device)
        log_probs = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
        return log_probs, -(scores.exp() * scores).sum(1) if one.entropy else log_probs

    def export(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Each whole weight, or what Adam keeps of it, by its name in `transformers`, on every process."""
        with self._shown(kind), torch.no_grad():
            yield from self._bridge.export_hf_weights(self._chunks, cpu=True, show_progress=False)

    def load(self, kind: str, folder: str) -> None:
        """Take weights, or what Adam keeps of them, from a folder in the format of `transformers`."""
        with self._shown(kind):
            self._bridge.load_hf_weights(self._chunks, folder)

    def loaded(self, num_updates: int) -> None:
        """Note how many updates led to what was loaded."""
        for optimizer in () if self._optimizer is None else _parts(self._optimizer):
            for group in optimizer.param_groups:
                group["step"] = num_updates  # where Adam of Transformer Engine and of Apex count
            for moments in optimizer.state.values():
                if "step" in moments:
                    moments["step"].fill_(num_updates)

    @contextmanager
    def _shown(self, kind: str) -> Iterator[None]:
        """Let modules have the float32 weights, or what Adam keeps of them, in place of what they compute with.

        Names and the division over processes are the same for all of these, so Megatron-Bridge takes them alike. The
        parameters themselves stay as they are: with data of another type they would lose their nodes of autograd, and
        with these the hooks by which Megatron adds up gradients.
        """
        modules = [module for chunk in self._chunks for module in chunk.modules()]
        before = [(module, *one) for module in modules for one in module.named_parameters(recurse=False)]
        moments = {} if self._optimizer is None else _moments(self._optimizer)
        shown: dict[Tensor, nn.Parameter] = {}
        for module, name, own in before:
            if own not in shown:
                master = getattr(own, "main_param", own)
                value = master.data if kind == "weights" else moments[master][kind]
                shown[own] = nn.Parameter(value, requires_grad=False)
                vars(shown[own]).update(vars(own))  # how Megatron has divided it
            module._parameters[name] = shown[own]  # noqa: SLF001
        try:
            yield
        finally:
            for module, name, own in before:
                module._parameters[name] = own  # noqa: SLF001
            for own, value in shown.items():
                if kind == "weights" and value.data_ptr() != own.data_ptr():
                    own.data.copy_(value.data)


def _parts(optimizer: Any) -> Iterator[Any]:  # noqa: ANN401
    """The optimizers of torch's kind that one of Megatron's is made of."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one.optimizer is not None:
            yield one.optimizer


def _moments(optimizer: Any) -> dict[Tensor, dict[str, Tensor]]:  # noqa: ANN401
    """Moments of Adam for each weight, by the float32 weight; zeros before the first update."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one.optimizer is not None:
            one.init_state_fn(one.optimizer, one.config)
    return {weight: moments for part in _parts(optimizer) for weight, moments in part.state.items()}
