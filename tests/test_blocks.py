"""Kept tensors in few bits: how far they are off, that rounding is unbiased, and that nothing spoils it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradfilter as gf
from gradfilter import native
from gradfilter.errors import PlanError
from gradfilter.geometry import ConvGeometry
from gradfilter.ops import blocks
from gradfilter.ops.blocks import Blocks, decode, encode
from gradfilter.ops.exact_conv import Gradients, Want, exact_backward
from gradfilter.ops.storage import Store, packed, unpacked


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def there_and_back(x: Tensor, how: Blocks, draw: int = 0) -> Tensor:
    return decode(encode(x, how, draw), how, x.dtype)


@pytest.fixture(params=["native", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All of this is so with the native passes and without."""
    if request.param == "torch":
        monkeypatch.setattr(native, "fits_blocks", lambda flat: False)
    elif not native._functions():
        pytest.skip("the native passes were not built")
    return str(request.param)


@pytest.fixture
def small_tile(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A tile of 64 levels, so that a test can see all of it."""
    made = blocks._noise
    made.cache_clear()
    monkeypatch.setattr(blocks, "TILE", 64)
    yield 64
    made.cache_clear()


def to_nearest(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The noise that rounds to the nearest step: the negative control of all that is unbiased."""
    return torch.full((2 * blocks.TILE,), 0.5, dtype=dtype, device=device)


# --- the numbers


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("size", [16, 256])
@pytest.mark.parametrize("count", [0, 1, 3, 16, 255, 256, 257, 70_000, 200_001])
def test_no_value_is_off_by_more_than_a_step(bits: int, size: int, count: int) -> None:
    x, how = noise(count), Blocks(bits, size)
    stored = encode(x, how, 5)
    found = decode(stored, how, x.dtype)
    steps = stored.ranges[:, 1].repeat_interleave(size)[:count]
    assert stored.codes.numel() == -(-(count % size) * bits // 8) + count // size * size * bits // 8
    assert stored.ranges.shape == (-(-count // size), 2)
    assert ((found - x).abs() <= steps * (1 + 1e-5)).all()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "even gaps", "expanded"])
def test_layouts_come_back(layout: str) -> None:
    x = noise(2, 3, 5, 7)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    if layout == "strided":
        x = noise(2, 3, 5, 14)[..., ::2]
    if layout == "even gaps":  # a view of one dimension, whose values are still not neighbours
        x = noise(2, 1, 5, 14)[..., ::2]
    if layout == "expanded":
        x = noise(2, 3, 1, 1).expand(2, 3, 5, 7)
    found = there_and_back(x, Blocks(8))
    assert (found - x).abs().max() < 0.05
    if layout in ("contiguous", "channels_last"):
        assert found.stride() == x.stride()


def test_encoding_a_dense_layout_copies_nothing() -> None:
    for x in (noise(2, 3, 5, 7), noise(2, 3, 5, 7).to(memory_format=torch.channels_last)):
        assert blocks._in_memory_order(x)[0].data_ptr() == x.data_ptr()


def test_fewer_bits_err_more() -> None:
    x = noise(10_000)
    errors = [float((there_and_back(x, Blocks(bits)) - x).square().mean()) for bits in (8, 4, 2)]
    assert 0 < 100 * errors[0] < 10 * errors[1] < errors[2]


def test_a_constant_block_is_exact() -> None:
    x = torch.cat([torch.full((256,), 0.1), torch.zeros(256), torch.full((100,), -1e30)])
    for bits in (8, 4, 2):
        assert torch.equal(there_and_back(x, Blocks(bits)), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_block_alone(bad: float) -> None:
    x = noise(1000)
    x[300] = bad
    for bits in (8, 4, 2):
        found = there_and_back(x, Blocks(bits))
        assert found[256:512].isnan().all()
        assert found[:256].isfinite().all()
        assert found[512:].isfinite().all()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 1e38])
def test_very_small_and_very_large_values(size: float) -> None:
    x = noise(512).clamp(-1.5, 1.5) * size
    allowed = max(
        0.02 * size, 255 * torch.finfo(x.dtype).tiny
    )  # a step that is no normal number counts as none
    assert ((there_and_back(x, Blocks(8)) - x).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype: torch.dtype) -> None:
    x = noise(3000, dtype=dtype)
    stored = encode(x, Blocks(8), 0)
    assert stored.ranges.dtype == torch.float32
    found = decode(stored, Blocks(8), dtype)
    assert found.dtype == dtype
    assert (found - x).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threads", [1, 3])
def test_native_and_torch_agree(
    dtype: torch.dtype, threads: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the last digit; a value within that of a step may be rounded the other way."""
    if way == "torch":
        return
    torch.set_num_threads(threads)
    flips = total = 0
    for bits in (8, 4, 2):
        for count in (1, 3, 63, 256, 1000, 70_001, 200_000):
            x, how = noise(count, dtype=dtype, seed=count), Blocks(bits, 64)
            x[count // 2] = float("nan") if count == 1000 else x[count // 2]
            found = encode(x, how, 7)
            decoded = decode(found, how, dtype)
            with monkeypatch.context() as without:
                without.setattr(native, "fits_blocks", lambda flat: False)
                other = encode(x, how, 7)
                assert torch.allclose(
                    decode(found, how, dtype), decoded, rtol=1e-5, atol=1e-6, equal_nan=True
                )
            finite = found.ranges[:, 0].isfinite()
            assert torch.equal(finite, other.ranges[:, 0].isfinite())
            assert torch.equal(found.ranges[finite], other.ranges[finite])
            compared = finite.repeat_interleave(8 * bits)[: len(found.codes)]
            flips += int((found.codes != other.codes)[compared].sum())
            total += len(found.codes)
    torch.set_num_threads(1)
    assert flips <= (1e-4 * total if dtype == torch.float32 else 0)


# --- unbiased rounding


def rms_of_mean_error(x: Tensor, how: Blocks, draws: int) -> float:
    """In steps: how far the mean of many decodes is from x."""
    mean = torch.stack([there_and_back(x, how, draw) for draw in range(draws)]).mean(0)
    steps = encode(x, how, 0).ranges[:, 1].repeat_interleave(how.size)[: x.numel()]
    return float(((mean - x) / steps).square().mean().sqrt())


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_the_mean_of_many_decodes_tends_to_the_value(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, how = noise(4096, dtype=torch.float64), Blocks(bits)
    bound = (
        1.15 * (1 / 6) ** 0.5 / 20
    )  # a rounding is off by sqrt(1/6) of a step; a mean of 400 by 1/20 of it
    assert rms_of_mean_error(x, how, 400) < bound
    monkeypatch.setattr(blocks, "_noise", to_nearest)
    assert rms_of_mean_error(x, how, 400) > 5 * bound


def test_one_round_of_the_tile_is_unbiased_to_half_a_level(
    small_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, how = noise(1000, dtype=torch.float64), Blocks(4, 16)
    steps = encode(x, how, 0).ranges[:, 1].repeat_interleave(16)[:1000]

    def worst() -> float:
        mean = torch.stack([there_and_back(x, how, draw) for draw in range(small_tile)]).mean(0)
        return float(((mean - x).abs() / steps).max())

    assert worst() <= 0.5 / small_tile * (1 + 1e-9)
    monkeypatch.setattr(blocks, "_noise", to_nearest)
    assert worst() > 0.4


def test_values_a_tile_apart_are_not_rounded_alike() -> None:
    period = torch.full((256,), 0.37)
    period[:2] = torch.tensor([0.0, 1.0])
    x = period.repeat(2 * blocks.TILE // 256)
    first, second = there_and_back(x, Blocks(2)).chunk(2)
    assert 0.3 < float((first == second).double().mean()) < 0.9


# --- layers


@dataclass(frozen=True)
class Stored(gf.Method):
    """Exact, but for how what it keeps is stored."""

    store: Store = "int8"

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: gf.Memory) -> tuple[Tensor, ...]:
        return x, torch.ones(3, dtype=torch.uint8, device=x.device)

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        x, flags = kept or (None, None)
        assert flags is None or (flags.dtype == torch.uint8 and bool(flags.all()))
        return exact_backward(grad, x, weight, geometry, want)


METHODS = [gf.Quantized(4), gf.Quantized(2, block=64), Stored()]
each_method = pytest.mark.parametrize("method", METHODS, ids=str)


def net() -> nn.Sequential:
    """In float64: what runs it differently by rounding does not round what it keeps differently."""
    random = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs, groups in ((3, 8, 1), (8, 8, 8), (8, 12, 1)):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups)
        layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU6()]
    model = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    return model


def gradients(model: nn.Module, x: Tensor, run: Any = None) -> list[Tensor]:
    model.zero_grad()
    (run or model)(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.allclose(p, q, rtol=1e-9, atol=1e-9) for p, q in zip(a, b))  # noqa: B905


@each_method
def test_an_accelerated_model_has_the_same_gradients(method: gf.Method) -> None:
    model, x = gf.apply_(net(), method), noise(2, 3, 12, 12, dtype=torch.float64)
    fast = gf.accelerate_(copy.deepcopy(model))
    first = gradients(model, x)
    assert same(first, gradients(fast, x))
    assert not same(first, gradients(model, x))  # the next step draws other noise
    assert gf.method_state(fast).keys() == gf.method_state(model).keys()


@each_method
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_a_checkpoint_the_recomputation_counts(method: gf.Method, use_reentrant: bool) -> None:
    """Gradients are those of the second draw, which the recomputation made."""
    model, x = gf.apply_(net(), method), noise(2, 3, 12, 12, dtype=torch.float64).requires_grad_()
    plain = copy.deepcopy(model)
    plain(x)
    found = gradients(model, x, lambda x: checkpoint(model, x, use_reentrant=use_reentrant))
    if not use_reentrant:
        assert same(found, gradients(plain, x))
        assert all(int(draws) == 2 for draws in gf.method_state(model).values())
    else:  # the first run builds no graph, so nothing is drawn for it
        assert same(found, gradients(gf.apply_(net(), method), x))


@each_method
def test_a_layer_called_twice_draws_twice(method: gf.Method) -> None:
    x = noise(2, 4, 10, 10, dtype=torch.float64)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)
            with torch.no_grad():
                self.conv.weight.copy_(noise(4, 4, 3, 3, seed=3))

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.conv(x))  # type: ignore[no-any-return]

    twice = gf.apply_(Twice(), method)
    apart = nn.Sequential(copy.deepcopy(gf.restore_(copy.deepcopy(twice)).conv), Twice().conv)
    apart[1].load_state_dict(apart[0].state_dict())  # type: ignore[union-attr]
    gf.apply_(apart, method)
    gf.load_method_state_(apart, {"1:draws": torch.tensor(1)})
    first, second = gradients(apart, x)[0::2]
    assert torch.allclose(gradients(twice, x)[0], first + second, rtol=1e-9)
    assert int(gf.method_state(twice)["conv:draws"]) == 2


def test_the_weight_gradient_is_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    x = noise(2, 4, 8, 8, dtype=torch.float64)

    def net_of(method: gf.Method) -> nn.Module:
        conv = nn.Conv2d(4, 4, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            conv.weight.copy_(noise(4, 4, 1, 1, seed=1))
        return gf.apply_(nn.Sequential(conv), method)

    def error_of_mean(draws: int) -> float:
        model = net_of(gf.Quantized(2, block=64))
        mean = torch.stack([gradients(model, x)[0] for _ in range(draws)]).mean(0)
        return float((mean - exact).norm() / exact.norm())

    exact = gradients(net_of(gf.Exact()), x)[0]
    assert error_of_mean(400) < 0.25 * error_of_mean(4)
    monkeypatch.setattr(blocks, "_noise", to_nearest)
    assert error_of_mean(40) == pytest.approx(error_of_mean(4))


def test_saved_method_state_does_not_move() -> None:
    model, x = gf.apply_(net(), gf.Quantized()), noise(1, 3, 8, 8, dtype=torch.float64)
    model(x)
    saved = gf.method_state(model)
    model(x)
    assert {int(draws) for draws in saved.values()} == {1}
    assert {int(draws) for draws in gf.method_state(model).values()} == {2}


def test_nothing_is_kept_or_drawn_for_a_weight_that_stays() -> None:
    model, x = gf.apply_(net(), gf.Quantized(), "last:1"), noise(1, 3, 8, 8, dtype=torch.float64)
    gradients(model, x)
    assert list(gf.method_state(model)) == ["6:draws"]


@pytest.mark.filterwarnings("ignore:The compiled part of this torchvision:RuntimeWarning")
def test_mobilenet_keeps_little() -> None:
    """Meta knows all of it: bytes of codes and ranges, one bit per value for each ReLU6."""
    model, example = gf.models.build("mobilenet_v2"), torch.empty(4, 3, 224, 224, device="meta")
    shares = []
    for bits in (8, 4, 2):
        before, after = gf.plan(model, gf.Quantized(bits), example=example).kept  # type: ignore[arg-type]
        shares.append(after / before)
    assert shares[2] < shares[1] < shares[0]
    assert shares[1] < 0.1


# --- storage by name


def test_int8_storage_leaves_whole_numbers_alone() -> None:
    x, marks = noise(3, 5, 7), torch.arange(4)
    memory: dict[str, Tensor] = {}
    kept, layouts = packed([x, marks, x], "int8", memory)
    assert [t.dtype for t in kept] == [torch.uint8, torch.float32, torch.int64, torch.uint8, torch.float32]
    one, same_marks, other = unpacked(kept, "int8", layouts, torch.float32)
    assert same_marks is marks
    assert not torch.equal(one, other)  # each has a draw of its own
    assert int(memory["draws"]) == 2
    assert max((one - x).abs().max(), (other - x).abs().max()) < 0.05


@pytest.mark.parametrize("store", ["same", "bf16"])
def test_other_stores_draw_nothing(store: Store) -> None:
    memory: dict[str, Tensor] = {}
    kept, layouts = packed([noise(4)], store, memory)
    assert torch.allclose(unpacked(kept, store, layouts, torch.float32)[0], noise(4), rtol=1e-2)
    assert not memory


def test_int8_storage_keeps_the_bytes_predicted() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Identity()), noise(2, 3, 20, 20)
    plan = gf.plan(model, Stored(), example=x)
    gf.apply_(model, plan)
    with gf.kept_bytes(model) as kept:
        model(x)
    assert sum(kept.values()) == plan.kept[1] == 2400 + 8 * 10 + 3


@pytest.mark.parametrize(
    "settings", [{"bits": 3}, {"bits": 4, "block": 7}, {"block": 0}, {"block": 1 << 20}, {"block": 2.5}]
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"bits must be|block must be"):
        gf.Quantized(**settings)
