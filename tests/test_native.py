"""The compiled passes: equal to torch's operators, on one thread and several; absent, nobody misses them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import native
from gradfilter.geometry import ConvAxis, ConvGeometry
from gradfilter.grid import Grid, pool
from gradfilter.native import kernel_gradient
from gradfilter.native.build import LIBRARY, WIDE, build
from gradfilter.native.kernel_gradient import Axis
from gradfilter.ops import max_pool as max_pool_module
from gradfilter.ops.activation import Gate, count_open
from gradfilter.ops.exact_conv import Want
from gradfilter.ops.linked import Linked
from gradfilter.ops.max_pool import PoolWindow, max_pool
from gradfilter.region import region

needs_native = pytest.mark.skipif(not native._functions(), reason="the native passes were not built")
pytestmark = needs_native


def draw_maps(random: Random, dtype: torch.dtype) -> tuple[Tensor, Grid]:
    shape = (
        random.randint(0, 3),
        random.choice([1, 5, 32, 70]),
        random.randint(1, 17),
        random.randint(1, 17),
    )
    x = torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return x, Grid.of(shape, (1, 1, random.randint(1, 5), random.randint(1, 5)))


def with_odd_numbers(y: Tensor) -> Tensor:
    y.view(-1)[:3] = torch.tensor([0.0, float("inf"), -float("inf")], dtype=y.dtype)
    return y


GATES = [Gate(), Gate(0.0, 6.0), Gate(-1.0, 1.0), Gate(shut=0.1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("threads")
def test_open_pixels(dtype: torch.dtype) -> None:
    random, compared = Random(0), 0  # noqa: S311  shapes, not secrets
    for _ in range(100):
        y, grid = draw_maps(random, dtype)
        if y.numel() > 3 and y.is_contiguous():
            y = with_odd_numbers(y)
        if grid.is_dense:
            continue
        gate = random.choice(GATES)
        assert native.fits(y) == (y.numel() > 0)
        wanted = count_open((gate.openness(y) != 0).to(dtype), grid)
        assert torch.equal(gate.after(y, grid), wanted)
        compared += 1
    assert compared > 50


def test_open_pixels_of_many_on_several_threads() -> None:
    torch.set_num_threads(3)
    y = torch.randn(4, 64, 31, 29).contiguous(memory_format=torch.channels_last)
    grid = Grid.of(tuple(y.shape), (1, 1, 2, 2))
    assert torch.equal(Gate().after(y, grid), count_open((y > 0).float(), grid))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("threads")
def test_finish(dtype: torch.dtype) -> None:
    assert finished_apart(dtype, shift=0.0) <= 16 * torch.finfo(dtype).eps  # of values up to 16: 2 ulp


def test_comparison_notices_a_wrong_shift() -> None:
    assert finished_apart(torch.float64, shift=1e-6) > 1e-9


def finished_apart(dtype: torch.dtype, shift: float) -> float:
    """How far norm, gate and means in one pass are from torch's; gates that are not open in both count 1."""
    random, apart, compared = Random(3), 0.0, 0  # noqa: S311  shapes, not secrets
    for _ in range(100):
        x, grid = draw_maps(random, dtype)
        if x.numel() == 0 or grid.is_dense:
            continue
        gate = random.choice([Gate(), Gate(0.0, 6.0), Gate(-1.0, 1.0)])
        norm = (torch.rand(x.shape[1], dtype=dtype), torch.randn(x.shape[1], dtype=dtype))
        limits, bounds = (gate.low, gate.high), gate.bounds(dtype)
        y = x.clone(memory_format=torch.preserve_format)
        count, means = native.finish(y, norm, limits, grid.patches[2:], grid.coarse_shape, bounds)
        scale, shifts = (numbers.view(-1, 1, 1) for numbers in norm)
        wanted = (x * scale + shifts + shift).clamp(*limits)
        apart = max(apart, float((y - wanted).abs().max()), float((means - pool(wanted, grid)).abs().max()))
        apart = max(apart, float((count != gate.after(y, grid)).any()))
        compared += 1
    assert compared > 50
    return apart


