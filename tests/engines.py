"""Engines for tests: a driver that needs no other package, and a stand-in for a trainer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tests.tiny import tiny_model
from torch import Tensor

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.remote.child_server import ChildServer
from leaderless.distributed.remote.messages import Ask, Gain, Settings
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import Pool, even_rows
from leaderless.distributed.weights.buckets import LocalStaging, make_buckets
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import end_tokens, load_tokenizer
from leaderless.planner import Layout
from leaderless.rollout.engine import Completion, Request, RolloutEngine, SamplingParams, make_probe
from leaderless.rollout.external.engine import Driver, ExternalEngine
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.sampling import sample_tokens
from leaderless.rollout.weight_sources import Colocated
from leaderless.training.fsdp import FsdpEngine

ALONE = ProcessGroup((0,), 0)
BUCKET_BYTES = 20_000
"""So small that the weights of a tiny model fill several buckets."""
MAX_TOKENS = 512
CACHE_BYTES = 1 << 26
"""Bytes of the KV cache of an engine for a tiny model."""


@dataclass
class CopyDriver:
    """A driver whose engine is a second copy of the model, decoded without a cache. It fails on demand.

    Attributes:
        path: Folder of the model.
        failing: Calls that fail, each as its name and its number from 1.
        max_sequences: Number of sequences decoded at the same time.
        loses: Weight that does not arrive.
        calls: Number of calls, by name.
        is_awake: Whether it is between `wake` and `sleep`.
    """

    path: str
    failing: Collection[tuple[str, int]] = ()
    max_sequences: int = 4
    loses: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    is_awake: bool = False
    _open: dict[int, Ask] = field(default_factory=dict)
    _grown: dict[int, list[int]] = field(default_factory=dict)
    _version: int = -1

    def _called(self, name: str, *, needs_memory: bool = True) -> None:
        self.calls[name] += 1
        assert self.is_awake or not needs_memory, f"{name} while it sleeps"
        if (name, self.calls[name]) in self.failing:
            raise EngineError(f"{name} was to fail")

    def start(self) -> None:
        """Start with meaningless weights."""
        self._called("start", needs_memory=False)
        self.load_from_folder()
        self._forget_weights()

    def load_from_folder(self) -> None:
        """Have the weights of the folder."""
        self._model = load_causal_lm(ModelConfig(path=self.path), "policy").model
        self._model.set_attn_implementation("eager")

    @torch.no_grad()
    def _forget_weights(self) -> None:
        for parameter in self._model.parameters():
            parameter.fill_(0.01)

    def wake(self) -> None:
        self._called("wake", needs_memory=False)
        self.is_awake = True

    def sleep(self, *, keep_weights: bool) -> None:
        self._called("sleep")
        if not keep_weights:
            self._forget_weights()
        self.is_awake = False
        self._open.clear()
        self._grown.clear()

    def load(self, weights: WeightStream) -> None:
        own = dict(self._model.named_parameters())
        for bucket in make_buckets(weights, torch.float32, LocalStaging(torch.device("cpu")), max_bytes=BUCKET_BYTES):
            self._called("load")
            with torch.no_grad():
                for weight in bucket.weights:
                    if weight.name != self.loses:
                        own[weight.name].copy_(weight.view(bucket.data))
        self._version = weights.policy_version
        self._open.clear()
        self._grown.clear()

    @torch.no_grad()
    def _logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[texts, longest, vocabulary] logits; what comes after the end of a text changes nothing before it."""
        longest = max(map(len, texts))
        logits: Tensor = self._model(torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])).logits
        return logits

    def prompt_log_probs(self, tokens: Sequence[int]) -> list[float]:
        self._called("prompt_log_probs")
        scores = self._logits([tokens])[0].log_softmax(-1)[:-1]
        return scores.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1).tolist()

    def submit(self, asks: Sequence[Ask]) -> None:
        self._called("submit")
        self._open |= {ask.id: ask for ask in asks}
        self._grown |= {ask.id: [] for ask in asks}

    def step(self) -> list[Gain]:
        self._called("step")
        assert self._open, "nothing is in progress, so that the answer would be awaited for ever"
        return self.grow(list(self._open.values())[: self.max_sequences])

    def grow(self, asks: Sequence[Ask]) -> list[Gain]:
        """Sample one more token for each response."""
        texts = [[*ask.prompt, *self._grown[ask.id]] for ask in asks]
        rows = zip(asks, self._logits(texts), texts, strict=True) if asks else ()
        return [self._draw(ask, logits[len(text) - 1][None]) for ask, logits, text in rows]

    def _draw(self, ask: Ask, logits: Tensor) -> Gain:
        grown = self._grown[ask.id]
        generator = torch.Generator().manual_seed(ask.seed)
        noise = torch.rand(len(grown) + 1, generator=generator, dtype=torch.float64)[-1:]
        config = SamplingConfig(temperature=ask.temperature, top_p=ask.top_p, top_k=ask.top_k, min_p=ask.min_p)
        token, log_prob = sample_tokens(logits, noise, config)
        grown.append(int(token))
        reason = "stop" if grown[-1] in ask.end_tokens else "length" if len(grown) == ask.max_tokens else None
        if reason:
            del self._open[ask.id]
        return Gain(ask.id, [int(token)], [float(log_prob)], reason, self._version)

    def abort(self, ids: Sequence[int]) -> None:
        self._called("abort")
        for number in ids:
            self._open.pop(number, None)

    def close(self) -> None:
        self.is_awake = False
        self._open.clear()


