"""Log-probabilities and entropies of given tokens, without holding the logits of many tokens at a time.

Between the forward and the backward pass each token keeps one number, the normalizer of its logits. From it and from
the hidden state the backward pass recomputes the probabilities, chunk by chunk, for the price of one more product with
the head. As many of the first chunks as fit into a fixed amount of memory are kept and not recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear

from leaderless.models.fused_scores import FusedScores
from leaderless.models.logit_form import LogitForm, damping, squashed
from leaderless.models.parallel.reductions import VocabularyPart
from leaderless.models.sampling_support import Limits, Support
from leaderless.planner.memory.limits import CPU_MAX_LOGITS, MAX_LOGITS

Entropy = Literal["none", "value", "gradient"]
"""Whether entropies are computed, and whether the loss depends on them."""


TILE_ROWS = 128
"""Rows that kernels for products compute together."""
MANY_ROWS = 8 * TILE_ROWS
"""Rows of a chunk from which on they are a multiple of `TILE_ROWS`: with fewer, it would take many more chunks."""


class Scoring(NamedTuple):
    """How much is computed at a time, and by what; and of which words.

    Attributes:
        max_logits: Most logits of a chunk, and most probabilities that are kept; `MAX_LOGITS` without it.
        fused: Compiled functions; None to compute as it is.
        support: Words that tokens could be drawn as, which alone have probabilities; None for all.
        form: Change of logits after the head.
    """

    max_logits: int | None = None
    fused: FusedScores | None = None
    support: Support | None = None
    form: LogitForm = LogitForm()


class _Settings(NamedTuple):
    """How tokens are scored."""

    temperature: float | Tensor  # for all tokens, or [R] float32, over the height of the form of logits
    entropy: Entropy
    is_training: bool  # whether a backward pass may follow
    rows: int  # tokens of one chunk
    num_kept: int  # chunks that are kept for the backward pass
    part: VocabularyPart | None  # words that this rank has; all without it
    are_here: Tensor | None  # [R] whether it has the targets
    fused: FusedScores | None  # then the temperature is [R]
    limits: Limits | None  # words that tokens could be drawn as; all without it
    steepness: float | None  # factor of logits in a hyperbolic tangent; None without a cap

    def chunks(self, count: int) -> Iterator[slice]:
        """Give the tokens of each chunk."""
        for first in range(0, count, self.rows):
            yield slice(first, min(first + self.rows, count))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: slice) -> Tensor:
        """[rows, vocabulary] logits of a chunk, as the head gives them."""
        logits = linear_in_float32(hidden[chunk], weight, bias)
        if self.limits is not None:
            self.limits.apply(logits, chunk)
        return logits

    def squashed(self, logits: Tensor) -> Tensor:
        """The hyperbolic tangents of logits that are capped, or else the logits."""
        return logits if self.steepness is None else squashed(logits, self.steepness)

    def damping(self, squash: Tensor) -> Tensor | None:
        """The derivative of what `squashed` gives; None without a cap."""
        return None if self.steepness is None else damping(squash, self.steepness)

    def divisor(self, chunk: slice) -> float | Tensor:
        """The temperature of the tokens of a chunk, one number or [rows]."""
        return self.temperature[chunk] if isinstance(self.temperature, Tensor) else self.temperature

    def kernels(self, chunk: slice) -> FusedScores | None:
        """The compiled functions for a chunk; none for a single token, for which they would be compiled once more."""
        return self.fused if chunk.stop - chunk.start > 1 else None

    def slope(self, probabilities: Tensor, targets: Tensor, chunk: slice) -> Tensor:
        """Take 1 from the probability of each target, in place and before anything is rounded to bfloat16."""
        target = targets[chunk].unsqueeze(1)
        taken = probabilities.new_full(target.shape, -1.0)
        return probabilities.scatter_add_(1, target, taken if self.are_here is None else taken * self.here(chunk))

    def here(self, chunk: slice) -> Tensor:
        """[rows, 1] 1 where this rank has the target of a token of a chunk, and else 0."""
        assert self.are_here is not None
        return self.are_here[chunk].unsqueeze(1)


def score_tokens(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperature: float | Tensor,
    entropy: Entropy,
    part: VocabularyPart | None = None,
    offsets: Tensor | None = None,
    how: Scoring = Scoring(),  # noqa: B008 - it cannot be changed
) -> tuple[Tensor, Tensor]:
    """Compute [R] log-probabilities of tokens, and [R] entropies of the distributions they were drawn from.

    The tokens, targets [R] int64, are predicted at the hidden states [R, hidden_size]. There is one temperature for all
    tokens, or [R] float32, above 0. Results are at least float32; without entropies the latter are [0]. Where the head
    has a part of the words only, so has each of the ranks with the others, and together they compute the same results.
    A gradient of the hidden states is an addend of each rank then. To the logits, offsets [vocabulary] may be added in
    place of a bias of the head. The gradient of the head is read and written once for each chunk.

    The form of logits costs nothing without a soft cap: its scale divides temperatures. With a cap c, logits are
    c tanh(scale * z / c) of the head's logits z, and slopes with respect to z are multiplied by the derivative of that.
    """
    vocabulary = head.weight.shape[0]
    # Where weights are converted to float32 for each chunk, large chunks are the faster ones.
    is_small = hidden.device.type == "cpu" and hidden.dtype.itemsize >= 4
    most = MAX_LOGITS if how.max_logits is None else how.max_logits
    rows = max(1, (CPU_MAX_LOGITS if is_small else most) // vocabulary)
    if hidden.device.type != "cpu" and rows >= MANY_ROWS:
        rows -= rows % TILE_ROWS
    if how.fused is not None and not isinstance(temperature, Tensor):
        temperature = hidden.new_full((len(hidden),), temperature, dtype=torch.float32)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(torch.promote_types(hidden.dtype, torch.float32))
    if how.form.height != 1:
        temperature = temperature / how.form.height
    is_training = torch.is_grad_enabled()
    num_kept = most // (rows * vocabulary) if is_training and entropy != "gradient" else 0
    are_here = None
    if part is not None:
        targets, are_here = part.locate(targets)
    limits = None if how.support is None else how.support.limits(part, hidden.device)
    bias = head.bias if offsets is None else offsets.to(torch.promote_types(hidden.dtype, torch.float32))
    chunks = temperature, entropy, is_training, rows, num_kept
    settings = _Settings(*chunks, part, are_here, how.fused, limits, how.form.steepness)
    log_probs, entropies = _Scores.apply(hidden, head.weight, bias, targets, settings)  # type: ignore[no-untyped-call]
    return log_probs, entropies


class _Context(FunctionCtx):
    """Everything the backward pass needs from the forward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    bias: Tensor | None
    settings: _Settings


