"""Logits that a family scales or caps after the head: the plain formulas, their gradients, and where they are read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import transformers
from tests.unit.models.test_compiled_layers import Backend
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from leaderless.distributed.transport import ProcessGroup
from leaderless.models import compiled_layers, fused_scores, scoring
from leaderless.models.causal_lm import CausalLM
from leaderless.models.fused_scores import PLAIN, FusedScores, compile_scores, scores_failure
from leaderless.models.logit_form import LogitForm
from leaderless.models.parallel.reductions import VocabularyPart
from leaderless.models.sampling_support import Support
from leaderless.models.scoring import Entropy, Scoring, score_tokens
from leaderless.models.vision.vision_models import IMPOSSIBLE

ROWS, HIDDEN, VOCABULARY = 23, 12, 30
CHUNK = 4 * VOCABULARY
FORMS = {
    "scale": LogitForm(0.3),
    "cap": LogitForm(softcap=2.5),
    "both": LogitForm(1.7, 4.0),
}
"""Logits of the head are about 3.5 in size, so that a cap bends most of them."""
EVERY_FORM = pytest.mark.parametrize("form", [LogitForm(), *FORMS.values()], ids=["plain", *FORMS])
KERNELS = pytest.mark.parametrize("fused", [None, PLAIN], ids=["plain", "kernels"])
UP, DOWN = torch.linspace(-1, 2, ROWS).double(), torch.linspace(1, -3, ROWS).double()


@pytest.fixture(params=[0, 2, 100], ids=lambda kept: f"{kept} chunks kept")
def num_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of chunks of four tokens that may be kept for the backward pass."""
    monkeypatch.setattr(scoring, "CPU_MAX_LOGITS", CHUNK)
    monkeypatch.setattr(scoring, "MAX_LOGITS", CHUNK * request.param)
    return int(request.param)


def inputs(*, bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)


def naive(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperature: float | Tensor,
    form: LogitForm,
    words: list[list[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """The formula as written, token by token, over all words or some for each token."""
    scores, entropies = [], []
    for row in range(len(hidden)):
        logits = form.scale * head(hidden[row])
        if form.softcap is not None:
            logits = form.softcap * (logits / form.softcap).tanh()
        own = torch.tensor(words[row]) if words else torch.arange(VOCABULARY)
        divisor = temperature[row] if isinstance(temperature, Tensor) else temperature
        log_p = (logits[own] / divisor).log_softmax(0)
        scores.append(log_p[own == targets[row]].squeeze())
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(scores), torch.stack(entropies)


def assert_same(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], entropy: Entropy, wanted: list[Tensor]
) -> None:
    """Compare scores, entropies if there are any, and gradients of a loss of both."""
    torch.testing.assert_close(found[0], expected[0])
    assert len(found[1]) == (0 if entropy == "none" else len(expected[1]))
    if entropy != "none":
        torch.testing.assert_close(found[1], expected[1])
    grads = []
    for scores, entropies in (found, expected):
        loss = (UP * scores).sum()
        if entropy == "gradient":
            loss = loss + (DOWN * entropies).sum()
        grads.append(torch.autograd.grad(loss, wanted))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("num_kept")
@EVERY_FORM
@KERNELS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.75, torch.linspace(0.4, 1.7, ROWS)], ids=["1", "0.75", "of each token"])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_scores_and_gradients_are_those_of_the_plain_formula(
    form: LogitForm, fused: FusedScores | None, *, bias: bool, temperature: float | Tensor, entropy: Entropy
) -> None:
    hidden, head, targets = inputs(bias=bias)
    found = score_tokens(hidden, head, targets, temperature, entropy, how=Scoring(fused=fused, form=form))
    expected = naive(hidden, head, targets, temperature, form)
    assert_same(found, expected, entropy, [hidden, *head.parameters()])


