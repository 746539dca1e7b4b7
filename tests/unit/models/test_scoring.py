"""Log-probabilities and entropies by chunks: the plain formulas and their gradients, the logits of few tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.engines import ALONE
from tests.unit.models.test_compiled_layers import Backend
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from leaderless.models import compiled_layers, fused_scores, scoring
from leaderless.models.fused_scores import PLAIN, FusedScores, compile_scores, scores_failure, slope
from leaderless.models.parallel.reductions import VocabularyPart
from leaderless.models.sampling_support import Support
from leaderless.models.scoring import Entropy, Scoring, score_tokens
from leaderless.planner.memory.rank import LARGE_MAX_LOGITS

ROWS, HIDDEN, VOCABULARY = 23, 12, 30
CHUNK = 4 * VOCABULARY


@pytest.fixture(params=[0, 1, 2, 100], ids=lambda kept: f"{kept} chunks kept")
def num_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of chunks of four tokens that may be kept for the backward pass."""
    monkeypatch.setattr(scoring, "CPU_MAX_LOGITS", CHUNK)
    monkeypatch.setattr(scoring, "MAX_LOGITS", CHUNK * request.param)
    return int(request.param)


def inputs(*, bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)


def plain(hidden: Tensor, head: nn.Linear, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(temperature, Tensor):
        temperature = temperature.unsqueeze(1)
    log_p = (head(hidden) / temperature).log_softmax(dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


@pytest.mark.usefixtures("num_kept")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6, torch.linspace(0.4, 1.7, ROWS)], ids=["1", "0.6", "of each token"])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_scores_and_gradients_are_those_of_the_plain_formula(
    bias: bool, temperature: float | Tensor, entropy: Entropy
) -> None:
    hidden, head, targets = inputs(bias=bias)
    up, down = torch.linspace(-1, 2, ROWS).double(), torch.linspace(1, -3, ROWS).double()
    expected = plain(hidden, head, targets, temperature)
    result = score_tokens(hidden, head, targets, temperature, entropy)
    torch.testing.assert_close(result[0], expected[0])
    assert result[1].requires_grad == (entropy == "gradient")
    if entropy == "none":
        assert len(result[1]) == 0
    else:
        torch.testing.assert_close(result[1], expected[1])
    wanted = [hidden, *head.parameters()]
    with_entropy = entropy == "gradient"
    losses = [(up * scores).sum() + with_entropy * (down * h).sum() for scores, h in (expected, result) if len(h)]
    if entropy == "none":
        losses.append((up * result[0]).sum())
    expected_grads, grads = (torch.autograd.grad(loss, wanted) for loss in losses)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def support_of(targets: Tensor) -> Support:
    """A few words for most tokens, among them the targets; all for some."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 6, (ROWS,), generator=generator)
    words = [
        sorted({int(target), *torch.randperm(VOCABULARY, generator=generator)[: size - 1].tolist()}) if size else []
        for target, size in zip(targets, sizes.tolist(), strict=True)
    ]
    return Support(torch.tensor([word for own in words for word in own]), torch.tensor([*map(len, words)]))


def masked(hidden: Tensor, head: nn.Linear, targets: Tensor, temperature: float, support: Support) -> list[Tensor]:
    """The same as a dense softmax over the words of each token, one after the other."""
    ends = support.sizes.cumsum(0).tolist()
    scores, entropies = [], []
    for row, (end, size) in enumerate(zip(ends, support.sizes.tolist(), strict=True)):
        words = support.words[end - size : end] if size else torch.arange(VOCABULARY)
        log_p = (head(hidden[row])[words] / temperature).log_softmax(0)
        scores.append(log_p[words == targets[row]].squeeze())
        entropies.append(-(log_p.exp() * log_p).sum())
    return [torch.stack(scores), torch.stack(entropies)]


@pytest.mark.usefixtures("num_kept")
@pytest.mark.parametrize("fused", [None, PLAIN], ids=["plain", "kernels"])
@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_scores_and_gradients_over_what_could_be_drawn_are_those_of_a_softmax_over_it(
    entropy: Entropy, fused: FusedScores | None
) -> None:
    hidden, head, targets = inputs(bias=True)
    support = support_of(targets)
    up, down = torch.linspace(-1, 2, ROWS).double(), torch.linspace(1, -3, ROWS).double()
    expected = masked(hidden, head, targets, 0.5, support)
    result = score_tokens(hidden, head, targets, 0.5, entropy, how=Scoring(fused=fused, support=support))
    losses = [(up * scores).sum() + (entropy == "gradient") * (down * h).sum() for scores, h in (expected, result)]
    wanted = [hidden, *head.parameters()]
    pairs = zip(*(torch.autograd.grad(loss, wanted) for loss in losses), strict=True)
    for one, other in [*zip(result, expected, strict=True), *pairs]:
        torch.testing.assert_close(one, other)
    everywhere = Support(support.words[:0], torch.zeros_like(support.sizes))
    for one, other in zip(
        score_tokens(hidden, head, targets, 0.5, entropy, how=Scoring(fused=fused, support=everywhere)),
        score_tokens(hidden, head, targets, 0.5, entropy, how=Scoring(fused=fused)),
        strict=True,
    ):
        assert torch.equal(one, other), "all words are as no support"


def test_the_slope_over_what_could_be_drawn_is_that_of_finite_differences() -> None:
    hidden, head, targets = inputs(bias=False)
    some, support = slice(0, 5), support_of(targets)[torch.arange(5)]

    def scores(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        own = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
        del own.weight
        own.weight = weight  # type: ignore[assignment]
        return score_tokens(hidden, own, targets[some], 0.7, "gradient", how=Scoring(support=support))

    weight = head.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(scores, (hidden[some].detach().clone().requires_grad_(), weight))


def test_what_is_held_for_the_backward_pass_is_bounded(num_kept: int) -> None:
    hidden, head, targets = inputs(bias=False)
    held: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        score_tokens(hidden, head, targets, 1.0, "value")
    assert max(held) <= max(head.weight.numel(), CHUNK)
    rest = hidden.numel() + head.weight.numel() + 3 * ROWS
    assert sum(held) == rest + min(num_kept * CHUNK, ROWS * VOCABULARY)


def test_a_frozen_head_lets_the_gradient_through() -> None:
    hidden, head, targets = inputs(bias=True)
    head.requires_grad_(False)
    result, expected = (
        torch.autograd.grad(scores.sum(), hidden)[0]
        for scores in (score_tokens(hidden, head, targets, 1.0, "none")[0], plain(hidden, head, targets, 1.0)[0])
    )
    torch.testing.assert_close(result, expected)


def test_an_unlikely_token_keeps_its_log_probability_and_a_sure_one_its_gradient() -> None:
    """Neither exp(-200) in float32 nor 1 - 1e-4 in bfloat16 exists to take a logarithm or a difference of."""
    head = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[200.0], [0.0]]))
    scores, _ = score_tokens(torch.ones(1, 1), head, torch.tensor([1]), 1.0, "none")
    assert scores.tolist() == [-200.0]
    head = head.to(torch.bfloat16)
    hidden = torch.full((1, 1), 0.046, dtype=torch.bfloat16, requires_grad=True)
    scores, _ = score_tokens(hidden, head, torch.tensor([0]), 1.0, "none")
    (grad,) = torch.autograd.grad(scores.sum(), hidden)
    logit = (hidden * head.weight[0]).float()
    assert grad.item() == pytest.approx(200 * torch.sigmoid(-logit).item(), rel=0.02)


class HeadTraffic(TorchDispatchMode):
    """Counts bytes of tensors of one shape that operations read and write."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.num_bytes = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if not getattr(func, "is_view", False):
            for side in ((args, kwargs), result):  # what is changed in place is read and written
                tensors = {id(leaf): leaf for leaf in pytree.tree_leaves(side) if isinstance(leaf, Tensor)}
                counted = (leaf for leaf in tensors.values() if tuple(leaf.shape) == self.shape)
                self.num_bytes += sum(leaf.nbytes for leaf in counted if leaf.dtype == torch.float32)
        return result