class _Scores(torch.autograd.Function):
    """Log-probabilities and entropies by chunks.

    With z = logits / temperature, p = softmax(z) and H the entropy, d log p_t / dz = 1_t - p and
    dH / dz = -p (log p + H). In the code, `slope` is p - 1_t, the negative of the former. Where logits are capped, z is
    a hyperbolic tangent / temperature, and slopes contain its derivative with respect to the head's logits.
    """

    @staticmethod
    def forward(
        ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs, normalizers = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2))
        entropies = torch.empty_like(log_probs[:0] if settings.entropy == "none" else log_probs)
        kept: list[Tensor] = []
        for chunk in settings.chunks(len(hidden)):
            target, part, fused = targets[chunk].unsqueeze(1), settings.part, settings.kernels(chunk)
            logits = settings.logits(hidden, weight, bias, chunk)
            if part is None and fused is not None:
                divisor = cast("Tensor", settings.divisor(chunk)).unsqueeze(1)
                found = fused.summarize(logits, divisor, target, settings.steepness)
                log_probs[chunk], normalizers[chunk], found_entropies = found
                if settings.entropy != "none":
                    entropies[chunk] = found_entropies
                if len(kept) < settings.num_kept:
                    common = logits, divisor, target, normalizers[chunk].unsqueeze(1)
                    kept.append(fused.slope(*common, hidden.dtype, settings.steepness))
                continue
            is_kept = len(kept) < settings.num_kept
            logits = settings.squashed(logits)
            damped_by = settings.damping(logits) if is_kept else None
            logits = _scaled(logits, settings, chunk)
            if part is None:
                probabilities, normalizers[chunk], target_logits = _softmax(logits, target)
            else:
                probabilities, normalizers[chunk], target_logits = part.softmax(logits, target, settings.here(chunk))
            log_probs[chunk] = target_logits - normalizers[chunk]
            if settings.entropy != "none":
                mean_logit = (torch.linalg.vecdot if part is None else part.mean)(probabilities, logits)
                entropies[chunk] = normalizers[chunk] - mean_logit
            if is_kept:
                slope = settings.slope(probabilities, targets, chunk)
                kept.append(_damped(slope, damped_by).to(hidden.dtype))
        if settings.entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        if settings.is_training:
            ctx.save_for_backward(hidden, weight, targets, normalizers, entropies, *kept)
            ctx.bias, ctx.settings = bias, settings
        return log_probs, entropies

    @staticmethod
    def backward(
        ctx: _Context, grad_log_probs: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, normalizers, entropies, *kept = ctx.saved_tensors
        settings, dtype = ctx.settings, normalizers.dtype
        grad_hidden = torch.empty_like(hidden)
        # Sums over many tokens, in bfloat16 too, need the precision of float32.
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if ctx.bias is not None and ctx.needs_input_grad[2]:
            grad_bias = torch.zeros_like(ctx.bias, dtype=dtype)
        for number, chunk in enumerate(settings.chunks(len(hidden))):
            divisor = settings.divisor(chunk)
            factor = grad_log_probs[chunk] / -divisor
            if settings.entropy == "gradient":
                factor = torch.zeros_like(factor) - 1 / divisor
            if number < len(kept):
                slope = kept[number]
            else:
                logits = settings.logits(hidden, weight, ctx.bias, chunk)
                of_tokens = _OfTokens(targets, normalizers, entropies, grad_log_probs, grad_entropies)
                slope = _slope(logits, of_tokens, settings, chunk, hidden.dtype)
            factors = factor.to(hidden.dtype).unsqueeze(1)
            torch.mul(slope @ weight, factors, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight, slope.t(), hidden[chunk] * factors)
            if grad_bias is not None:
                grad_bias += (slope.t() @ factors).squeeze(1)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )


