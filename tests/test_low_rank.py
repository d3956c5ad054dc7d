"""What is special to SVD, HOSVD and SubspaceIteration: their numerics, and faults that earlier systems had.

Facts H1 to H11 and the weak points of subspace iteration are those of published implementations; each test
fails with that behaviour.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gradfilter as gf
from gradfilter.calls import asked
from gradfilter.methods import hosvd, subspace, svd
from gradfilter.ops import subspace as numerics
from gradfilter.ops import tucker
from gradfilter.ops.exact_conv import Want
from gradfilter.ops.unfolding import mode_cross, mode_product
from shapes import make_case

LOW_RANK = [gf.SVD(0.8), gf.HOSVD(0.8), gf.HOSVD(0.8, sequential=True), gf.SubspaceIteration(3)]
each_method = pytest.mark.parametrize("method", LOW_RANK, ids=str)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


def smooth(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor that low-rank methods compress: three outer products and a little noise."""
    random = torch.Generator().manual_seed(seed)
    made = 0.01 * torch.randn(*shape, generator=random, dtype=torch.float64)
    for scale in (1.0, 0.5, 0.25):
        term = torch.full((1,) * len(shape), scale, dtype=torch.float64)
        for mode, size in enumerate(shape):
            sides = [size if i == mode else 1 for i in range(len(shape))]
            term = term * torch.randn(sides, generator=random, dtype=torch.float64)
        made = made + term
    return made.to(dtype)


def applied(layer: nn.Module, method: gf.Method) -> nn.Module:
    return gf.apply_(nn.Sequential(layer, nn.Identity()), method)


def gradient(layer: nn.Module, method: gf.Method, x: Tensor) -> Tensor:
    """The weight gradient of a loss that is not the same for all outputs."""
    model = applied(copy.deepcopy(layer), method)
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y))
    found: Tensor = model[0].weight.grad  # type: ignore[index, union-attr, assignment]
    return found


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def kept_by(layer: nn.Module, method: gf.Method, x: Tensor) -> int:
    model = applied(copy.deepcopy(layer), method)
    with gf.kept_bytes(model) as kept:
        model(x)
    return sum(kept.values())


# --- facts about earlier systems


@each_method
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_h1_groups_train(method: gf.Method, groups: int) -> None:
    layer, x = nn.Conv2d(8, 16, 3, padding=1, groups=groups).double(), smooth(6, 8, 9, 9)
    assert kept_by(layer, method, x) < x.nbytes / 2
    assert relative(gradient(layer, method, x), gradient(layer, gf.Exact(), x)) < 0.7


@each_method
def test_h2_stride_equal_to_dilation(method: gf.Method) -> None:
    layer, x = nn.Conv2d(8, 4, 3, stride=2, dilation=2, padding=2).double(), smooth(6, 8, 11, 11)
    assert relative(gradient(layer, method, x), gradient(layer, gf.Exact(), x)) < 0.7


@each_method
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": (1, 3), "padding": (0, 1)},
        {"kernel_size": (3, 2), "padding": "same"},
        {"kernel_size": 3, "padding": (0, 2)},
    ],
    ids=str,
)
def test_h3_padding_per_axis(method: gf.Method, settings: dict[str, Any]) -> None:
    layer, x = nn.Conv2d(8, 4, **settings).double(), smooth(6, 8, 11, 11)
    assert relative(gradient(layer, method, x), gradient(layer, gf.Exact(), x)) < 0.7


