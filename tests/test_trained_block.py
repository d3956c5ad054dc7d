"""Trained inverted residuals whose forward is one native pass: gradients and kept bytes are the same."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.native import inverted_residual as native_block
from gradfilter.ops import trained_block
from mobile import Block, random_norm

pytestmark = pytest.mark.skipif(not native_block.is_built(), reason="the native passes were not built")
ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU6, nn.Identity, lambda: nn.LeakyReLU(0.2), lambda: nn.Hardtanh(-0.4, 0.7),
]  # fmt: skip


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_block, "_FEW_PIXELS", 1)


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The blocks whose forward was the native pass."""
    calls: list[Any] = []
    right = trained_block.Training.linked

    def noted(self: Any, *args: Any) -> Tensor:
        calls.append(self)
        return right(self, *args)

    monkeypatch.setattr(trained_block.Training, "linked", noted)
    return calls


def normed(conv: nn.Conv2d, activation: nn.Module, has_norm: bool) -> list[nn.Module]:
    return [
        conv,
        *([random_norm(conv.out_channels)] if has_norm else []),
        *([] if isinstance(activation, nn.Identity) else [activation]),
    ]


def draw(seed: int) -> tuple[nn.Module, Tensor]:
    """Two blocks behind a convolution: the second reads what the first made."""
    random = Random(seed)  # noqa: S311  shapes, not secrets
    torch.manual_seed(seed)
    channels, hidden = random.choice([3, 8, 17]), random.choice([8, 21, 40, 104])
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for _ in range(2):
        kernel, stride = random.choice([3, 3, 5]), random.choice([1, 1, 2])
        bias, has_norm = random.random() < 0.5, random.random() < 0.8
        first, second = (random.choice(ACTIVATIONS)() for _ in range(2))
        expands = random.random() < 0.75
        inner = hidden if expands else channels
        wide = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=bias)
        stages = normed(nn.Conv2d(channels, inner, 1, bias=bias), first, has_norm) if expands else []
        stages += normed(wide, second, has_norm)
        stages += normed(nn.Conv2d(inner, channels, 1, bias=bias), nn.Identity(), has_norm)
        layers.append(Block(stages, stride == 1 and random.random() < 0.6))
    patch = random.choice([2, 2, 3, 4])
    method = gf.GradientFilter(
        patch,
        taps=random.choice(["overlap", "overlap", "collapse"]),  # type: ignore[arg-type]
        weight_patch=random.choice([None, None, 2 * patch]),
    )
    model = gf.apply_(nn.Sequential(*layers).eval(), method, "all").to(memory_format=torch.channels_last)
    size = (random.randint(5, 22), random.randint(5, 22))
    return model, torch.randn(random.randint(1, 3), 3, *size).contiguous(memory_format=torch.channels_last)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = model(leaf)
    wanted = [leaf, *(p for p in model.parameters() if p.requires_grad)]
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), wanted)]


def errors(seed: int) -> float:
    """Of output and gradients, against the plain model."""
    model, x = draw(seed)
    pairs = zip(gradients(gf.accelerate_(copy.deepcopy(model)), x), gradients(model, x), strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs)


@pytest.mark.parametrize("first", range(0, 200, 50))
@pytest.mark.usefixtures("threads")
def test_generated_blocks_give_the_same_gradients(first: int, linked: list[Any]) -> None:
    found = {seed: errors(seed) for seed in range(first, first + 50)}
    assert len(linked) > 40
    assert max(found.values()) < 1e-4, {seed: error for seed, error in found.items() if error >= 1e-4}


@pytest.mark.parametrize("spoilt", [0, 1, 2, 3])
def test_comparison_notices_what_is_kept_wrong(spoilt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = native_block.run

    def wrong(*args: Any) -> Any:
        y, kept = right(*args)
        if kept and kept[spoilt] is not None:
            kept[spoilt] = kept[spoilt].roll(1, 3) if spoilt % 2 else kept[spoilt] * 1.01
        return y, kept

    monkeypatch.setattr(native_block, "run", wrong)
    assert sum(errors(seed) > 1e-4 for seed in range(40)) > 12


def mobile(method: gf.Method, norm: str = "fixed") -> nn.Module:
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6()]
    stages += [nn.Conv2d(24, 24, 3, 1, 1, groups=24, bias=False), nn.BatchNorm2d(24), nn.ReLU6()]
    block = Block([*stages, nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8)], residual=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), block, nn.Conv2d(8, 4, 1)).eval()
    return gf.apply_(model, method, "all", norm=norm).to(memory_format=torch.channels_last)  # type: ignore[arg-type]


def picture(size: int = 16) -> Tensor:
    return torch.randn(2, 3, size, size).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "method",
    [
        gf.Exact(),
        gf.HOSVD(0.8),
        gf.GradientFilter(1),
        gf.GradientFilter(2, input_gradient="exact"),
        gf.GradientFilter(2, weight_patch=1, input_gradient="exact"),
        gf.Quantized(8),
        gf.WalshHadamard(2),
    ],
    ids=str,
)
def test_other_methods_run_layer_by_layer(method: gf.Method, linked: list[Any]) -> None:
    model = mobile(method)
    found, wanted = gradients(gf.accelerate_(copy.deepcopy(model)), x := picture()), gradients(model, x)
    assert not linked
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