def test_large_chunks_move_the_gradient_of_the_head_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2.5 at 1.5B, with 12,288 scored tokens in a pass; nothing is computed."""
    rows, hidden_size, vocabulary = 12_288, 1536, 151_936
    monkeypatch.setattr(scoring, "_can_write_float32", lambda _: True)
    monkeypatch.setattr(scoring, "_can_add_float32", lambda _: True)
    addmm = torch.addmm

    def in_place(total: Tensor, *factors: Tensor, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert total is out
        assert out_dtype == torch.float32
        return addmm(total, *(factor.float() for factor in factors), out=out)

    monkeypatch.setattr(torch, "addmm", in_place)
    with torch.device("meta"):
        head = nn.Linear(hidden_size, vocabulary, bias=False, dtype=torch.bfloat16)
        hidden = torch.empty(rows, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(rows, dtype=torch.int64)
    gigabytes = []
    for max_logits in (None, LARGE_MAX_LOGITS):
        scores, _ = score_tokens(hidden, head, targets, 1.0, "value", how=Scoring(max_logits))
        with HeadTraffic((vocabulary, hidden_size)) as traffic:
            scores.sum().backward()
        gigabytes.append(traffic.num_bytes / 1e9)
    assert gigabytes[0] > 100
    assert 10 < gigabytes[1] < 17, "eight chunks"


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_scores_do_not_depend_on_the_chunks(entropy: Entropy) -> None:
    hidden, head, targets = inputs(bias=True, dtype=torch.bfloat16)
    found = []
    for max_logits in (1, 3 * VOCABULARY, 100 * VOCABULARY, None):
        results = score_tokens(hidden, head, targets, 0.7, entropy, how=Scoring(max_logits))
        found.append((*results, *torch.autograd.grad(results[0].sum(), [hidden, head.weight])))
    for other in found[1:]:
        for place, (value, expected) in enumerate(zip(other, found[0], strict=True)):
            torch.testing.assert_close(value, expected, atol=1e-5 if place < 3 else 0.06, rtol=1e-5)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A compiler that computes graphs as they are."""
    one = Backend()
    monkeypatch.setattr(compiled_layers, "BACKEND", one)
    yield one
    torch._dynamo.reset()


