"""What the host must not wait for on a GPU, and what it gets from there a step later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests import fake_accelerator as fake
from tests.gpu.test_paged import DEVICE, NUM_GPUS, PARAMS, REQUESTS, engine_in_pages
from tests.tiny import mixture_model, tiny_model

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.routers import Routers
from leaderless.rollout.engine import generate
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.sampling import truncate

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="this machine has no CUDA device")
KINDS = {
    "policy": torch.bfloat16,
    "critic": torch.float32,
    "adapters with dropout": torch.bfloat16,
    "recorded experts": torch.bfloat16,
    "images, qwen3_vl": torch.float32,
    "images, paligemma": torch.float32,
}
"""Updates with the type of their weights, which pixels and the head of a critic do not have by themselves."""


@contextmanager
def no_waits() -> Iterator[None]:
    """Fail where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_of_an_update_waits_for_nothing_on_cuda(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import fake_updates  # it writes models when it is imported

    monkeypatch.setattr(fake, "DEVICE", torch.device("cuda", 0))
    monkeypatch.setattr(fake_updates, "DTYPE", KINDS[kind])
    (make, batch), *_ = [(make, batch) for name, make, batch in fake_updates.kinds() if name == kind]
    engine = make()
    one, *_ = engine.micro_batches(batch)
    with fake.varlen_attention(is_used=KINDS[kind] == torch.bfloat16):
        fake_updates.scored(engine.forward(one)).backward()  # what is tried once
        torch.cuda.synchronize()
        with no_waits():
            fake_updates.scored(engine.forward(one)).backward()
    torch.cuda.synchronize()


def test_pages_record_the_experts_of_slots_on_cuda() -> None:
    path = mixture_model(tiny_model("qwen3"))
    config = ModelConfig(path=path)
    model = load_causal_lm(config, "policy").to(DEVICE).eval()
    routers = Routers.required(model, "models.policy")
    slots = NativeEngine(model, load_tokenizer(config, "policy"), frozenset(), 20, DEVICE, routers=routers)
    expected, found = (
        [[(one.tokens, one.experts) for one in group] for group in generate(engine, REQUESTS, PARAMS)]
        for engine in (slots, engine_in_pages(path, records=True))
    )
    assert found == expected


@pytest.mark.parametrize("way", [{"top_k": 50, "top_p": 0.95}, {"top_k": 1000}, {"min_p": 0.02}], ids=str)
def test_truncation_is_recorded_and_keeps_what_it_keeps_on_the_cpu(way: dict[str, float]) -> None:
    config = SamplingConfig.model_validate(way)
    generator = torch.Generator().manual_seed(0)
    many = [(8 * torch.randn(16, 20_000, generator=generator)).round() / 4 for _ in range(2)]  # with ties
    logits = many[0].cuda()
    for _ in range(2):
        truncate(logits, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = truncate(logits, config)
    for one in many:
        logits.copy_(one)
        graph.replay()
        # Sums round otherwise, so that a token at a bound may be on its other side.
        differs = (kept.cpu().isfinite() != truncate(one, config).isfinite()).sum(1)
        assert int(differs.max()) <= (1 if config.top_p < 1 or config.min_p > 0 else 0)
