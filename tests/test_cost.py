"""Costs from shapes alone, against what is measured and against what is worked out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter.errors import PlanError

FILTER = gf.GradientFilter(patch=2)


def measured(model: nn.Module, x: Tensor) -> int:
    """Bytes of unique storages that autograd keeps, with hooks of the test's own."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    del y
    return sum(storage.nbytes() for storage in storages.values())


def measured_before(model: nn.Module, plan: gf.Plan, x: Tensor) -> int:
    """Exact backpropagation of the planned layers in plain PyTorch, in eval mode."""
    plain = copy.deepcopy(model).eval().requires_grad_(False)
    for name in (*plan.trained, *plan.norms):
        plain.get_submodule(name).requires_grad_(True)
        if plan.norm == "batch" and name in plan.norms:
            plain.get_submodule(name).train()
    return measured(plain, x)


def assert_to_the_byte(model: nn.Module, plan: gf.Plan, x: Tensor) -> None:
    before, after = plan.kept
    assert before == measured_before(model, plan, x)
    assert after == measured(gf.apply_(model, plan), x)
    with gf.kept_bytes(model) as kept:
        model(x)
    assert sum(kept.values()) == after


# Bytes


@pytest.mark.parametrize("patch", [1, 2, 4, (2, 4)])
@pytest.mark.parametrize("layers", ["all", "last:2", "residual", "first:1"])
@pytest.mark.parametrize("norm", ["fixed", "affine", "batch"])
def test_tiny_to_the_byte(patch: Any, layers: str, norm: Any) -> None:
    model, x = gf.models.build("tiny"), torch.randn(3, 3, 28, 28)
    assert_to_the_byte(model, gf.plan(model, gf.GradientFilter(patch), layers, norm=norm, example=x), x)


@pytest.mark.parametrize(
    "method",
    [
        gf.Exact(),
        gf.GradientFilter(2, taps="collapse"),
        gf.GradientFilter(2, input_gradient="exact"),
        gf.GradientFilter(patch={"inverted.*": 4, "*.downsample.*": 1, "*": (1, 2)}),
    ],
    ids=str,
)
def test_methods_to_the_byte(method: gf.Method) -> None:
    model, x = gf.models.build("tiny"), torch.randn(2, 3, 30, 32)
    assert_to_the_byte(model, gf.plan(model, method, example=x), x)


def test_mixed_methods_to_the_byte() -> None:
    model, x = gf.models.build("tiny"), torch.randn(2, 3, 32, 32)
    plan = gf.plan(model, FILTER)
    mixed = [gf.Exact(), gf.GradientFilter(4), gf.GradientFilter(2, input_gradient="exact")]
    rows = [replace(row, method=mixed[i % 3]) for i, row in enumerate(plan.rows[:-1])]
    assert_to_the_byte(model, gf.cost(model, replace(plan, rows=(*rows, plan.rows[-1])), x), x)