class _OfTokens(NamedTuple):
    """Values besides logits on which slopes of tokens depend, [R] each; of entropies only if the loss does."""

    targets: Tensor
    normalizers: Tensor
    entropies: Tensor
    grad_log_probs: Tensor
    grad_entropies: Tensor


def _slope(logits: Tensor, whole: _OfTokens, settings: _Settings, chunk: slice, dtype: torch.dtype) -> Tensor:
    """The slope of a chunk, [rows, vocabulary], from logits that it may overwrite; with a gradient, also of entropies.

    Where the loss depends on entropies, it is multiplied by the gradients of both.
    """
    has_bend, fused = settings.entropy == "gradient", settings.kernels(chunk)
    own = _OfTokens(*(one[chunk].unsqueeze(1) if has_bend or place < 2 else one for place, one in enumerate(whole)))
    if fused is not None:
        divisor, targets = cast("Tensor", settings.divisor(chunk)).unsqueeze(1), own.targets
        if settings.are_here is not None:
            targets = targets.where(settings.here(chunk) > 0, -1)
        common = logits, divisor, targets, own.normalizers
        how = dtype, settings.steepness
        return fused.bent_slope(*common, *own[2:], *how) if has_bend else fused.slope(*common, *how)
    logits = settings.squashed(logits)
    damped_by = settings.damping(logits)
    log_p = _scaled(logits, settings, chunk).sub_(own.normalizers)
    if not has_bend:
        return _damped(settings.slope(log_p.exp_(), whole.targets, chunk), damped_by).to(dtype)
    slope, bend = log_p.exp(), log_p.add_(own.entropies)
    bend.mul_(slope).mul_(own.grad_entropies)
    slope = settings.slope(slope, whole.targets, chunk).mul_(own.grad_log_probs).add_(bend)
    return _damped(slope, damped_by).to(dtype)


def _damped(slope: Tensor, damped_by: Tensor | None) -> Tensor:
    """Multiply slopes by the derivative of a soft cap, in place; leave them as they are without one."""
    return slope if damped_by is None else slope.mul_(damped_by)


def _scaled(logits: Tensor, settings: _Settings, chunk: slice) -> Tensor:
    """Divide logits by temperatures, in place."""
    divisor = settings.divisor(chunk)
    if isinstance(divisor, Tensor):
        return logits.div_(divisor.unsqueeze(1))
    return logits if divisor == 1 else logits.div_(divisor)


