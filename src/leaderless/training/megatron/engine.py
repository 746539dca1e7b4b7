"""The rank's side of the back end `megatron`."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from leaderless.base.devices import own_device_environment
from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.remote.child_server import ChildServer, package_command
from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight, Pool, WeightBlock, everything, shard_rows
from leaderless.distributed.weights.buckets import BUCKET_BYTES, HostStaging, PackedWeight, checksum
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import receive_weights
from leaderless.models.attention.shared_prompts import sequences_of
from leaderless.models.causal_lm import CausalLM, TokenOutputs, empty_causal_lm
from leaderless.models.loading.sharded_loading import fill_buffers
from leaderless.models.loading.weight_sources import form_of, joined
from leaderless.models.logit_form import LogitForm
from leaderless.models.scoring import Entropy
from leaderless.models.uploads import one_copy, placed, read_back
from leaderless.models.vision.vision_models import VisionLM
from leaderless.training.engine import EngineSetup, UpdateInfo
from leaderless.training.forward_passes import BoundedPasses
from leaderless.training.megatron.model import KINDS, MegatronPass, MegatronSettings, Slope
from leaderless.training.megatron.processes import meeting_of, megatron_rank, written
from leaderless.training.micro_batches import MicroBatch
from leaderless.training.optimizers.optimizer import learning_rate_at

SERVER = "leaderless.training.megatron.server"
"""Module that runs in Megatron's interpreter."""