class Everything(nn.Module):
    """Layers of every kind, functional and modules, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, padding_mode="reflect"), nn.PReLU(8))
        self.norm = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 8, 3, padding="same")
        self.depthwise = nn.Conv2d(8, 16, 5, padding=2, groups=8)
        self.squeeze = nn.Conv2d(16, 16, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.channels = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 24)
        self.narrow = nn.Linear(24, 16)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.stem(x)))
        x = F.max_pool2d(F.relu(self.down(x)), 3, 2, 1)
        x = self.depthwise(F.hardswish(x))
        x = x * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        y = self.channels(x.permute(0, 2, 3, 1))
        x = x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)
        up = F.leaky_relu(self.up(self.drop(x)), 0.2)
        x = torch.cat([up, F.interpolate(up, scale_factor=0.5).repeat(1, 1, 2, 2)], 1)
        return self.head(F.avg_pool2d(x, 2).mean((2, 3)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["fixed", "affine"])
@pytest.mark.parametrize("sides", [(32, 32), (24, 40)])
def test_all_kinds_of_layers_to_the_byte(training: bool, norm: Any, sides: tuple[int, int]) -> None:
    model, x = Everything().train(training), torch.randn(2, 3, *sides)
    assert_to_the_byte(model, gf.plan(model, FILTER, norm=norm, example=x), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_to_the_byte(dtype: torch.dtype) -> None:
    model, x = gf.models.build("tiny").to(dtype), torch.randn(2, 3, 16, 16, dtype=dtype)
    assert_to_the_byte(model, gf.plan(model, FILTER, example=x), x)


def test_channels_last_to_the_byte() -> None:
    model = gf.models.build("tiny").to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 30, 30).contiguous(memory_format=torch.channels_last)
    assert_to_the_byte(model, gf.plan(model, FILTER, example=x), x)


def test_unbatched_to_the_byte() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2), nn.ReLU6(), nn.Conv2d(4, 2, 1)
    )
    x = torch.randn(3, 17, 18)
    plan = gf.plan(model, FILTER, example=x)
    assert plan.rows[0].before is not None
    assert plan.rows[0].before.forward_macs == 8 * 17 * 18 * 3 * 9
    assert_to_the_byte(model, plan, x)


@pytest.mark.parametrize(
    ("kind", "axes"), [(nn.Conv1d, 1), (nn.Conv3d, 3), (nn.ConvTranspose1d, 1), (nn.ConvTranspose3d, 3)]
)
def test_other_axes_to_the_byte(kind: Any, axes: int) -> None:
    model = nn.Sequential(kind(3, 4, 3, 2, 1), nn.ReLU(), kind(4, 4, 3), nn.SiLU())
    x = torch.randn(2, 3, *[9] * axes)
    assert_to_the_byte(model, gf.plan(model, FILTER, example=x), x)


def test_tokens_to_the_byte() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6))
    x = torch.randn(2, 24, 6)
    for method in (FILTER, gf.GradientFilter(2, tokens=(4, 6))):
        assert_to_the_byte(model, gf.plan(model, method, example=x), x)
        gf.restore_(model)


REGIONS = {
    "resnet18": ("layer3,layer4", 0.24, 0.07),
    "mobilenet_v2": (",".join(f"features.{i}" for i in range(7, 19)), 0.22, 0.07),
}


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("layers", ["region", "all"])
@pytest.mark.parametrize("name", REGIONS)
def test_imagenet_models_to_the_byte_and_small(name: str, layers: str) -> None:
    region, *limits = REGIONS[name]
    chosen, limits = (region, limits) if layers == "region" else ("all", [0.25, 0.07])
    model, x = gf.models.build(name), torch.randn(2, 3, 224, 224)
    plan = gf.plan(model, FILTER, chosen)
    exact = measured_before(model, plan, x)
    for patch, limit in zip((2, 4), limits, strict=True):
        plan = gf.plan(model, gf.GradientFilter(patch), chosen)
        before, after = gf.cost(model, plan, torch.empty(8, 3, 224, 224)).kept
        assert after <= limit * before
        costed = gf.cost(model, plan, x)
        assert costed.kept == (exact, measured(gf.apply_(model, plan), x))
        gf.restore_(model)


# Multiply-adds


def macs(model: nn.Module, method: gf.Method, x: Tensor, layers: str = "all") -> list[tuple[int, int, int]]:
    """Forward, backward before, backward after of each layer."""
    found = []
    for row in gf.plan(model, method, layers, example=x).rows:
        assert row.before is not None
        assert row.after is not None
        assert row.before.forward_macs == row.after.forward_macs
        found.append((row.before.forward_macs, row.before.backward_macs, row.after.backward_macs))
    return found


def test_multiply_adds_of_pointwise_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1))
    first, second = 2 * 8 * 8 * 8 * 3, 2 * 8 * 8 * 4 * 8
    x = torch.empty(2, 3, 8, 8)
    assert macs(model, gf.Exact(), x) == [(first, first, first), (second, 2 * second, 2 * second)]
    assert macs(model, gf.GradientFilter(2), x) == [
        (first, first, first // 4),
        (second, 2 * second, second // 2),
    ]
    assert macs(model, gf.GradientFilter((2, 4)), x)[1] == (second, 2 * second, second // 4)
    exact_input = gf.GradientFilter(2, input_gradient="exact")
    assert macs(model, exact_input, x)[1] == (second, 2 * second, second + second // 4)
    assert macs(model, gf.GradientFilter(1), x)[1] == (second, 2 * second, 2 * second)


def test_multiply_adds_of_kernels() -> None:
    x = torch.empty(2, 4, 16, 16)
    full = 2 * 8 * 16 * 16 * 4 * 9
    strided = full // 4
    conv, down = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)
    depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
    assert macs(conv, gf.GradientFilter(2, taps="collapse"), x) == [(full, full, full // 36)]
    assert macs(conv, gf.GradientFilter(2), x) == [(full, full, full // 4)]  # 3x3 on the grid too
    assert macs(down, gf.GradientFilter(2, taps="collapse"), x) == [(strided, strided, strided // 36)]
    assert macs(down, gf.GradientFilter(2), x) == [(strided, strided, strided // 4)]
    each = 2 * 4 * 16 * 16 * 9
    links = 8 + 2 * 7  # of 8 patches per axis: each with itself and with its neighbours
    assert macs(depthwise, gf.GradientFilter(2), x) == [(each, each, 2 * 4 * links**2)]


def test_multiply_adds_of_other_layers() -> None:
    assert macs(nn.Linear(6, 5), FILTER, torch.empty(7, 6)) == [(210, 210, 210)]
    over_maps = 2 * 4 * 4 * 6 * 5
    assert macs(nn.Linear(6, 5), FILTER, torch.empty(2, 4, 4, 6)) == [(over_maps, over_maps, over_maps // 4)]
    tokens = gf.GradientFilter(2, tokens=(4, 4))
    assert macs(nn.Linear(6, 5), tokens, torch.empty(2, 16, 6)) == [(over_maps, over_maps, over_maps // 4)]
    up = 2 * 8 * 8 * 4 * 6 * 4
    assert macs(nn.ConvTranspose2d(4, 6, 2, 2), gf.Exact(), torch.empty(2, 4, 8, 8)) == [(up, up, up)]
    assert macs(nn.Conv1d(3, 5, 3), gf.Exact(), torch.empty(2, 3, 12)) == [(900, 900, 900)]


def test_frozen_layers_cost_no_backward() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(4)))
    one = 2 * 4 * 4 * 4 * 4
    found = macs(model, gf.Exact(), torch.empty(2, 4, 4, 4), "1,3,!2")
    assert found == [(one, 0, 0), (one, one, one), (one, one, one), (one, 2 * one, 2 * one)]


def test_totals_add_up() -> None:
    plan = gf.plan(gf.models.build("tiny"), FILTER, example=torch.empty(2, 3, 32, 32))
    assert plan.other is not None
    before, after = plan.total
    assert (
        before.kept
        == plan.kept[0]
        == sum(row.before.kept for row in plan.rows if row.before) + plan.other[0].kept
    )
    assert (
        after.kept
        == plan.kept[1]
        == sum(row.after.kept for row in plan.rows if row.after) + plan.other[1].kept
    )
    assert before.backward_macs == sum(row.before.backward_macs for row in plan.rows if row.before)
    assert before.forward_macs == after.forward_macs


# The table

TABLE = """\
layer                  kind    action  method                        kept   -> kept  backward  -> backward  reason
stem.0                 Conv2d  frozen                                   0         0         0            0
residual.body.0.0      Conv2d  frozen                                   0         0         0            0
residual.body.1.0      Conv2d  frozen                                   0         0         0            0
residual.downsample.0  Conv2d  frozen                                   0         0         0            0
inverted.body.0.0      Conv2d  train   GradientFilter(patch=2)   64.0 KiB  16.0 KiB     1.0 M      262.1 k
inverted.body.1.0      Conv2d  train   GradientFilter(patch=2)  128.0 KiB  32.0 KiB   589.8 k      123.9 k
inverted.body.2.0      Conv2d  train   GradientFilter(patch=2)  128.0 KiB  32.0 KiB     2.1 M      524.3 k
head                   Linear  train   Exact()                        256       256     1.3 k        1.3 k  plain features have no map
(other modules)                                                 576.0 KiB  16.0 KiB         0            0
total                                                           896.2 KiB  96.2 KiB     3.7 M      911.6 k
of exact                                                                     0.107x                 0.244x
"""  # noqa: E501


def test_table_of_tiny() -> None:
    plan = gf.plan(gf.models.build("tiny"), FILTER, "inverted", example=torch.empty(2, 3, 32, 32))
    assert str(plan) + "\n" == TABLE


def test_plan_without_an_example_has_no_costs() -> None:
    plan = gf.plan(gf.models.build("tiny"), FILTER)
    assert plan.other is None
    assert plan.kept == (0, 0)
    assert all(row.before is row.after is None for row in plan.rows)
    assert "kept" not in str(plan)


# What planning leaves alone, and what it cannot do


def test_planning_changes_nothing() -> None:
    model, fired = gf.models.build("tiny"), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: fired.append(1))
        module.register_forward_pre_hook(lambda *_: fired.append(1))
    model.stem.register_forward_hook(Recorder(model).note)
    model.stem[0].weight.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [dict(module.__dict__) for module in model.modules()]
    x = torch.randn(2, 3, 16, 16)
    random = torch.get_rng_state()
    gf.plan(model, FILTER, norm="batch", example=x)
    assert torch.equal(torch.get_rng_state(), random)
    assert not fired
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.__dict__ for module in model.modules()] == attributes
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["stem.0.weight"]
    assert all(parameter.grad is None for parameter in model.parameters())
    model(x)
    assert fired


class Recorder:
    """What cannot be copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def note(self, *_: Any) -> None:
        pass

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a hook's owner was copied")