@each_method
def test_h4_no_singular_value_decomposition(method: gf.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("a full decomposition ran")

    monkeypatch.setattr(torch.linalg, "svd", refuse)
    monkeypatch.setattr(torch, "svd", refuse)
    gradient(nn.Conv2d(8, 4, 3).double(), method, smooth(6, 8, 9, 9))


@each_method
def test_h5_a_frozen_weight_is_not_decomposed(method: gf.Method, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(x: Tensor) -> bool:
        calls.append(1)
        return numerics.can_decompose(x)

    for module in (svd, hosvd, subspace):
        monkeypatch.setattr(module, "can_decompose", counted)
    model = applied(nn.Conv2d(8, 4, 3).double(), method)
    x = smooth(6, 8, 9, 9).requires_grad_()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr, operator]
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
    assert not calls
    model[0].weight.requires_grad_(True)  # type: ignore[index, union-attr, operator]
    model(x).sum().backward()
    assert calls  # the negative control


@pytest.mark.parametrize("kind", [gf.SVD, gf.HOSVD])
@pytest.mark.parametrize("variance", [0.5, 0.9, 0.99, 0.9999, 1 - 1e-9, 1.0])
def test_h6_never_more_bytes_than_the_input(kind: Callable[..., gf.Method], variance: float) -> None:
    x = torch.randn(6, 8, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for source in (x, smooth(6, 8, 5, 5), torch.zeros_like(x)):
        assert kept_by(nn.Conv2d(8, 4, 3).double(), kind(variance), source) <= source.nbytes


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


@each_method
def test_h7_linear_of_four_dimensions_makes_no_gradient_per_row(method: gf.Method) -> None:
    layer, x = nn.Linear(24, 20).double(), smooth(8, 12, 2, 24)
    with _Largest() as largest:
        found = gradient(layer, method, x)
    assert found.shape == layer.weight.shape
    assert largest.elements <= 2 * x.numel() < 8 * 12 * 24 * 20
    assert relative(found, gradient(layer, gf.Exact(), x)) < 0.7


@each_method
def test_h8_counting_bytes_changes_no_parameter(method: gf.Method) -> None:
    model = applied(nn.Conv2d(8, 4, 3), method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = list(model.parameters())
    with gf.kept_bytes(model):
        model(smooth(6, 8, 9, 9, dtype=torch.float32)).sum().backward()
    held = optimizer.param_groups[0]["params"]
    assert all(a is b is c for a, b, c in zip(before, model.parameters(), held, strict=True))


@each_method
@pytest.mark.parametrize("lead", [(40,), (8, 12), (8, 6, 5), (6, 3, 4, 5)], ids=str)
def test_h9_linear_of_any_rank(method: gf.Method, lead: tuple[int, ...]) -> None:
    layer, x = nn.Linear(24, 10).double(), smooth(*lead, 24)
    assert kept_by(layer, method, x) < x.nbytes
    assert relative(gradient(layer, method, x), gradient(layer, gf.Exact(), x)) < 0.7


@each_method
def test_h10_bytes_are_counted_and_nothing_is_held(method: gf.Method) -> None:
    layer, x = nn.Conv2d(8, 4, 3).double(), smooth(6, 8, 9, 9)
    kept = method.keep(x, _geometry(layer, x), {})
    assert kept_by(layer, method, x) == sum(t.nbytes for t in kept)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in kept)  # no slice of something larger


@each_method
def test_h11_zero_activation_has_rank_one(method: gf.Method) -> None:
    layer, x = nn.Conv2d(8, 4, 3).double(), torch.zeros(6, 8, 9, 9, dtype=torch.float64)
    kept = method.keep(x, _geometry(layer, x), {})
    assert len(kept) > 1
    if method.bytes_depend_on_data:
        assert set(kept[0].shape[:1] if isinstance(method, gf.SVD) else kept[0].shape) <= {1, 6}
        assert sum(t.nbytes for t in kept) < x.nbytes / 4
    assert torch.equal(gradient(layer, method, x), torch.zeros_like(layer.weight))


# --- subspace iteration


def test_the_batch_size_may_change() -> None:
    layer, memory = nn.Conv2d(8, 4, 3).double(), {}
    for batch in (6, 3, 1, 9):
        x = smooth(batch, 8, 9, 9)
        kept = gf.SubspaceIteration(3).keep(x, _geometry(layer, x), memory)
        assert len(kept) == 5
    assert sorted(memory) == ["mode 1 of size 8", "mode 2 of size 9", "mode 3 of size 9"]


def test_the_size_of_the_map_may_change() -> None:
    model = applied(nn.Conv2d(8, 4, 3).double(), gf.SubspaceIteration(3))
    for size in (9, 12, 9):
        model(smooth(6, 8, size, size)).sum().backward()
    assert len(gf.method_state(model)) == 5


def test_the_start_is_the_same_whatever_the_global_seed() -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        layer = nn.Conv2d(8, 4, 3).double()
        with torch.no_grad():
            layer.weight.fill_(0.1)
        torch.manual_seed(seed)
        found.append(gradient(layer, gf.SubspaceIteration(2), smooth(6, 8, 9, 9)))
        torch.manual_seed(seed)
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*found)


def test_the_warm_start_converges_to_the_leading_directions() -> None:
    x = torch.randn(6, 40, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = mode_product(x, torch.diag(0.8 ** torch.arange(40, dtype=torch.float64)), 1)
    best = numerics.leading(x, 1, numerics.by_rank(4))
    layer, warm = nn.Conv2d(40, 4, 3).double(), {}
    method, errors, cold = gf.SubspaceIteration((6, 4, 5, 5)), [], []
    for _ in range(12):
        method.keep(x, _geometry(layer, x), warm)
        errors.append(_angle(warm["mode 1 of size 40"], best))
        fresh: dict[str, Tensor] = {}
        method.keep(x, _geometry(layer, x), fresh)
        cold.append(_angle(fresh["mode 1 of size 40"], best))
    assert errors[-1] < 0.02 * errors[0]
    assert cold[-1] == cold[0] == errors[0]  # the negative control: without a memory nothing is learnt


def test_zero_and_poor_inputs_do_not_trap_the_factors() -> None:
    """Also where the first inputs leave most channels unused, later directions in those are found."""
    layer, method, memory = nn.Conv2d(20, 4, 3).double(), gf.SubspaceIteration((6, 2, 5, 5)), {}
    zero = torch.zeros(6, 20, 7, 7, dtype=torch.float64)
    poor = zero.clone()
    poor[:, 0] = smooth(6, 7, 7)
    rich = zero.clone()
    rich[:, 10:12] = smooth(6, 2, 7, 7)
    for x in (zero, poor, *[rich] * 4):
        method.keep(x, _geometry(layer, x), memory)
    assert _angle(memory["mode 1 of size 20"], torch.eye(20, dtype=torch.float64)[:, 10:12]) < 1e-6


def test_resuming_needs_the_method_state() -> None:
    """The negative control of the conformance test: without the state the next step is another one."""
    x = torch.randn(6, 8, 9, 9, generator=torch.Generator().manual_seed(0))
    model = applied(nn.Conv2d(8, 4, 3), gf.SubspaceIteration(2))
    for _ in range(3):
        model(x).sum().backward()
    resumed = applied(nn.Conv2d(8, 4, 3), gf.SubspaceIteration(2))
    resumed.load_state_dict(model.state_dict())
    found = []
    for one in (model, resumed):
        one.zero_grad()
        one(x).square().sum().backward()
        found.append(next(one.parameters()).grad)
    assert not torch.allclose(*found)  # type: ignore[arg-type]


def test_planning_a_trained_model_leaves_its_memory_alone() -> None:
    layer, x = nn.Conv2d(8, 4, 3), smooth(6, 8, 9, 9, dtype=torch.float32)
    model = applied(layer, gf.SubspaceIteration(2))
    model(x).sum().backward()
    before = {k: v.clone() for k, v in gf.method_state(model).items()}
    plan = gf.plan(gf.restore_(copy.deepcopy(model)), gf.SubspaceIteration(2), example=x)
    gf.cost(gf.restore_(copy.deepcopy(model)), plan, x)
    method, memory = gf.SubspaceIteration(2), {}
    kept = method.keep(x.to("meta"), _geometry(layer, x), memory)
    assert memory == {}
    assert [t.shape for t in kept] == [t.shape for t in method.keep(x, _geometry(layer, x), {})]
    assert all(torch.equal(v, before[k]) for k, v in gf.method_state(model).items())


def test_full_rank_keeps_the_input() -> None:
    layer, x = nn.Conv2d(8, 4, 3).double(), smooth(6, 8, 9, 9)
    for rank in (100, (6, 8, 9, 9)):
        assert gf.SubspaceIteration(rank).keep(x, _geometry(layer, x), {})[0] is x


def test_ranks_by_layer() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Identity())
    method = gf.SubspaceIteration({"0": (2, 2, 3, 3), "*": 1})
    gf.apply_(model, method)
    model(smooth(6, 8, 9, 9, dtype=torch.float32)).sum().backward()
    state = gf.method_state(model)
    assert state["0:mode 2 of size 9"].shape == (9, 3)
    assert state["2:mode 2 of size 7"].shape == (7, 1)
    with pytest.raises(gf.GradFilterError, match="no pattern that matches layer 0"):
        gf.plan(gf.restore_(model), gf.SubspaceIteration({"2": 1}))
    rows = gf.plan(model, gf.SubspaceIteration((2, 2)), example=torch.zeros(2, 8, 9, 9)).rows
    assert rows[0].reason == "rank (2, 2) has 2 numbers but the input has 4 modes"


@pytest.mark.parametrize(
    "make",
    [
        lambda: gf.SVD(0),
        lambda: gf.HOSVD(1.1),
        lambda: gf.HOSVD(float("nan")),
        lambda: gf.SubspaceIteration(0),
        lambda: gf.SubspaceIteration(()),
        lambda: gf.SubspaceIteration((2, 0.5)),
    ],
)
def test_settings_are_checked(make: Callable[[], gf.Method]) -> None:
    with pytest.raises(gf.GradFilterError, match="must be"):
        make()


@each_method
def test_what_is_not_finite_is_kept_as_it_is(method: gf.Method) -> None:
    layer, x = nn.Conv2d(8, 4, 3), smooth(6, 8, 9, 9, dtype=torch.float32)
    x[0, 0, 0, 0] = torch.inf
    memory: dict[str, Tensor] = {}
    assert method.keep(x, _geometry(layer, x), memory) == (x,)
    assert memory == {}


@each_method
def test_large_values_in_float16(method: gf.Method) -> None:
    """Sums over a batch would overflow; what is kept does not."""
    x = smooth(16, 8, 9, 9).mul(2000)
    layer = nn.Conv2d(8, 4, 1).double()
    kept = method.keep(x.half(), _geometry(layer, x), {})
    assert len(kept) > 1
    assert all(t.dtype == torch.float16 and t.isfinite().all() for t in kept)


# --- numerics


def _slow_spectrum(size: int, columns: int, decay: float) -> Tensor:
    random = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(n, size, generator=random, dtype=torch.float64)).Q
        for n in (size, columns)
    )
    return left * decay ** torch.arange(size, dtype=torch.float64) @ right.t()