class MegatronEngine(BoundedPasses):
    """A language model whose weights and optimizer are Megatron's; this rank asks for them where it needs them.

    What the passes of an update add to the gradient is collected, and computed in the optimizer step; see
    `MegatronModel`. Of weights that are read, each shard of rows keeps a part, in host memory.
    """

    is_value_model = False

    def __init__(self, setup: EngineSetup, model: CausalLM, server: ChildServer) -> None:
        """Take a server that has loaded the model of a setup; `model` has its names and shapes."""
        super().__init__(setup.process_group, setup.device, setup.micro_batch_tokens)
        self.is_plain = False
        self.policy_version = 0
        self.is_replica = setup.layout.place_in_shard(setup.process_group.rank) > 0
        self._setup, self._server = setup, server
        self._model, self.vocab_size = model, model.vocab_size
        self._shapes = {name: weight.shape for name, weight in self._model.model.named_parameters()}
        self._pool, self._form = Pool(setup.layout, shard_rows), form_of(self._model.model)
        self._passes: list[Json] = []
        self._slopes: list[Json] = []
        self._weights: HeldWeights | None = None
        self._state: dict[str, Tensor] = {}
        self._close = weakref.finalize(self, server.close)

    def log_probs(self, batch: Batch) -> Jagged:
        """Log-probabilities of the sampled tokens, by passes without entropies."""
        return self.scores(batch, lambda micro_batch: self.forward(micro_batch, "none").log_probs)

    def forward(self, micro_batch: MicroBatch, entropy: Entropy = "value") -> TokenOutputs:
        """Score a micro-batch in Megatron's processes; the backward pass records the slopes for the optimizer step."""
        self.process_group.activity.beat()
        one = _texts(micro_batch, has_entropies=entropy != "none")
        log_probs, entropies = cast("Sequence[Sequence[float]]", self._call("score", cast("Json", asdict(one))))
        with one_copy(self.device):
            values = placed(torch.tensor(log_probs), self.device), placed(torch.tensor(entropies), self.device)

        def add(slope: Slope) -> None:
            has_slope = entropy == "gradient"
            self._passes.append(cast("Json", asdict(replace(one, entropy=has_slope))))
            self._slopes.append(cast("Json", asdict(slope if has_slope else replace(slope, entropies=()))))

        if torch.is_grad_enabled():
            anchor = torch.zeros((), device=self.device, requires_grad=True)
            values = cast("tuple[Tensor, Tensor]", _Remote.apply(anchor, *values, add))  # type: ignore[no-untyped-call]
        return TokenOutputs(values[0], values[1].detach() if entropy == "value" else values[1])

    def _call(self, name: str, body: Json) -> Json:
        return self._server.call_numbered(f"/{name}", body)

    def optimizer_step(self, allow: Callable[[float], bool] | None = None) -> UpdateInfo:
        """Send all recorded passes with their slopes, so that Megatron computes the gradient, and makes the step."""
        optimizer = self._setup.optimizer
        assert optimizer is not None
        body: Json = {"passes": self._passes, "slopes": self._slopes}
        grad_norm = cast("float", self._call("gradient", body))
        learning_rate = learning_rate_at(optimizer, self.policy_version, self._setup.num_updates)
        if not self.is_allowed(grad_norm, self.policy_version, allow):
            self.discard_gradient()
            return UpdateInfo(grad_norm, learning_rate, is_made=False)
        self._call("step", {"learning_rate": learning_rate})
        self._forget()
        self.policy_version += 1
        return UpdateInfo(grad_norm, learning_rate)

    def discard_gradient(self) -> None:
        """Forget the recorded passes, here and in Megatron's processes."""
        self._passes, self._slopes = [], []
        self._call("discard", {})

    def _forget(self) -> None:
        """Forget what an update, or a state that is loaded, makes obsolete."""
        self._passes, self._slopes = [], []
        self._weights, self._state = None, {}

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, gathered from the ranks' copies."""
        yield from self._whole(self._held("weights"))

    def _whole(self, held: HeldWeights) -> Iterator[tuple[str, Tensor]]:
        """Each weight whole, gathered from the shards that have its parts."""
        group = self.process_group
        pools = self._pool, Pool(self._setup.layout, everything)
        route = WeightRoute("whole weights", held.shapes, *pools, torch.float32, group.rank, is_gathered=True)
        yield from receive_weights(route, group, group, held)

    def local_weights(self) -> Iterator[LocalWeight]:
        """This rank's part of a copy of Megatron's weights, which is made anew after each update."""
        yield from self._held("weights").weights.values()

    def _held(self, kind: str) -> HeldWeights:
        """This shard's part of every weight, or of what Adam keeps of it."""
        if kind == "weights" and self._weights is not None:
            return self._weights
        parts: dict[str, LocalWeight] = {}
        for name, whole in joined(self._export(kind), self._model.model):
            if (shape := self._shapes.get(name)) is None:
                continue  # a head that is the embedding, too
            if whole.shape != shape:
                raise RuntimeError(
                    f"Megatron's '{name}' has shape {tuple(whole.shape)}, and the model of role '{self._setup.role}' "
                    f"{tuple(shape)}: Megatron-Bridge maps this model wrongly; use another back end"
                )
            block = self._block(name)
            own = whole.narrow(0, block.offsets[0], block.sizes[0]).clone()
            parts[name] = LocalWeight(name, tuple(shape), block, own)
        if missing := self._shapes.keys() - parts.keys():
            raise RuntimeError(
                f"Megatron has no '{sorted(missing)[0]}', which the model of role '{self._setup.role}' has: "
                "Megatron-Bridge does not know this model; use another back end"
            )
        held = HeldWeights.of((parts[name] for name in self._shapes), self.policy_version)
        if kind == "weights":
            self._weights = held
        return held

    def _block(self, name: str) -> WeightBlock:
        """The rows of a weight that are this shard's."""
        return self._pool.block(name, tuple(self._shapes[name]), self.process_group.rank)

    def _export(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Whole weights, or what Adam keeps of them, as Megatron sends them; each is overwritten by the next ones."""
        room = max(BUCKET_BYTES, *(4 * shape.numel() + 16 for shape in self._shapes.values()))
        total = sum(4 * shape.numel() + 16 for shape in self._shapes.values())
        staging = HostStaging()
        try:
            data = staging.room(min(room, 2 * total))
            self._call("export", {"kind": kind})
            while True:
                self.process_group.activity.beat()
                bucket = cast("Mapping[str, Any]", self._call("bucket", {"place": staging.place()}))
                if not bucket["weights"]:
                    return
                if checksum(data[: bucket["bytes"]]) != bucket["checksum"]:
                    raise RuntimeError(f"weights of role '{self._setup.role}' have changed on their way from Megatron")
                for packed in bucket["weights"]:
                    yield packed["name"], PackedWeight(**packed).view(data)
        finally:
            staging.close()

    def weight_shapes(self) -> Mapping[str, torch.Size]:
        """Shape of every weight in `transformers`, not in Megatron."""
        return self._shapes

    def write_description(self, folder: Path) -> None:
        """Write `config.json` and its like, from a model of `transformers` without weights."""
        self._model.write_description(folder)

    def state(self) -> dict[str, Tensor]:
        """A copy of weights and optimizer; Megatron takes over what is written to it in `state_loaded`."""
        self._state = {}
        for kind in KINDS if self._setup.optimizer is not None else KINDS[:1]:
            for name, weight in self._held(kind).weights.items():
                self._state[_key(kind, name)] = self._distributed(weight)
        return self._state

    def _distributed(self, weight: LocalWeight) -> Tensor:
        """A weight as a tensor whose rows the shards divide; on one shard it is whole."""
        if self._setup.layout.dp == 1:
            return weight.local
        group = self._setup.axis_groups["dp"].torch_group
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        strides = torch.empty(weight.shape, device="meta").stride()
        shape = torch.Size(weight.shape)
        return DTensor.from_local(weight.local, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides)

    def state_loaded(self, policy_version: int) -> None:
        """Send Megatron the tensors of `state`, which have been written to."""
        for kind in KINDS if self._setup.optimizer is not None else KINDS[:1]:
            state = {name: self._state[_key(kind, name)] for name in self._shapes}
            own = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in state.items()}
            parts = (LocalWeight(n, tuple(self._shapes[n]), self._block(n), one) for n, one in own.items())
            held = HeldWeights.of(parts, policy_version)
            weights = (saved for one in self._whole(held) for saved in self._form(*one))
            with written(weights, self.write_description, self.process_group) as folder:
                self._call("load", {"kind": kind, "folder": str(folder)})
        self._call("loaded", {"num_updates": policy_version})
        self._forget()
        self.policy_version = policy_version


class _Remote(torch.autograd.Function):
    """Outputs of a pass in another process: the backward pass hands over the derivatives of the loss by them."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        anchor: Tensor,  # noqa: ARG004
        log_probs: Tensor,
        entropies: Tensor,
        add: Callable[[Slope], None],
    ) -> tuple[Tensor, Tensor]:
        ctx.add = add
        return log_probs.clone(), entropies.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[None, ...]:  # noqa: ANN401
        log_probs, entropies = read_back(*slopes)
        ctx.add(Slope(log_probs.tolist(), entropies.tolist()))
        return None, None, None, None