@pytest.mark.parametrize("temperature", [1.0, torch.linspace(0.4, 1.7, ROWS)], ids=["1", "of each token"])
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("block", [7, 10, 64])
def test_compiled_functions_score_as_the_others_do(
    temperature: float | Tensor, entropy: Entropy, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a block that does not divide the words, and with the last token alone in a chunk."""
    monkeypatch.setattr(fused_scores, "BLOCK", block)
    hidden, head, targets = inputs(bias=True)
    head.weight.data *= 20  # far from each other
    up, down = torch.linspace(-1, 2, ROWS).double(), torch.linspace(1, -3, ROWS).double()
    found = []
    monkeypatch.setattr(scoring, "CPU_MAX_LOGITS", 11 * VOCABULARY)
    monkeypatch.setattr(scoring, "MAX_LOGITS", 11 * VOCABULARY)
    for fused in (PLAIN, None):
        scores, entropies = score_tokens(hidden, head, targets, temperature, entropy, how=Scoring(fused=fused))
        loss = (up * scores).sum() + ((down * entropies).sum() if entropy == "gradient" else 0)
        found.append((scores, entropies, *torch.autograd.grad(loss, [hidden, *head.parameters()])))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_one_graph_fits_chunks_of_any_number_of_tokens(backend: Backend) -> None:
    assert scores_failure(torch.device("cpu"), torch.bfloat16, VOCABULARY) == ""
    num_graphs, fused = backend.num_graphs, compile_scores()
    assert num_graphs == 3
    hidden, head, targets = inputs(bias=False, dtype=torch.float32)
    hidden, head = hidden.detach().to(torch.bfloat16).requires_grad_(), head.to(torch.bfloat16)
    for rows in (3, 7, 9):
        how = Scoring(rows * VOCABULARY, fused)
        for entropy in ("value", "gradient"):
            scores, entropies = score_tokens(hidden, head, targets, 0.7, entropy, how=how)
            (scores.sum() + (entropies.sum() if entropy == "gradient" else 0)).backward()
    assert backend.num_graphs == num_graphs


def test_a_compiler_that_computes_something_else_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = PLAIN._replace(slope=lambda *arguments: slope(*arguments) + 1)
    monkeypatch.setattr(fused_scores, "compile_scores", lambda: wrong)
    assert scores_failure(torch.device("cpu"), torch.float32, VOCABULARY).startswith("its scores differ by 1.0")
    wrong = PLAIN._replace(slope=lambda *arguments: slope(*arguments) * torch.nan)
    monkeypatch.setattr(fused_scores, "compile_scores", lambda: wrong)
    assert scores_failure(torch.device("cpu"), torch.float32, VOCABULARY) == "its scores differ by nan"
    monkeypatch.setattr(fused_scores, "compile_scores", lambda: wrong._replace(summarize=None))
    assert scores_failure(torch.device("cpu"), torch.float32, VOCABULARY).startswith("TypeError")


def test_many_tokens_of_an_accelerator_are_cut_at_multiples_of_the_tiles_of_its_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Qwen2.5 at 1.5B; nothing is computed."""
    with torch.device("meta"):
        head = nn.Linear(8, 151_936, bias=False)
        hidden, targets = torch.empty(15_900, 8), torch.empty(15_900, dtype=torch.int64)
    found, linear = [], scoring.linear_in_float32

    def counted(rows: Tensor, *arguments: Tensor | None) -> Tensor:
        found.append(len(rows))
        return linear(rows, *arguments)

    monkeypatch.setattr(scoring, "linear_in_float32", counted)
    score_tokens(hidden, head, targets, 1.0, "none", how=Scoring(LARGE_MAX_LOGITS))
    assert found == [1664] * 9 + [924]
    found.clear()
    score_tokens(hidden, head, targets, 1.0, "none")
    assert {*found[:-1]} == {220}, "whose multiples would be many more chunks"


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_compiled_functions_know_which_targets_other_ranks_have(entropy: Entropy) -> None:
    """One rank has all of the first words, and nobody the targets beyond."""
    hidden, head, targets = inputs(bias=False)
    found = []
    for fused in (PLAIN, None):
        part = VocabularyPart(ALONE, VOCABULARY)
        beyond = torch.where(targets % 2 == 0, targets, targets + VOCABULARY)
        scores, entropies = score_tokens(hidden, head, beyond, 0.7, entropy, part, how=Scoring(fused=fused))
        loss = scores.sum() + (entropies.sum() if entropy == "gradient" else 0)
        found.append((scores, *torch.autograd.grad(loss, [hidden, head.weight])))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