def test_models_that_draw_random_numbers() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * float(torch.rand(()))

    random = torch.get_rng_state()
    gf.plan(Noisy(), FILTER, example=torch.empty(2, 3, 4, 4))
    torch.set_rng_state(random)
    model = Noisy()
    random = torch.get_rng_state()
    gf.plan(model, FILTER, example=torch.empty(2, 3, 4, 4))
    assert torch.equal(torch.get_rng_state(), random)


def test_plain_tensors_and_torchs_own_hooks() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.utils.spectral_norm(nn.Conv2d(3, 4, 3))
            self.scale = torch.rand(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.conv(x) * self.scale)

    model, x = Scaled(), torch.randn(2, 3, 9, 9)
    plan = gf.plan(model, FILTER, example=x)
    assert plan.rows[0].before is not None
    assert plan.rows[0].before.backward_macs == 2 * 4 * 49 * 27
    assert plan.kept[1] == measured(gf.apply_(model, plan), x)


ERRORS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: gf.plan(gf.models.build("tiny"), FILTER, example=torch.empty(2, 4, 16, 16)),
        "The model could not be run on the shape (2, 4, 16, 16) of the example (at stem.0: Invalid channel "
        "dimensions); give an input it accepts, or plan without an example.",
    ),
    (
        lambda: gf.plan(gf.models.build("tiny"), FILTER, example=[1, 2]),  # type: ignore[arg-type]
        "example must be an input tensor of the model, not list.",
    ),
    (
        lambda: gf.cost(
            gf.models.build("tiny"), gf.plan(nn.Conv2d(3, 3, 1), FILTER), torch.empty(2, 3, 8, 8)
        ),
        "The plan is for another model: this one has no layer .",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), ERRORS, ids=range(len(ERRORS)))
def test_errors(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        call()
    assert str(caught.value) == sentence