def test_finish_lets_nan_through() -> None:
    y = torch.full((1, 2, 2, 2), float("nan")).contiguous(memory_format=torch.channels_last)
    native.finish(y, (torch.ones(2), torch.ones(2)), (0.0, 6.0), (2, 2), (1, 2, 1, 1), (0.0, 6.0))
    assert y.isnan().all()


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.usefixtures("threads")
def test_through_gate(gate: Gate, use_native: Callable[[bool], None]) -> None:
    random, cases = Random(1), []  # noqa: S311  shapes, not secrets
    for _ in range(50):
        y, grid = draw_maps(random, torch.float64)
        values = pool(torch.randn_like(y), grid).contiguous(memory_format=torch.channels_last)
        if random.random() < 0.3:  # one number per map, as a mean hands back
            values = values[:, :, :1, :1].contiguous().expand(values.shape)
        scale = random.choice([None, torch.rand(1, y.shape[1], 1, 1, dtype=y.dtype)])
        if not grid.is_dense:
            kept = gate.after(y, grid)
            cases.append((values, kept, grid, scale, gate.times(values, kept, grid, scale)))
    use_native(False)
    for values, kept, grid, scale, made in cases:
        torch.testing.assert_close(made, gate.times(values, kept, grid, scale), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.usefixtures("threads")
def test_gates_of_every_pixel(gate: Gate, dtype: torch.dtype, use_native: Callable[[bool], None]) -> None:
    """One bit per value: the same bits as torch's operators, so that either may read what the other wrote."""
    random, cases = Random(2), []  # noqa: S311
    for shape in [draw_maps(random, dtype)[0].shape for _ in range(40)] + [torch.Size((3, 129, 33, 17))]:
        y, grad = (torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(2))
        y, scale = 4 * y, torch.randn(1, shape[1], 1, 1, dtype=dtype)
        cases.append((y, grad, scale, Grid.of(tuple(shape), (1, 1, 1, 1))))
    ours = [gated(gate, *case) for case in cases]
    use_native(False)
    for case, (bits, *gradients) in zip(cases, ours, strict=True):
        same, *wanted = gated(gate, *case)
        assert torch.equal(bits, same)
        for made, right in zip(gradients, wanted, strict=True):
            assert torch.allclose(made, right, rtol=4 * torch.finfo(dtype).eps, atol=0)


def gated(gate: Gate, y: Tensor, grad: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    bits = gate.after(y, grid)
    return bits, gate.times(grad, bits, grid), gate.times(grad, bits, grid, scale)


def draw_depthwise(random: Random) -> tuple[ConvGeometry, tuple[int, int]]:
    axes, n, channels = [], random.randint(1, 3), random.choice([1, 6, 40])
    for _ in range(2):
        kernel, stride, dilation = random.randint(1, 5), random.randint(1, 3), random.randint(1, 2)
        pad = random.randint(0, kernel)
        size = random.randint(dilation * (kernel - 1) + 1, 20)
        out = (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
        axes.append(ConvAxis(size, out, kernel, stride, dilation, pad, pad))
    shapes = [(n, channels, *(getattr(a, s) for a in axes)) for s in ("size_in", "size_out")]
    return ConvGeometry(*shapes, tuple(axes), groups=channels), (random.randint(2, 5), random.randint(1, 5))


def depthwise_errors(spoil: Callable[[Linked], None] = lambda linked: None) -> list[float]:
    """How far the native walk is from the convolution on the refined grid, by generated case."""
    random, errors = Random(2), []  # noqa: S311  shapes, not secrets
    for _ in range(200):
        geometry, patch = draw_depthwise(random)
        linked = Linked(geometry, patch)
        grad, x = (
            torch.randn(grid.coarse_shape, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
            for grid in (linked.out_grid, linked.in_grid)
        )
        weight = torch.randn(geometry.x_shape[1], 1, *(a.kernel for a in geometry.axes), dtype=torch.float64)
        spoil(linked)
        assert native.fits(grad, x)
        made = linked.backward(grad, x, weight, Want(True, True))
        wanted = linked.convolved.backward(grad, x, weight, Want(True, True))
        pairs = zip(made, wanted, strict=True)
        errors.append(max(float((a - b).abs().max() / (b.abs().max() + 1e-9)) for a, b in pairs))
        only_x = linked.backward(grad, x, weight, Want(True, False))
        only_weight = linked.backward(grad, x, weight, Want(False, True))
        assert torch.equal(only_x.x, made.x)
        assert only_x.weight is None
        assert torch.equal(only_weight.weight, made.weight)
        assert only_weight.x is None
    return errors


@pytest.mark.usefixtures("threads")
def test_depthwise() -> None:
    assert max(depthwise_errors()) < 1e-12


def test_comparison_notices_a_wrong_link() -> None:
    def spoil(linked: Linked) -> None:
        linked.axes = (linked.axes[0], linked.axes[1]._replace(weighs=linked.axes[1].weighs.flip(1)))

    assert sum(error > 1e-6 for error in depthwise_errors(spoil)) > 50


def kernel_gradient_errors(spoil: Callable[[Axis], Axis] = lambda axis: axis) -> list[float]:
    """How far the native gradient of a kernel is from torch's in float64, by generated convolution."""
    random, errors = Random(3), []  # noqa: S311  shapes, not secrets
    while len(errors) < 120:
        n, inputs, outputs = random.randint(1, 9), random.choice([16, 21, 64, 70]), random.randint(1, 40)
        axes = []
        for _ in range(2):
            kernel, stride, dilation = random.randint(1, 5), random.randint(1, 3), random.randint(1, 2)
            padding = random.randint(0, kernel)
            size = random.randint(max(1, dilation * (kernel - 1) + 1 - 2 * padding), 26)
            made = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            axes.append(Axis(size, made, kernel, stride, padding, dilation))
        x, grad = (
            torch.randn(n, c, *sizes).contiguous(memory_format=torch.channels_last)
            for c, sizes in ((inputs, [a.size for a in axes]), (outputs, [a.outputs for a in axes]))
        )
        assert native.fits(grad, x)
        found = kernel_gradient.kernel_gradient(grad, x, [spoil(axis) for axis in axes])
        stride, padding, dilation = ([getattr(a, s) for a in axes] for s in ("stride", "padding", "dilation"))
        settings = (None, stride, padding, dilation, False, [0, 0], 1, [False, True, False])
        wanted = torch.ops.aten.convolution_backward(grad.double(), x.double(), found.double(), *settings)[1]
        errors.append(float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9)))
    return errors


needs_kernel_gradient = pytest.mark.skipif(
    ("gf_kernel_gradient", torch.float32) not in native._functions(),
    reason="not built, or oneDNN has wider vectors here",
)


@needs_kernel_gradient
@pytest.mark.usefixtures("threads")
def test_kernel_gradient() -> None:
    assert max(kernel_gradient_errors()) < 1e-5


@needs_kernel_gradient
def test_comparison_notices_a_wrong_tap() -> None:
    wrong = kernel_gradient_errors(lambda axis: axis._replace(padding=axis.padding + 1))
    assert sum(error > 1e-3 for error in wrong) > 90


@needs_kernel_gradient
def test_kernel_gradients_that_are_left_to_torch() -> None:
    maps, axes = (
        torch.randn(2, 16, 5, 5).contiguous(memory_format=torch.channels_last),
        [Axis(5, 5, 3, 1, 1, 1)] * 2,
    )
    assert kernel_gradient.fits(maps, maps, axes)
    assert not kernel_gradient.fits(maps, maps[:, :15], axes)
    assert not kernel_gradient.fits(maps.double(), maps.double(), axes)
    assert not kernel_gradient.fits(maps.contiguous(), maps, axes)
    assert not kernel_gradient.fits(maps, maps, [axes[0], axes[1]._replace(dilation=3)])


def pooled(x: Tensor, window: PoolWindow, gate: bool, patch: int) -> Tensor:
    """The gradient of a convolution before a max pooling: both have the same grid."""
    torch.manual_seed(0)
    conv = gf.apply_(nn.Sequential(nn.Conv2d(4, 6, 1)), gf.GradientFilter(patch)).to(x.dtype)
    with region():
        y = conv(x)
        y = max_pool(y.relu() if gate else y, window)
    slopes = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)
    y.backward(slopes.contiguous(memory_format=torch.channels_last))
    return torch.cat([p.grad.flatten() for p in conv.parameters()])


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.usefixtures("threads")
def test_back_through_max_pooling(gate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    random, calls = Random(4), []  # noqa: S311
    back = native.max_pool_back
    monkeypatch.setattr(native, "max_pool_back", lambda *a: (calls.append(1), back(*a))[1])
    for _ in range(60):
        kernel, stride = ([random.randint(1, most) for _ in range(2)] for most in (4, 5))
        padding, dilation = (
            [random.randint(0, k // 2) for k in kernel],
            [random.randint(1, 3) for _ in range(2)],
        )
        window = PoolWindow(kernel, stride, padding, dilation, random.random() < 0.5)
        x = torch.randn(2, 4, random.randint(10, 19), random.randint(10, 19), dtype=torch.float64)
        x, patch = x.contiguous(memory_format=torch.channels_last), random.randint(2, 9)
        ours = pooled(x, window, gate, patch)
        with monkeypatch.context() as without:
            without.setattr(max_pool_module, "_is_native", lambda counts: False)
            assert torch.allclose(ours, pooled(x, window, gate, patch), rtol=1e-12, atol=1e-12)
    assert len(calls) > 30


def test_an_empty_batch_has_a_gradient_of_zero() -> None:
    """Its address is null, which the native walk takes for an input that is not there."""
    for _ in range(20):
        torch.full((1, 1, 3, 3), 7.0)  # what uninitialised memory would show
        layer = gf.apply_(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)), gf.GradientFilter(patch=2))
        layer(torch.randn(0, 4, 12, 12)).sum().backward()
        assert not layer[0].weight.grad.any()


def test_threads_are_those_of_torch() -> None:
    """A second pool of threads would fight with torch's for the cores."""
    library = native._library()
    assert native.ctypes.c_void_p.in_dll(library, "gf_parallel").value


def test_without_the_library_everything_works(use_native: Callable[[bool], None]) -> None:
    use_native(False)
    model = gf.apply_(gf.models.build("tiny"), gf.GradientFilter(patch=2), "all")
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_environment_turns_it_off() -> None:
    code = "from gradfilter import native; print(len(native._functions()))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, "GRADFILTER_NATIVE": "0"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"


def test_no_compiler_is_said_and_nothing_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build(tmp_path) == "there is no C++ compiler"
    monkeypatch.undo()
    assert build(tmp_path) is None
    assert {file.name for file in tmp_path.iterdir()} - {WIDE} == {LIBRARY}


def test_the_library_without_avx512_serves_too() -> None:
    """Most processors have no other; here its tests run once more with it."""
    if native.lanes() == 8:
        pytest.skip("it is the one that all tests run with here")
    here = Path(__file__).parent
    files = ["test_trained_block.py", "test_inverted_residual.py", "test_winograd.py", "test_native.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += [str(here / file) for file in files]
    environment = {**os.environ, "GRADFILTER_NATIVE": "narrow"}
    done = subprocess.run(command, env=environment, cwd=here.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