@pytest.mark.parametrize("decay", [0.5, 0.97, 0.995, 1 - 1e-6])
def test_large_modes_have_the_directions_of_a_full_decomposition(decay: float) -> None:
    x = _slow_spectrum(500, 600, decay)
    left, values, _ = torch.linalg.svd(x, full_matrices=False)
    for variance in (0.5, 0.8, 0.9):
        rank = int((values.square().cumsum(0) < variance * values.square().sum()).sum()) + 1
        found = numerics.leading(x, 0, numerics.by_variance(variance))
        assert found.shape[1] == rank
        if decay < 0.999:
            best = left[:, :rank]
            assert (found @ (found.t() @ x) - best @ (best.t() @ x)).norm() < 1e-3 * x.norm()


def test_large_modes_are_not_decomposed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    whole = torch.linalg.eigh

    def noted(a: Tensor) -> Any:
        sizes.append(len(a))
        return whole(a)

    monkeypatch.setattr(torch.linalg, "eigh", noted)
    numerics.leading(_slow_spectrum(500, 600, 0.9), 0, numerics.by_variance(0.8))
    assert max(sizes) <= 128
    numerics.leading(_slow_spectrum(500, 600, 1 - 1e-6), 0, numerics.by_variance(0.8))
    assert max(sizes) == 500  # a flat spectrum leaves nothing to save: the negative control


