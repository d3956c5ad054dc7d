"""Inverted residuals in one native pass: equal to the plain modules, and so is what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.native import inverted_residual as native_block
from gradfilter.ops import inverted_residual
from mobile import Block, random_norm

needs_native = pytest.mark.skipif(not native_block.is_built(), reason="the native passes were not built")
TOLERANCE = 1e-5

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "hardtanh": lambda: nn.Hardtanh(-0.4, 0.7),
    "shifted": lambda: nn.Hardtanh(0.2, 0.9),
    "leaky": lambda: nn.LeakyReLU(0.2),
    "steep": lambda: nn.LeakyReLU(1.5),
    "hardswish": nn.Hardswish,
}


@dataclass(frozen=True)
class Case:
    block: nn.Module
    x: Tensor

    def error(self, faster: nn.Module) -> float:
        """How far off the exact result is, relative to its largest value."""
        with torch.no_grad():
            exact = copy.deepcopy(self.block).double()(self.x.double())
            return float((faster(self.x) - exact).abs().max() / exact.abs().max())


def convolved(conv: nn.Conv2d, activation: str, random: Random) -> list[nn.Module]:
    norm = random_norm(conv.out_channels)
    kept = [norm] if conv.bias is None or random.random() < 0.8 else []
    return [conv, *kept, *([] if activation == "none" else [ACTIVATIONS[activation]()])]


def draw(seed: int) -> Case:
    random = Random(seed)  # noqa: S311  shapes, not secrets
    torch.manual_seed(seed)
    kernel, stride = random.choice([(3, 3), (5, 5), (7, 7), (3, 5)]), random.choice([1, 1, 2])
    padding = [k // 2 if random.random() < 0.8 else random.randint(0, k) for k in kernel]
    size = [random.randint(max(1, k - 2 * p), 23) for k, p in zip(kernel, padding, strict=True)]
    channels, hidden, outputs = (random.choice([1, 3, 8, 13, 16, 24, 40, 50]) for _ in range(3))
    hidden *= random.choice([1, 3])
    expands, bias = random.random() < 0.75, random.random() < 0.5
    same_size = stride == 1 and all(k == 2 * p + 1 for k, p in zip(kernel, padding, strict=True))
    residual = same_size and random.random() < 0.6
    channels = channels if expands else hidden
    outputs = channels if residual else outputs
    first, second = (random.choice(list(ACTIVATIONS)) for _ in range(2))
    wide = nn.Conv2d(hidden, hidden, kernel, stride, tuple(padding), groups=hidden, bias=bias)
    stages = convolved(nn.Conv2d(channels, hidden, 1, bias=bias), first, random) if expands else []
    stages += convolved(wide, second, random)
    stages += convolved(nn.Conv2d(hidden, outputs, 1, bias=bias), "none", random)
    block = Block(stages, residual).eval().requires_grad_(False)
    x = torch.randn(random.randint(1, 3), channels, *size).contiguous(memory_format=torch.channels_last)
    return Case(block, x)


@pytest.fixture
def native_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the native pass was called with."""
    calls: list[Any] = []
    run = native_block.run

    def noted(*args: Any) -> Any:
        calls.append(args)
        return run(*args)

    monkeypatch.setattr(native_block, "run", noted)
    return calls


@needs_native
@pytest.mark.parametrize("first", range(0, 400, 100))
@pytest.mark.usefixtures("threads")
def test_generated_blocks_give_the_exact_numbers(first: int, native_calls: list[Any]) -> None:
    errors = {}
    for seed in range(first, first + 100):
        case = draw(seed)
        errors[seed] = case.error(gf.accelerate_(copy.deepcopy(case.block)))
    assert len(native_calls) == len(errors)
    assert max(errors.values()) < TOLERANCE, {s: e for s, e in errors.items() if e >= TOLERANCE}


