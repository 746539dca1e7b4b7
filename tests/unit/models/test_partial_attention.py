"""Attention to some of the keys, with gradients, in matrix products and by the kernels of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from leaderless.models.attention import some_keys
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.some_keys import (
    attend_by_products,
    attend_some,
    gradients_by_products,
    gradients_of_some,
)

Attend = Callable[..., tuple[Tensor, Tensor]]


@pytest.mark.parametrize(
    ("attend", "gradients"), [(attend_by_products, gradients_by_products), (attend_some, gradients_of_some)]
)
def test_two_halves_of_the_keys_are_joined_into_the_whole_with_its_gradients(
    attend: Attend, gradients: Callable[..., tuple[Tensor, ...]]
) -> None:
    torch.manual_seed(0)
    query, grad = (torch.randn(2, 4, 10, 8, requires_grad=not index) for index in range(2))
    key, value = (torch.randn(2, 2, 20, 8, requires_grad=True) for _ in range(2))
    mask = torch.cat([torch.ones(10, 10, dtype=torch.bool), torch.ones(10, 10, dtype=torch.bool).tril()], 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    expected.backward(grad)
    form, halves = AttentionForm(0.3), {False: slice(0, 10), True: slice(10, 20)}
    with torch.no_grad(), patch.object(some_keys, "BLOCK_SCORES", 300):  # blocks of three queries
        parts = [
            attend(form, query, key[:, :, keys], value[:, :, keys], is_causal=is_causal)
            for is_causal, keys in halves.items()
        ]
        whole = torch.logaddexp(parts[0][1], parts[1][1])
        output = sum(part * (normalizers - whole).exp().unsqueeze(3) for part, normalizers in parts)
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
        of_query = torch.zeros_like(query)
        for is_causal, keys in halves.items():
            whole_of = grad, query, key[:, :, keys], value[:, :, keys], output, whole
            found = gradients(form, *whole_of, is_causal=is_causal)
            of_query += found[0]
            assert key.grad is not None
            assert value.grad is not None
            torch.testing.assert_close(found[1], key.grad[:, :, keys], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(found[2], value.grad[:, :, keys], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(of_query, query.grad, atol=1e-6, rtol=1e-5)
