"""Products of matrices: whatever library runs them, the numbers are those of float64 to rounding."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from gradfilter.ops import matmul
from gradfilter.ops.matmul import product, transposed_product


def draw(random: Random, rows: int, columns: int) -> Tensor:
    """A matrix of one of the layouts that maps and kernels come in."""
    made = [
        torch.randn(rows, columns),
        torch.randn(columns, rows).t(),
        torch.randn(rows, columns + 3)[:, 1:-2],
    ]
    return random.choice(made)


def products(random: Random, spoil: float) -> tuple[Tensor, Tensor]:
    m, k, n = (random.choice([1, 2, 7, 48, 130, 400]) for _ in range(3))
    a, b = draw(random, m, k), draw(random, k, n)
    bias = torch.randn(n) if random.random() < 0.5 else None
    wanted = a.double() @ b.double() + (0.0 if bias is None else bias.double())
    return product(a, b, None if bias is None else bias + spoil), wanted


def transposed(random: Random, spoil: float) -> tuple[Tensor, Tensor]:
    m = random.choice([1, 8, 49, 128, 392, 1568, 3001])
    a, b = (
        torch.randn(m, random.choice([1, 5, 16, 64, 150])),
        torch.randn(m, random.choice([1, 9, 16, 40, 200])),
    )
    return transposed_product(a, b + spoil), a.double().t() @ b.double()


def errors(make: Callable[[Random, float], tuple[Tensor, Tensor]], spoil: float = 0.0) -> list[float]:
    random = Random(0)  # noqa: S311  shapes, not secrets
    torch.manual_seed(0)
    found = []
    for _ in range(150):
        made, wanted = make(random, spoil)
        assert made.shape == wanted.shape
        found.append(float((made - wanted).abs().max() / wanted.abs().max()))
    return found


@pytest.mark.parametrize("make", [products, transposed])
def test_equals_float64(make: Callable[[Random, float], tuple[Tensor, Tensor]]) -> None:
    assert max(errors(make)) < 5e-6


@pytest.mark.parametrize("make", [products, transposed])
def test_comparison_notices_a_mistake(make: Callable[[Random, float], tuple[Tensor, Tensor]]) -> None:
    assert sum(error > 5e-6 for error in errors(make, spoil=0.01)) > 50


def test_other_types_and_machines_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(100, 80), torch.randn(80, 90)
    torch.testing.assert_close(product(a.double(), b.double()), a.double() @ b.double())
    assert product(a.bfloat16(), b.bfloat16()).dtype == torch.bfloat16
    monkeypatch.setattr(matmul, "_has_wide_onednn", lambda: False)
    assert torch.equal(product(a, b), a @ b)
    assert torch.equal(transposed_product(a, a), a.t() @ a)