@pytest.mark.usefixtures("num_kept")
@EVERY_FORM
@KERNELS
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_words_that_could_not_be_drawn_stay_so_under_a_cap(
    form: LogitForm, fused: FusedScores | None, entropy: Entropy
) -> None:
    """Most tokens could be a few words, some any."""
    hidden, head, targets = inputs()
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 6, (ROWS,), generator=generator).tolist()
    drawn = [torch.randperm(VOCABULARY, generator=generator)[: max(0, size - 1)].tolist() for size in sizes]
    words = [
        sorted({int(target), *own}) if size else [] for target, own, size in zip(targets, drawn, sizes, strict=True)
    ]
    support = Support(torch.tensor([word for own in words for word in own]), torch.tensor([*map(len, words)]))
    how = Scoring(fused=fused, support=support, form=form)
    every = [own or [*range(VOCABULARY)] for own in words]
    found = score_tokens(hidden, head, targets, 0.5, entropy, how=how)
    expected = naive(hidden, head, targets, 0.5, form, every)
    assert_same(found, expected, entropy, [hidden, *head.parameters()])


@pytest.mark.usefixtures("num_kept")
@EVERY_FORM
@KERNELS
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_marks_of_images_stay_impossible_under_a_cap(
    form: LogitForm, fused: FusedScores | None, entropy: Entropy
) -> None:
    """Models that see images add -1e9 to the logits of some words; capped, these would be words like others."""
    hidden, head, targets = inputs(bias=False)
    marks = {int(word) for word in range(VOCABULARY) if word not in targets.tolist()}
    assert marks
    offsets = torch.zeros(VOCABULARY)
    offsets[sorted(marks)] = IMPOSSIBLE
    others = [[word for word in range(VOCABULARY) if word not in marks]] * ROWS
    how = Scoring(fused=fused, form=form)
    found = score_tokens(hidden, head, targets, 0.75, entropy, offsets=offsets, how=how)
    assert_same(found, naive(hidden, head, targets, 0.75, form, others), entropy, [hidden, head.weight])
    with torch.no_grad():
        probabilities = form.apply(hidden @ head.weight.t() + offsets).softmax(-1)
    assert not probabilities[:, sorted(marks)].any()


@pytest.mark.usefixtures("num_kept")
@KERNELS
@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_an_impossible_target_has_a_gradient_like_others(fused: FusedScores | None, entropy: Entropy) -> None:
    hidden, head, targets = inputs(bias=False)
    offsets = torch.zeros(VOCABULARY)
    offsets[targets[0]] = IMPOSSIBLE
    how = Scoring(fused=fused, form=FORMS["cap"])
    scores, _ = score_tokens(hidden, head, targets, 0.75, entropy, offsets=offsets, how=how)
    assert scores[0] < -1e6
    (grad,) = torch.autograd.grad(scores.sum(), hidden)
    assert grad[0].abs().max() < 10


class Peers:
    """A group of two ranks, each of which is a thread."""

    ranks = (0, 1)

    def __init__(self, rank: int, values: list[Tensor], barrier: Barrier) -> None:
        self.rank, self._values, self._barrier = rank, values, barrier

    def _of_both(self, values: Tensor) -> Tensor:
        self._values[self.rank] = values
        self._barrier.wait()
        both = torch.stack(self._values)
        self._barrier.wait()
        return both

    def sum(self, values: Tensor, what: str, most_ahead: int) -> Tensor:  # noqa: ARG002
        return self._of_both(values).sum(0)

    def max(self, values: Tensor, what: str, most_ahead: int) -> Tensor:  # noqa: ARG002
        return self._of_both(values).amax(0)


