"""Linear layers of accelerated models: as torch's but for rounding, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import fusion
from gradfilter.ops import matmul
from gradfilter.ops.linear import linear


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def results(run: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seed: Tensor) -> list[Tensor]:
    own = [nn.Parameter(t.detach().clone()) for t in (weight, bias) if t is not None]
    inputs = [x.detach().clone().requires_grad_(), *own]
    made = run(*inputs, *([None] if bias is None else []))
    return [made.detach(), *torch.autograd.grad(made, inputs, seed)]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("count", "inputs", "outputs"), [(1, 3, 2), (0, 3, 2), (32, 1280, 10), (5, 512, 1), (16, 40, 300)]
)
def test_results_and_gradients_are_those_of_float64(
    count: int, inputs: int, outputs: int, has_bias: bool
) -> None:
    torch.manual_seed(0)
    x, weight, seed = torch.randn(count, inputs), torch.randn(outputs, inputs), torch.randn(count, outputs)
    bias = torch.randn(outputs) if has_bias else None
    exact = (None if t is None else t.double() for t in (x, weight, bias, seed))
    wanted = results(F.linear, *exact)  # type: ignore[arg-type]
    for found, true in zip(results(linear, x, weight, bias, seed), wanted, strict=True):
        assert torch.allclose(found.double(), true, rtol=1e-5, atol=1e-4)
    scaled = results(lambda *a: linear(*a) * 1.01, x, weight, bias, seed)
    assert not count or not torch.allclose(scaled[0].double(), wanted[0], rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not matmul._has_wide_onednn(), reason="products are MKL's on this processor")
def test_bits_do_not_depend_on_threads(threads: Any) -> None:
    """torch's own do, for some of these sizes on some processors."""
    torch.manual_seed(0)
    sizes = ((16, 1280, 10), (32, 1280, 10), (32, 1280, 37), (64, 1280, 100), (39, 1280, 3), (8, 40, 1280))
    for count, inputs, outputs in sizes:
        x, weight, bias = torch.randn(count, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        seed = torch.randn(count, outputs)
        found = []
        for number in (1, 2, 4):
            threads(number)
            found.append(results(linear, x, weight, bias, seed))
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("method", "is_plain"),
    [
        (None, True),
        (gf.Exact(), True),
        (gf.GradientFilter(2), True),  # plain features have no map
        (gf.Quantized(8), False),
        (gf.LowRankAdapter(2), False),
        (gf.BiasOnly(), False),
    ],
    ids=str,
)
def test_a_layer_with_a_method_for_plain_features_keeps_it(
    method: gf.Method | None, is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    if method is not None:
        gf.apply_(model, method, "last:1")
    gf.accelerate_(model)
    called = []
    monkeypatch.setattr(fusion, "linear", lambda *a: called.append(1) or linear(*a))
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert bool(called) == is_plain


def test_a_second_derivative_and_gradients_by_the_batch_are_torchs() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    found = []
    for run in (F.linear, linear):
        (first,) = torch.autograd.grad(run(x, weight, None).pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), weight)
        seeds = torch.eye(6).view(6, 3, 2)
        by_batch = torch.autograd.grad(run(x, weight, None), (x, weight), seeds, is_grads_batched=True)
        found.append([second, *by_batch])
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(*found, strict=True))


class Own(Tensor):
    """A weight that says for itself what a layer does with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made + 1 if func is F.linear else made


def _replaced(layer: Any) -> None:
    layer.forward = lambda x: x.new_ones(len(x), 4)


def _of_own_weight(layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Own), requires_grad=False)


@pytest.mark.parametrize("change", [_replaced, _of_own_weight])
@pytest.mark.parametrize("accelerated_first", [True, False])
def test_what_stands_in_for_a_layer_is_respected(change: Any, accelerated_first: bool) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten(), nn.Linear(12, 4)), torch.randn(2, 3, 2, 2)
    if accelerated_first:
        gf.accelerate_(model)(x)
    change(model[2])
    if not accelerated_first:
        gf.accelerate_(model)
    assert torch.allclose(model(x), model[2](model[1](model[0](x))), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_derivatives_forwards_are_torchs() -> None:
    model = gf.accelerate_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    x = torch.randn(2, 4)
    with torch.autograd.forward_ad.dual_level():
        made = model(torch.autograd.forward_ad.make_dual(x, torch.ones(2, 4)))
        tangent = torch.autograd.forward_ad.unpack_dual(made).tangent
    wanted = torch.ones(2, 4) @ model[0].weight.t() @ model[1].weight.t()
    assert torch.allclose(tangent, wanted, atol=1e-6)


def test_a_wrong_width_is_told_as_torch_tells_it() -> None:
    model = gf.accelerate_(nn.Sequential(nn.Linear(300, 300), nn.ReLU()))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.randn(4, 299))


def test_features_of_other_shapes_and_frozen_layers_are_left_to_torch_or_run_alike() -> None:
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    fast = gf.accelerate_(nn.Sequential(*[nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)]))
    fast.load_state_dict(plain.state_dict())
    fast[0].requires_grad_(False)
    for shape in ((6,), (3, 6), (2, 3, 6)):
        x = torch.randn(shape)
        assert torch.allclose(fast(x), plain(x), atol=1e-6)
        with torch.no_grad():
            assert torch.allclose(fast(x), plain(x), atol=1e-6)