def test_norms_that_train_run_layer_by_layer(linked: list[Any]) -> None:
    model = mobile(gf.GradientFilter(2), norm="affine")
    gf.accelerate_(model)(picture()).sum().backward()
    assert not linked


def test_maps_whose_patches_do_not_nest_run_layer_by_layer(linked: list[Any]) -> None:
    """Patch 3 of a map for one layer, patch 6 for the next: a ragged one is no mean of means."""
    model = mobile(gf.GradientFilter(3, weight_patch=6))
    for size, expected in ((18, 1), (17, 1)):  # the second is ragged, so nothing is added
        found, wanted = (
            gradients(gf.accelerate_(copy.deepcopy(model)), x := picture(size)),
            gradients(model, x),
        )
        assert len(linked) == expected
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_it_keeps_as_many_bytes_as_the_plan_says(linked: list[Any]) -> None:
    method, x = gf.GradientFilter(2), picture()
    plain = mobile(method)
    plan = gf.plan(gf.restore_(copy.deepcopy(plain)), method, "all", example=x)
    model, kept = gf.accelerate_(plain), {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = (storage, storage.nbytes())
        return tensor

    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    assert linked
    assert y.requires_grad
    assert sum(size for key, (_, size) in kept.items() if key not in own) == plan.kept[1]


def tensors() -> int:
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def test_nothing_of_a_step_stays_behind() -> None:
    """An autograd node that held what made its output would live until the garbage collector came."""
    model, x = gf.accelerate_(mobile(gf.GradientFilter(2))), picture()
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(3):
            model(x).sum().backward()
        assert tensors() == before
    finally:
        gc.enable()


def test_weights_of_the_last_step_are_the_ones_that_run(linked: list[Any]) -> None:
    model, x = mobile(gf.GradientFilter(2)), picture()
    faster = gf.accelerate_(copy.deepcopy(model))
    for _ in range(2):
        for each in (model, faster):
            each(x).square().mean().backward()
            with torch.no_grad():
                for p in each.parameters():
                    if p.grad is not None:
                        p -= 0.5 * p.grad
                        p.grad = None
    assert len(linked) == 2
    torch.testing.assert_close(faster(x), model(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(faster(x), model(x), rtol=1e-4, atol=1e-4)


def test_weights_that_were_replaced_are_looked_at(linked: list[Any]) -> None:
    """One of another size must not be read as if it had the old one."""
    model, x = gf.accelerate_(mobile(gf.GradientFilter(2))), picture()
    model(x)
    model[1].stages[3].weight = nn.Parameter(torch.randn(24, 1, 1, 1))  # type: ignore[index,union-attr]
    with pytest.raises(RuntimeError):
        model(x).sum().backward()
    model[1].stages[3].weight = nn.Parameter(torch.randn(24, 1, 3, 3))  # type: ignore[index,union-attr]
    model(x).sum().backward()
    assert len(linked) == 2


def test_layers_that_stop_training_are_noticed(linked: list[Any]) -> None:
    model, x = mobile(gf.GradientFilter(2)), picture()
    faster = gf.accelerate_(copy.deepcopy(model))
    for frozen in ((), (0,), (0, 3), (0, 3, 6)):
        for each in (model, faster):
            for number in frozen:
                each[1].stages[number].weight.requires_grad_(False)  # type: ignore[index,union-attr]
        for a, b in zip(gradients(faster, x), gradients(model, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    assert linked


def test_much_padding(linked: list[Any]) -> None:
    """Then rows of outputs have no rows of the hidden map to themselves, or only some."""
    torch.manual_seed(0)
    wide = nn.Conv2d(40, 40, 7, 2, 6, groups=40)
    stages = [nn.Conv2d(4, 40, 1), nn.ReLU(), wide, nn.ReLU(), nn.Conv2d(40, 4, 1)]
    model = gf.apply_(nn.Sequential(nn.Conv2d(3, 4, 1), *stages).eval(), gf.GradientFilter(2), "all")
    model = model.to(memory_format=torch.channels_last)
    found = gradients(gf.accelerate_(copy.deepcopy(model)), x := picture(9))
    for a, b in zip(found, gradients(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_another_default_type_changes_nothing(linked: list[Any]) -> None:
    model, x = gf.accelerate_(mobile(gf.GradientFilter(2))), picture()
    wanted = gradients(model, x)
    torch.set_default_dtype(torch.float64)
    try:
        found = gradients(model, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(linked) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_norm_that_starts_to_train_is_noticed() -> None:
    model, x = gf.accelerate_(mobile(gf.GradientFilter(2))), picture()
    model(x).sum().backward()
    norm: Any = model[1].stages[1]  # type: ignore[index,union-attr]
    norm.requires_grad_(True)
    model(x).sum().backward()
    assert norm.weight.grad is not None


def test_small_batches_run_layer_by_layer(monkeypatch: pytest.MonkeyPatch, linked: list[Any]) -> None:
    monkeypatch.undo()
    gf.accelerate_(mobile(gf.GradientFilter(2)))(picture()).sum().backward()
    assert not linked