@pytest.mark.usefixtures("num_kept")
@EVERY_FORM
@KERNELS
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_ranks_that_divide_the_words_score_as_one_does(
    form: LogitForm, fused: FusedScores | None, entropy: Entropy
) -> None:
    hidden, head, targets = inputs()
    values, barrier, half = [torch.empty(0)] * 2, Barrier(2, timeout=60), VOCABULARY // 2

    def score(rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        own = nn.Linear(HIDDEN, half, dtype=torch.float64)
        words = slice(rank * half, (rank + 1) * half)
        own.weight.data, own.bias.data = head.weight.data[words], head.bias.data[words]
        seen, how = hidden.detach().requires_grad_(), Scoring(fused=fused, form=form)
        part = VocabularyPart(cast("ProcessGroup", Peers(rank, values, barrier)), half)
        scores, entropies = score_tokens(seen, own, targets, 0.75, entropy, part, how=how)
        loss = (UP * scores).sum() + ((DOWN * entropies).sum() if entropy == "gradient" else 0)
        return scores.detach(), entropies.detach(), [*torch.autograd.grad(loss, [seen, *own.parameters()])]

    expected = naive(hidden, head, targets, 0.75, form)
    loss = (UP * expected[0]).sum() + ((DOWN * expected[1]).sum() if entropy == "gradient" else 0)
    by_hidden, by_weight, by_bias = torch.autograd.grad(loss, [hidden, *head.parameters()])
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(score, range(2))]
    for scores, entropies, _ in found:
        torch.testing.assert_close(scores, expected[0])
        if entropy != "none":
            torch.testing.assert_close(entropies, expected[1])
    (first, *mine), (second, *others) = (grads for _, _, grads in found)
    torch.testing.assert_close(first + second, by_hidden)
    for one, other, whole in zip(mine, others, (by_weight, by_bias), strict=True):
        torch.testing.assert_close(torch.cat([one, other]), whole)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_slopes_are_those_of_finite_differences(form: LogitForm) -> None:
    hidden, head, targets = inputs(bias=False)

    def scores(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        own = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
        del own.weight
        own.weight = weight  # type: ignore[assignment]
        return score_tokens(hidden, own, targets[:5], 0.7, "gradient", how=Scoring(form=form))

    weight = head.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(scores, (hidden[:5].detach().clone().requires_grad_(), weight))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_scores_do_not_depend_on_the_chunks(form: LogitForm, entropy: Entropy) -> None:
    hidden, head, targets = inputs(dtype=torch.bfloat16)
    found = []
    for max_logits in (1, 3 * VOCABULARY, 100 * VOCABULARY, None):
        results = score_tokens(hidden, head, targets, 0.75, entropy, how=Scoring(max_logits, form=form))
        found.append((*results, *torch.autograd.grad(results[0].sum(), [hidden, head.weight])))
    for other in found[1:]:
        for place, (value, expected) in enumerate(zip(other, found[0], strict=True)):
            torch.testing.assert_close(value, expected, atol=1e-5 if place < 3 else 0.06, rtol=1e-5)


@EVERY_FORM
@torch.no_grad()
def test_logits_are_those_of_the_formula(form: LogitForm) -> None:
    hidden, head, _ = inputs()
    expected = form.scale * head(hidden)
    if form.softcap is not None:
        expected = form.softcap * (expected / form.softcap).tanh()
    torch.testing.assert_close(form.apply(head(hidden)), expected)


class Operations(TorchDispatchMode):
    """Names of all operations, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.usefixtures("num_kept")
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_a_scale_costs_no_operation_and_no_form_none(entropy: Entropy) -> None:
    hidden, head, targets = inputs()
    found = []
    for form in (LogitForm(), FORMS["scale"], FORMS["cap"]):
        with Operations() as operations:
            scores, _ = score_tokens(hidden, head, targets, 0.75, entropy, how=Scoring(form=form))
            torch.autograd.grad(scores.sum(), [hidden, *head.parameters()])
        found.append(operations.names)
    assert found[0] == found[1]
    assert not any("tanh" in name for name in found[0])
    assert any("tanh" in name for name in found[2])
    logits = torch.randn(3, 4)
    with Operations() as operations:
        assert LogitForm().apply(logits) is logits
    assert operations.names == []


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A compiler that computes graphs as they are."""
    one = Backend()
    monkeypatch.setattr(compiled_layers, "BACKEND", one)
    yield one
    torch._dynamo.reset()


def test_one_graph_fits_chunks_of_a_capped_model(backend: Backend) -> None:
    form = FORMS["both"]
    assert scores_failure(torch.device("cpu"), torch.bfloat16, VOCABULARY, form.steepness) == ""
    num_graphs, fused = backend.num_graphs, compile_scores()
    assert num_graphs == 3
    hidden, head, targets = inputs(bias=False, dtype=torch.bfloat16)
    for rows in (3, 7, 9):
        for entropy in ("value", "gradient"):
            found = []
            for kernels in (fused, None):
                how = Scoring(rows * VOCABULARY, kernels, form=form)
                scores, entropies = score_tokens(hidden, head, targets, 0.75, entropy, how=how)
                torch.autograd.grad(scores.sum() + (entropies.sum() if entropy == "gradient" else 0), [hidden])
                found.append((scores, entropies))
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert backend.num_graphs == num_graphs


def test_a_compiler_that_computes_another_cap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncapped(logits: Tensor, divisor: Tensor, targets: Tensor, _: float | None) -> tuple[Tensor, Tensor, Tensor]:
        return PLAIN.summarize(logits, divisor, targets, None)

    monkeypatch.setattr(fused_scores, "compile_scores", lambda: PLAIN._replace(summarize=uncapped))
    assert scores_failure(torch.device("cpu"), torch.float32, VOCABULARY) == ""
    assert scores_failure(torch.device("cpu"), torch.float32, VOCABULARY, 0.1).startswith("its scores differ by")


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (transformers.LlamaConfig(), LogitForm()),
        (transformers.Gemma2Config(), LogitForm(1.0, 30.0)),
        (transformers.CohereConfig(), LogitForm(0.0625)),
        (transformers.GraniteConfig(logits_scaling=8), LogitForm(0.125)),
        (transformers.PaliGemmaConfig(), LogitForm()),
        (transformers.PaliGemmaConfig(text_config={"model_type": "gemma2"}), LogitForm(1.0, 30.0)),
        (transformers.LlamaConfig(logit_scale=6.0, logits_scaling=2.0, final_logit_softcapping=5), LogitForm(3.0, 5.0)),
    ],
    ids=lambda one: "" if isinstance(one, LogitForm) else one.model_type,
)
def test_a_form_is_read_from_the_description_of_the_text_part(config: PretrainedConfig, form: LogitForm) -> None:
    assert LogitForm.of(config) == form