def _key(kind: str, name: str) -> str:
    """The name of a tensor of the state, as with other back ends."""
    return f"weights.{name}" if kind == "weights" else f"optimizer.{kind}.{name}"


def _texts(micro_batch: MicroBatch, *, has_entropies: bool) -> MegatronPass:
    """A micro-batch as texts, from a prompt to the end of a continuation; what several share is computed for each."""
    texts: list[list[int]] = []
    text_of = torch.zeros(len(micro_batch.tokens), dtype=torch.int64)
    for places in sequences_of(micro_batch.families):
        text_of[places] = len(texts)  # any of several predicts what follows the tokens that they share
        texts.append(micro_batch.tokens[places].tolist())
    return MegatronPass(
        texts=texts,
        text=text_of[micro_batch.select].tolist(),
        place=micro_batch.positions[micro_batch.select].tolist(),
        targets=micro_batch.targets.tolist(),
        temperature=t.tolist() if isinstance(t := micro_batch.temperature, Tensor) else t,
        entropy=has_entropies,
    )


def make_engine(setup: EngineSetup) -> MegatronEngine:
    """Start Megatron next to each rank, and let it load the model. All ranks of the layout call it together.

    Raises:
        RecipeError: There is no such interpreter, or Megatron cannot have such a model.
        EngineError: Megatron cannot be started, or cannot load the model.
    """
    key, apart = "training.megatron.python", setup.apart
    if apart is None or shutil.which(apart.python) is None:
        reason = "is not given" if apart is None else f"'{apart.python}' is not a program on this machine"
        raise RecipeError.at(key, f"{reason}: name the interpreter of an environment with Megatron-Bridge")
    model, rank = empty_causal_lm(setup.model, setup.role), setup.process_group.rank
    fill_buffers(model, setup.model, setup.role)
    if isinstance(model, VisionLM):
        raise RecipeError.at(f"models.{setup.role}", "a model that sees images cannot be in Megatron yet: use fsdp")
    if model.logit_form != LogitForm():
        raise RecipeError.at(
            f"models.{setup.role}",
            f"a model of type {model.model.config.model_type} scales or caps its logits, and cannot be in Megatron "
            "yet: use fsdp",
        )
    if not model.is_plain:
        raise RecipeError.at(
            f"models.{setup.role}",
            f"layers of type {model.model.config.model_type} with windows, sinks or a recurrence were not compared in "
            "Megatron: use fsdp",
        )
    meeting = meeting_of(setup.layout, setup.process_group)
    settings = settings_of(setup, model.vocab_size, meeting, apart.answer_timeout_s)
    log = apart.logs / f"megatron-{setup.role}-rank-{rank}.log"
    title, beat = f"rank {rank}: Megatron with role '{setup.role}'", setup.process_group.activity.beat
    server = ChildServer(title, log, apart.start_timeout_s, apart.answer_timeout_s, beat, "training.megatron")
    server.prepare()
    greeting = {"port": server.port, "token": server.token, "settings": asdict(settings)}
    command = package_command(apart.python, SERVER)
    server.start(command, json.dumps(greeting), own_device_environment(setup.device))
    return MegatronEngine(setup, model, server)


def settings_of(setup: EngineSetup, vocab_size: int, meeting: str, timeout_s: float) -> MegatronSettings:
    """The settings of this rank's Megatron process; the other arguments are as in `MegatronSettings`."""
    layout, optimizer = setup.layout, setup.optimizer
    adam = None
    if optimizer is not None:
        adam = {
            "lr": optimizer.peak,
            "weight_decay": optimizer.weight_decay,
            "adam_beta1": optimizer.beta1,
            "adam_beta2": optimizer.beta2,
            "adam_eps": optimizer.epsilon,
            "clip_grad": optimizer.max_grad_norm,
        }
    return MegatronSettings(
        model=setup.model.path,
        revision=setup.model.revision,
        trust_remote_code=setup.model.trust_remote_code,
        dtype=setup.model.compute_dtype,
        recompute=setup.model.gradient_checkpointing,
        vocab_size=vocab_size,
        rank=megatron_rank(layout, setup.process_group.rank),
        world_size=len(layout.ranks),
        meeting=meeting,
        timeout_s=timeout_s,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        optimizer=adam,
    )