def test_few_directions_are_told_from_rounding_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a round adds to a basis that has all of a tensor is noise; it must be orthogonal all the same."""
    random = torch.Generator().manual_seed(0)
    few = torch.randn(512, 20, generator=random) @ torch.randn(20, 2048, generator=random)
    one = torch.randn(512, 1, generator=random).expand(-1, 2048) + 0.01 * torch.randn(
        512, 2048, generator=random
    )
    for x in (few, one):
        found = numerics._by_iteration(x, 0, numerics.by_variance(0.9))
        assert found is not None
        assert found.shape[1] == (18 if x is few else 1)
    once = lambda basis, columns: numerics.orthonormal(columns - basis @ (basis.t() @ columns))  # noqa: E731
    monkeypatch.setattr(numerics, "_orthogonal_to", once)
    assert numerics._by_iteration(few, 0, numerics.by_variance(0.9)) is None  # the negative control


@pytest.mark.parametrize("shape", [(40, 3), (300, 2, 2), (2, 90, 1, 2)])
def test_the_smaller_side_of_an_unfolding_is_decomposed(shape: tuple[int, ...]) -> None:
    x = smooth(*shape)
    mode = shape.index(max(shape))
    rows = x.movedim(mode, 0).flatten(1)
    for rank in range(1, rows.shape[1] + 1):
        found = numerics.leading(x, mode, numerics.by_rank(rank))
        best = torch.linalg.svd(rows, full_matrices=False).U[:, :rank]
        assert _angle(found, best) < 1e-6


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (2, 0, 3, 1)])
def test_products_with_unfoldings_in_any_memory_order(order: tuple[int, ...]) -> None:
    x = torch.randn(5, 6, 40, 3, generator=torch.Generator().manual_seed(0)).double()
    x = x.permute(order).contiguous().permute([order.index(i) for i in range(4)])
    for mode in range(4):
        rows = x.movedim(mode, 0).flatten(1)
        matrix = torch.randn(2, x.shape[mode], generator=torch.Generator().manual_seed(1)).double()
        made = mode_product(x, matrix, mode)
        assert torch.allclose(made.movedim(mode, 0).flatten(1), matrix @ rows)
        assert torch.allclose(mode_cross(x, made, mode), rows @ made.movedim(mode, 0).flatten(1).t())


def _factors(shape: tuple[int, ...], seed: int) -> tuple[Tensor, list[Tensor]]:
    random = torch.Generator().manual_seed(seed)
    ranks = [int(torch.randint(1, size + 1, (), generator=random)) for size in shape]
    core = torch.randn(ranks, generator=random, dtype=torch.float64)
    pairs = zip(shape, ranks, strict=True)
    return core, [torch.randn(n, k, generator=random, dtype=torch.float64) for n, k in pairs]


def _geometry(layer: nn.Module, x: Tensor) -> Any:
    found = []

    class Note(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            call = asked(func, args, kwargs or {})
            if call is not None:
                found.append(call.geometry)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Note():
        copy.deepcopy(layer).to(x)(x)
    return found[0]


def _angle(found: Tensor, best: Tensor) -> float:
    return float((best - found @ (found.t() @ best)).norm())


def _contractions(seed: int) -> list[tuple[Any, float, int]]:
    """Every path, its relative error to the gradient of the rebuilt input, and multiply-adds counted."""
    case = make_case(seed)
    layer, (x, g) = case.module(), case.tensors()
    if case.padding_mode != "zeros" or x.numel() == 0 or case.batch is None:
        return []
    geometry = _geometry(layer, x)
    core, factors = _factors(tuple(x.shape), seed)
    rebuilt = core
    for mode, factor in enumerate(factors):
        rebuilt = mode_product(rebuilt, factor, mode)
    weight: Any = layer.weight.detach()  # type: ignore[union-attr, operator]
    exact = gf.Exact().gradients(g, [rebuilt], weight, geometry, Want(False, True)).weight
    results = []
    for path in tucker._paths(geometry, tuple(core.shape)):
        run = tucker._on_map if path.on_map else tucker._on_taps
        with FlopCounterMode(display=False) as counter:
            found = run(path, g, core, factors, weight, geometry)
        assert found.shape == weight.shape
        results.append(
            (path, float((found - exact).norm() / (1 + exact.norm())), counter.get_total_flops() // 2)
        )  # type: ignore[operator, union-attr]
    return results


def test_every_path_of_the_contraction_gives_the_gradient_of_the_rebuilt_input() -> None:
    seen = set()
    for seed in range(400):
        for path, error, _ in _contractions(seed):
            assert error < 1e-9, (seed, path, error)
            seen.add((path.on_map, path.all_channels))
    assert len(seen) == 4


def test_a_tap_that_reads_the_wrong_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    right = tucker._tap_rows
    monkeypatch.setattr(tucker, "_tap_rows", lambda factor, *rest: right(factor.roll(1, 0), *rest))
    errors = [error for seed in range(60) for path, error, _ in _contractions(seed) if not path.on_map]
    assert sum(error > 1e-3 for error in errors) > 0.5 * len(errors) > 0


def test_macs_of_a_path_are_those_that_run() -> None:
    counted = 0
    for seed in range(200):
        for path, _, macs in _contractions(seed):
            if not path.on_map:  # torch's counter does not know the groups of a convolution's backward
                assert macs == path.macs, (seed, path, macs)
                counted += 1
    assert counted > 50


def test_more_rank_never_takes_fewer_macs() -> None:
    """So that the macs of full ranks, which a plan shows, are the most."""
    for seed in range(100):
        case = make_case(seed)
        if case.batch:
            geometry = _geometry(case.module(), case.tensors()[0])
            core, _ = _factors(geometry.x_shape, seed)
            most = tucker.contraction_macs(geometry, geometry.x_shape)
            assert tucker.contraction_macs(geometry, core.shape) <= most


def test_depthwise_layers_are_not_correlated_densely() -> None:
    layer, x = nn.Conv2d(64, 64, 3, padding=1, groups=64), torch.zeros(32, 64, 14, 14)
    geometry = _geometry(layer, x)
    ranks = (4, 16, 2, 2)
    path = min(tucker._paths(geometry, ranks), key=lambda p: p.macs)
    assert path.all_channels
    assert path.macs < geometry.macs < 64 * 16 * 9 * 4 * 14 * 14


def test_hosvd_reaches_its_variance_and_its_error_bound() -> None:
    x = torch.randn(8, 12, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = mode_product(x, torch.diag(0.7 ** torch.arange(12, dtype=torch.float64)), 1)
    for sequential in (False, True):
        kept = gf.HOSVD(0.9, sequential).keep(x, _geometry(nn.Conv2d(12, 4, 3), x), {})
        core, *factors = kept
        assert sum(t.numel() for t in kept) == tucker.stored_elements(x.shape, core.shape) < prod(x.shape)
        for mode, factor in enumerate(factors):
            core = mode_product(core, factor, mode)
        assert (core - x).square().sum() <= 4 * 0.1 * x.square().sum()


def test_the_memory_follows_the_model_to_another_type() -> None:
    """As it does to another device."""
    model = applied(nn.Conv2d(8, 4, 3).double(), gf.SubspaceIteration(2))
    model(smooth(6, 8, 9, 9)).sum().backward()
    model.float()(smooth(6, 8, 9, 9, dtype=torch.float32)).sum().backward()
    assert {value.dtype for value in gf.method_state(model).values()} == {torch.float32}