def make_trainer(path: str, group: ProcessGroup = ALONE) -> FsdpEngine:
    """A frozen trainer, whose weights a test may change."""
    config = ModelConfig(path=path)
    return FsdpEngine(load_causal_lm(config, "policy"), config, group, torch.device("cpu"), 512)


def make_external(driver: Driver, path: str | None = None, messages: list[str] | None = None) -> ExternalEngine:
    """An engine with a driver; its events are recorded."""
    config = ModelConfig(path=path or tiny_model())
    tokenizer = load_tokenizer(config, "policy")
    report, ends = (messages if messages is not None else []).append, end_tokens(config, tokenizer)
    return ExternalEngine("the engine", driver, tokenizer, ends, 1e-3, torch.device("cpu"), report)


def colocated(engine: RolloutEngine, trainer: FsdpEngine) -> Colocated:
    """An engine on the ranks of a trainer; one that is not the native engine is probed, and may be started again."""
    group, is_native = trainer.process_group, isinstance(engine, NativeEngine)
    pool = Pool(Layout(group.ranks, group.size), even_rows)
    probe = [] if is_native else make_probe(trainer.vocab_size, MAX_TOKENS)
    return Colocated(engine, trainer, pool, trainer.compute_dtype, probe=probe, may_restart=not is_native)


def change_weights(trainer: FsdpEngine, seed: int = 0) -> None:
    """Change the weights, as an optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    trainer.policy_version += 1


def sampled_together(
    servings: Mapping[str, Colocated], requests: Sequence[Request], params: SamplingParams
) -> dict[str, list[list[Completion]]]:
    """Responses of several roles, which are in progress at the same time."""
    found = {role: [request.begin() for request in requests] for role in servings}
    with ExitStack() as stack:
        engines = {role: stack.enter_context(serving.phase()) for role, serving in servings.items()}
        places = {
            role: {engine.submit(request, params): place for place, request in enumerate(requests)}
            for role, engine in engines.items()
        }
        while waiting := [role for role in found if not all(one.finish_reason for some in found[role] for one in some)]:
            for role in waiting:
                for delta in engines[role].step():
                    found[role][places[role][delta.request]][delta.sibling].add(delta)
    return found


def expected_log_probs(trainer: FsdpEngine, request: Request, completion: Completion) -> list[float]:
    """Log-probabilities of a response by transformers, with the trainer's weights."""
    model = trainer.model.model
    tokens = torch.tensor([[*request.prompt, *completion.tokens]])
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        scores = model(tokens).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
    model.set_attn_implementation(before)
    return scores.gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1).tolist()


def fake_sglang_python(folder: Path) -> str:
    """An "interpreter" that always runs the fake server."""
    path = folder / "python"
    # Modules stay: to look for garbage among them would take a third of the time of their import.
    program = f"import gc, sys; gc.disable(); sys.path[0] = '{Path(__file__).parents[1]}'; "
    program += "from tests import fake_sglang_arguments as known; known.answer() and sys.exit(); "
    program += "from tests import fake_sglang as fake; gc.freeze(); gc.enable(); fake.main()"
    logs = f'echo "$@" >> {folder}/commands\nexport FAKE_SGLANG_LOG={folder}/calls.jsonl'
    call = f'{logs}\nexec {sys.executable} -c "{program}" "$@"'
    path.write_text(f"#!/bin/sh\n{call}\n")
    path.chmod(0o755)
    return str(path)


def settings_of(path: str, *, max_sequences: int = 4) -> Settings:
    """Settings of an engine for a tiny model, on the CPU."""
    return Settings(path, None, False, "float32", MAX_TOKENS, max_sequences, 0.3, CACHE_BYTES, enable_graphs=False)


def server_of(name: str, folder: Path, *, answer_timeout_s: float = 120.0) -> ChildServer:
    """A server of this process, with its log in a folder."""
    return ChildServer(f"the {name} server", folder / f"{name}.log", 600.0, answer_timeout_s, lambda: None)