@needs_native
@pytest.mark.parametrize("stage", ["expand", "depthwise", "project"])
def test_comparison_notices_a_missing_bias(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = native_block.pack

    def wrong(sizes: Any, **stages: Any) -> Tensor:
        spoilt = stages[stage]
        return right(sizes, **{**stages, stage: spoilt and spoilt._replace(bias=None)})

    monkeypatch.setattr(native_block, "pack", wrong)
    cases = [draw(seed) for seed in range(40)]
    noticed = [case.error(gf.accelerate_(copy.deepcopy(case.block))) > TOLERANCE for case in cases]
    assert sum(noticed) > 20


@needs_native
def test_large_maps_are_cut_into_tiles(threads: int, native_calls: list[Any]) -> None:
    stages = [nn.Conv2d(5, 60, 1), nn.ReLU6(), nn.Conv2d(60, 60, 5, 2, 2, groups=60), nn.ReLU6()]
    block = Block([*stages, nn.Conv2d(60, 7, 1)], residual=False).requires_grad_(False)
    for size in ((150, 91), (3, 700)):
        x = torch.randn(3, 5, *size).contiguous(memory_format=torch.channels_last)
        case = Case(block, x)
        assert case.error(gf.accelerate_(copy.deepcopy(block))) < TOLERANCE
    assert len(native_calls) == 2


@needs_native
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_go_through(value: float) -> None:
    """Also where hidden channels are filled up to whole vectors: there is then no 0 * infinity."""
    for seed in range(30):
        case = draw(seed)
        x = case.x.clone(memory_format=torch.preserve_format)
        x[0, 0, 0, 0] = value
        with torch.no_grad():
            wanted, made = case.block(x), gf.accelerate_(copy.deepcopy(case.block))(x)
        assert torch.equal(wanted.isnan(), made.isnan()), seed


def mobile_block(**options: Any) -> Block:
    torch.manual_seed(0)
    stages = [nn.Conv2d(8, 24, 1), nn.ReLU6(), nn.Conv2d(24, 24, 3, 1, 1, groups=24, **options), nn.ReLU6()]
    return Block([*stages, nn.Conv2d(24, 8, 1)], residual=True).requires_grad_(False)


def maps(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


@needs_native
def test_what_does_not_fit_runs_one_by_one(native_calls: list[Any]) -> None:
    block = mobile_block()
    faster = gf.accelerate_(copy.deepcopy(block))
    x = maps(2, 8, 9, 9)
    for other in (x.contiguous(), x[:0], x[0], x[:, :, :, 1:-1], x.double()):
        model = block.double() if other.dtype == torch.float64 else block
        fast = faster.double() if other.dtype == torch.float64 else faster
        torch.testing.assert_close(fast(other), model(other))
    assert not native_calls
    with pytest.raises(RuntimeError):  # as torch words it
        faster.float()(maps(2, 5, 9, 9))
    assert not native_calls
    faster(x)
    assert len(native_calls) == 1


@needs_native
def test_without_the_library_the_numbers_are_the_same(use_native: Callable[[bool], None]) -> None:
    block, x = mobile_block(), maps(2, 8, 9, 9)
    before, late = gf.accelerate_(copy.deepcopy(block)), gf.accelerate_(copy.deepcopy(block))
    wanted = late(x)
    use_native(False)
    assert "inverted" not in str(gf.acceleration(before))
    for model in (before, late):  # traced without the library; traced with it
        torch.testing.assert_close(model(x), wanted)


@needs_native
def test_weights_that_change_are_noticed() -> None:
    block, x = mobile_block(), maps(2, 8, 9, 9)
    faster = gf.accelerate_(copy.deepcopy(block))
    faster(x)
    for number in (0, 2, 4):
        for name in ("weight", "bias"):
            with torch.no_grad():
                getattr(faster.stages[number], name).mul_(1.5)  # type: ignore[index]
                getattr(block.stages[number], name).mul_(1.5)
            torch.testing.assert_close(faster(x), block(x))
    faster.stages[4].weight = nn.Parameter(torch.zeros(8, 24, 1, 1), requires_grad=False)  # type: ignore[index,union-attr]
    torch.testing.assert_close(faster(x), x + block.stages[4].bias[:, None, None])  # type: ignore[operator,index]


@needs_native
@pytest.mark.parametrize("held", [True, False])
def test_no_other_weight_can_take_the_place_of_a_packed_one(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would pass for that one; model.half().float() may do such a thing."""
    if not held:
        monkeypatch.setattr(inverted_residual, "hold", lambda tensors: [])
    faster = gf.accelerate_(mobile_block())
    faster(maps(2, 8, 9, 9))
    weight: Tensor = faster.stages[0].weight  # type: ignore[index,union-attr,assignment]
    memory = weight.untyped_storage()._weak_ref()
    weight.data = torch.zeros(24, 8, 1, 1)
    assert torch.UntypedStorage._expired(memory) != held


@needs_native
def test_a_weight_seen_otherwise_is_packed_anew() -> None:
    """The same memory, read in another order."""
    block = mobile_block()
    faster, x = gf.accelerate_(copy.deepcopy(block)), maps(2, 8, 9, 9)
    faster(x)
    for model in (block, faster):
        weight: Tensor = model.stages[0].weight  # type: ignore[index,union-attr,assignment]
        weight.data = weight.data.as_strided((24, 8, 1, 1), (1, 24, 1, 1))
    torch.testing.assert_close(faster(x), block(x))


def test_a_model_made_in_inference_mode_runs() -> None:
    with torch.inference_mode():
        block, x = mobile_block(), maps(2, 8, 9, 9)
        faster = gf.accelerate_(copy.deepcopy(block))
        torch.testing.assert_close(faster(x), block(x))
        for model in (block, faster):
            model.stages[0].weight.mul_(2)  # type: ignore[index,union-attr,operator]
        torch.testing.assert_close(faster(x), block(x))


class Watched(nn.Module):
    """A block of which somebody else reads an inner value."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.expand, self.project = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 8, 1)
        self.depthwise, self.act = nn.Conv2d(24, 24, 3, 1, 1, groups=24), nn.ReLU()
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def read_hidden(m: Any, x: Tensor) -> Any:
    hidden = m.act(m.expand(x))
    return m.project(m.act(m.depthwise(hidden))) + hidden.mean()


def read_depthwise(m: Any, x: Tensor) -> Any:
    wide = m.act(m.depthwise(m.act(m.expand(x))))
    return m.project(wide), wide


def read_before_activation(m: Any, x: Tensor) -> Any:
    wide = m.expand(x)
    return m.project(m.act(m.depthwise(m.act(wide)))) * wide.mean()


def sum_of_broadcast(m: Any, x: Tensor) -> Any:
    return x.mean((2, 3), keepdim=True) + m.project(m.act(m.depthwise(m.act(m.expand(x)))))


def activation_behind(m: Any, x: Tensor) -> Any:
    return m.act(m.project(m.act(m.depthwise(m.act(m.expand(x))))))


WATCHED = {
    "hidden": (read_hidden, "project depthwise"),
    "depthwise": (read_depthwise, ""),
    "before the activation": (read_before_activation, "project depthwise"),
    "broadcast": (sum_of_broadcast, "project depthwise expand"),
    "activation": (activation_behind, ""),
}


@needs_native
@pytest.mark.parametrize("name", WATCHED)
def test_inner_values_that_others_read_are_there(name: str) -> None:
    forward, parts = WATCHED[name]
    model = Watched(forward).requires_grad_(False)
    faster, x = gf.accelerate_(copy.deepcopy(model)), maps(2, 8, 9, 9)
    torch.testing.assert_close(faster(x), model(x))
    rows = {row[0]: row[1] for row in gf.acceleration(faster).rows}
    assert {layer for layer, how in rows.items() if how.startswith("inverted residual")} == set(parts.split())


@needs_native
def test_a_block_without_expansion_behind_another(native_calls: list[Any]) -> None:
    """The end of the first block is a 1x1 convolution before a depthwise one, as an expansion is."""
    wide = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    second = Block([wide, nn.ReLU(), nn.Conv2d(8, 5, 1)], residual=False).requires_grad_(False)
    first = mobile_block()
    first.residual = False
    case = Case(nn.Sequential(first, second), maps(2, 8, 9, 9))
    assert case.error(gf.accelerate_(copy.deepcopy(case.block))) < TOLERANCE
    assert len(native_calls) == 2


@needs_native
def test_what_trains_is_no_part_of_it() -> None:
    model = gf.apply_(nn.Sequential(mobile_block(), mobile_block()), gf.GradientFilter(2), "last:1")
    faster, x = gf.accelerate_(copy.deepcopy(model)), maps(2, 8, 9, 9)
    told = [row[1] for row in gf.acceleration(faster).rows]
    assert [how.startswith("inverted residual") for how in told] == [True] * 3 + [False] * 3
    y = faster(x)
    assert y.requires_grad
    torch.testing.assert_close(y, model(x))


@needs_native
@pytest.mark.parametrize(
    "options", [{"stride": 3}, {"dilation": 2, "padding": 2}, {"padding_mode": "reflect"}]
)
def test_other_convolutions_are_left_alone(options: dict[str, Any]) -> None:
    stages = [nn.Conv2d(8, 24, 1), nn.Conv2d(24, 24, 3, **{"padding": 1, **options}, groups=24)]
    model = nn.Sequential(*stages, nn.Conv2d(24, 8, 1)).requires_grad_(False)
    faster, x = gf.accelerate_(copy.deepcopy(model)), maps(2, 8, 9, 9)
    assert "inverted" not in str(gf.acceleration(faster))
    torch.testing.assert_close(faster(x), model(x))


@needs_native
def test_mobile_networks_run_their_blocks_so(native_calls: list[Any]) -> None:
    model = gf.models.build("mcunet-5fps", classes=7).eval().requires_grad_(False)
    model = model.to(memory_format=torch.channels_last)
    faster, x = gf.accelerate_(copy.deepcopy(model)), maps(1, 3, 64, 64)
    torch.testing.assert_close(faster(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(native_calls) == 14