def test_a_family_that_multiplies_by_what_others_divide_by_is_known() -> None:
    text = SimpleNamespace(model_type="hyperclovax", logits_scaling=4.0)
    described = SimpleNamespace(get_text_config=lambda: text)
    assert LogitForm.of(described) == LogitForm(4.0)
    text.model_type = "granite"
    assert LogitForm.of(described) == LogitForm(0.25)


@pytest.mark.parametrize("value", [0, -3.0, "inv_sqrt_d_model", float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_a_form_that_has_no_meaning_is_refused(name: str, value: object) -> None:
    config = transformers.LlamaConfig(**{name: value})
    with pytest.raises(ValueError, match=f"{name}={value!r} is not supported, only numbers above 0"):
        LogitForm.of(config)


def test_logits_and_scores_of_a_model_have_its_form() -> None:
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=0,
        num_attention_heads=1,
        final_logit_softcapping=2.5,
        pad_token_id=0,
    )
    model = CausalLM(transformers.AutoModelForCausalLM.from_config(config).double())
    hidden, head, targets = inputs(bias=False)
    model.head.weight.data.copy_(head.weight.data)
    with torch.no_grad():
        log_p = model.logits(hidden).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(log_p, naive(hidden, head, targets, 1.0, FORMS["cap"])[0])