def _softmax(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, the normalizers of the logits and the logits of the targets, [n, 1]."""
    probabilities = logits.softmax(dim=-1)
    # The probability of the likeliest token is never rounded to 0.
    normalizers = logits.amax(dim=-1) - probabilities.amax(dim=-1).log()
    return probabilities, normalizers, logits.gather(1, targets).squeeze(1)


BLOCK = 128
"""Outputs of one block."""
LARGE = 1 << 18
"""Smallest number of weights for which blocks are worth it."""
FEW = 256
"""Largest number of rows for which blocks are worth it."""
WIDENED = 1 << 24
"""Most weights that are converted to float32 at a time, where the device cannot write float32 itself."""


def linear_for_few(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute what `torch.nn.functional.linear` computes, up to the order of sums.

    BLAS libraries give each thread some rows of such a product. With few rows a thread has little to do besides reading
    the whole matrix. As a batch of products with blocks of the matrix, each thread gets blocks instead, and the product
    is up to three times as fast on a CPU. Rows are [n, inputs], the weight is [outputs, inputs], the bias [outputs].
    """
    outputs, inputs = weight.shape
    whole = outputs - outputs % BLOCK
    if not (
        rows.device.type == "cpu"
        and len(rows) <= FEW
        and whole * inputs >= LARGE
        and rows.dtype in {torch.float32, torch.float64}
        and weight.is_contiguous()
    ):
        return linear(rows, weight, bias)
    blocks = weight[:whole].view(-1, BLOCK, inputs).transpose(1, 2)
    products = torch.bmm(rows.expand(len(blocks), -1, -1), blocks).transpose(0, 1).reshape(len(rows), whole)
    if whole < outputs:
        products = torch.cat([products, linear(rows, weight[whole:])], dim=1)
    return products if bias is None else products.add_(bias)


def linear_in_float32(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer of [n, inputs] in at least float32. Without a gradient for half precision.

    Rounded to bfloat16, a logit between 16 and 32 would become a multiple of 0.125.
    """
    if rows.dtype.itemsize >= 4:
        return linear_for_few(rows, weight, bias)
    if _can_write_float32(rows.device.type):
        products = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:
        products = torch.empty(len(rows), len(weight), device=rows.device)
        size, wide = max(1, WIDENED // weight.shape[1]), rows.float()
        for part, columns in zip(torch.split(weight, size), torch.split(products, size, dim=1), strict=True):
            columns.copy_(wide @ part.float().t())
    return products if bias is None else products.add_(bias)


def bmm_in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [b, n, k] and [b, k, m] into at least float32. Without a gradient for half precision."""
    if left.dtype.itemsize >= 4:
        return torch.bmm(left, right)
    if _can_write_float32(left.device.type):
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of [n, k] and [k, m] to a total, [n, m], in place, and in one kernel where there is one.

    To a total in float32, an accelerator adds products of half precision that are not rounded to it.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _can_add_float32(total.device.type):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif _can_write_float32(total.device.type):
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total += left @ right


@cache
def _can_write_float32(device_type: str) -> bool:
    """Try whether kernels on a device multiply bfloat16 matrices and write float32."""
    if device_type == "cpu":
        return False
    matrix = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
    try:
        torch.mm(matrix, matrix, out_dtype=torch.float32)
        torch.bmm(matrix[None], matrix[None], out_dtype=torch.float32)
    except RuntimeError:  # not there for this kind of device, or this library
        return False
    return True


@cache
def _can_add_float32(device_type: str) -> bool:
    """Try whether a kernel on a device multiplies bfloat16 matrices and adds them to float32, in place."""
    if not _can_write_float32(device_type):
        return False
    matrix, total = (torch.full((16, 16), one, device=device_type) for one in (1.0, 2.0**-10))
    matrix = matrix.to(torch.bfloat16)
    try:
        torch.addmm(total, matrix, matrix, out_dtype=torch.float32, out=total)
        return bool((total == 16 + 2.0**-10).all())  # in bfloat16 the sum would be 16
    except (RuntimeError, TypeError):  # as above, or the total has to be bfloat16, as in torch 2.8
        return False
