"""An int8 prefix: close to float and known how close, calibrated once, and never mixed up with float."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import int8_prefix
from gradfilter.ops import int8_conv
from gradfilter.ops.fused import HARDSWISH, NONE, RELU, Activation, FusedConv, bounded
from gradfilter.ops.int8 import quantized
from gradfilter.ops.int8_conv import Bytes, Int8Conv

pytestmark = pytest.mark.filterwarnings("ignore:This processor has no dot products")
FILTER = gf.GradientFilter(patch=2)
CLOSE = 0.995  # cosine


def convolved(conv: nn.Conv2d, activation: nn.Module | None = None) -> nn.Sequential:
    """A convolution with a norm that does something."""
    nn.init.kaiming_normal_(conv.weight)  # else features would hardly depend on the image
    norm: Any = nn.BatchNorm2d(conv.out_channels)
    norm.running_mean.uniform_(-0.3, 0.3)
    norm.running_var.uniform_(0.3, 1.0)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -0.3, 0.3)
    return nn.Sequential(conv, norm, *([] if activation is None else [activation]))


class Inverted(nn.Module):
    """An inverted residual, as mobile networks write it."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        hidden = 4 * channels
        self.stages = nn.Sequential(
            convolved(nn.Conv2d(channels, hidden, 1, bias=False), nn.ReLU6()),
            convolved(nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False), nn.ReLU6()),
            convolved(nn.Conv2d(hidden, outputs, 1, bias=False)),
        )
        self.adds = stride == 1 and channels == outputs

    def forward(self, x: Tensor) -> Any:
        return x + self.stages(x) if self.adds else self.stages(x)


class Basic(nn.Module):
    """Two convolutions, and one on the way past them, as residual networks write it."""

    def __init__(self, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolved(nn.Conv2d(channels, outputs, 3, stride, 1), nn.ReLU())
        self.second = convolved(nn.Conv2d(outputs, outputs, 3, padding=1))
        self.past = convolved(nn.Conv2d(channels, outputs, 1, stride)) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.past(x) + self.second(self.first(x)))


def net() -> nn.Sequential:
    """Strides, sums, groups, pools and all activations; the last convolution is the tail."""
    torch.manual_seed(0)
    return nn.Sequential(
        convolved(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6()),
        Inverted(8, 8, 1),
        Inverted(8, 8, 1),
        Inverted(8, 12, 2),
        nn.MaxPool2d(3, 1, 1),
        Basic(12, 12, 1),
        Basic(12, 16, 2),
        convolved(nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=4), nn.LeakyReLU(0.1)),
        convolved(nn.Conv2d(16, 16, 1), nn.Hardswish()),
        convolved(nn.Conv2d(16, 16, (1, 3), padding=(0, 1)), nn.SiLU()),
        nn.AvgPool2d(2, 1),
        nn.Conv2d(16, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def images(count: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 48, 48, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module | None = None) -> nn.Module:
    return gf.apply_(model or net(), FILTER, "last:1").eval()


def calibrated(model: nn.Module, calls: int = 2) -> nn.Module:
    gf.accelerate_(model, prefix="int8", calibration=calls)
    with torch.no_grad():
        for seed in range(calls):
            model(images(seed=seed))
    return model


def change_of(model: nn.Module) -> int8_prefix.FeatureChange:
    found = gf.acceleration(model).features
    assert found is not None
    return found


def features(model: nn.Module, x: Tensor) -> Tensor:
    (found,) = gf.split(model).prefix(x)
    return found


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


# One convolution: whole numbers have no rounding, so a simulation gives the same

CONVS: dict[str, Callable[[], nn.Conv2d]] = {
    "3x3": lambda: nn.Conv2d(16, 8, 3, padding=1),
    "stem": lambda: nn.Conv2d(3, 8, 3, 2, 1, bias=False),
    "1x1": lambda: nn.Conv2d(16, 24, 1),
    "odd": lambda: nn.Conv2d(5, 7, (3, 1), padding=(2, 0)),
    "depthwise": lambda: nn.Conv2d(16, 16, 5, 2, 2, groups=16),
    "multiplied": lambda: nn.Conv2d(6, 12, 3, groups=6),
    "grouped": lambda: nn.Conv2d(16, 8, 3, 2, 1, groups=4),
    "dilated": lambda: nn.Conv2d(16, 8, 3, padding=2, dilation=2),
}
KINDS = {"none": NONE, "relu": RELU, "relu6": bounded(0.0, 6.0), "hardswish": HARDSWISH}


def simulated(fused: FusedConv, x: Bytes, maps: Tensor) -> Tensor:
    """The convolution in float64 of what the bytes stand for, with the weights that int8 has."""
    weight, bias = fused.folded()
    values, scale = quantized(weight, by_row=True, steps=int8_conv.weight_steps())
    padding, stride, dilation, groups = fused.settings
    exact = (maps.double() - x.zero) * x.scale, values.double() * scale.double()
    return F.conv2d(*exact, None if bias is None else bias.double(), stride, padding, dilation, groups)


def largest(conv: nn.Conv2d) -> tuple[Bytes, Tensor]:
    """Where sums are largest: every weight and every byte."""
    nn.init.constant_(conv.weight, 1.0)
    return Bytes(0.01, 0), torch.full((2, conv.in_channels, 9, 9), 255, dtype=torch.uint8)


def any_bytes(conv: nn.Conv2d) -> tuple[Bytes, Tensor]:
    return Bytes(0.02, 77), torch.randint(0, 256, (2, conv.in_channels, 9, 9), dtype=torch.uint8)


@pytest.mark.parametrize("given", [largest, any_bytes])
@pytest.mark.parametrize("name", CONVS)
def test_one_convolution_is_the_sum_of_its_whole_numbers(name: str, given: Any) -> None:
    torch.manual_seed(0)
    conv = CONVS[name]().requires_grad_(False)
    x, maps = given(conv)
    made = Int8Conv(FusedConv(conv), x)(maps)
    assert made.dtype == torch.float32
    assert relative(made.double(), simulated(FusedConv(conv), x, maps)) < 1e-5


@pytest.mark.skipif(int8_conv.weight_steps() == 127, reason="sums are not cut off on this processor")
def test_sums_that_are_cut_off_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_conv, "weight_steps", lambda: 127)
    conv = CONVS["1x1"]().requires_grad_(False)
    x, maps = largest(conv)
    assert relative(Int8Conv(FusedConv(conv), x)(maps).double(), simulated(FusedConv(conv), x, maps)) > 0.1


@pytest.mark.parametrize("summed", ["alone", "bytes", "float", "broadcast"])
@pytest.mark.parametrize("in_bytes", [True, False])
@pytest.mark.parametrize("kind", [*KINDS.values(), Activation("leaky_relu", (0.2,), F.leaky_relu_, None)])
def test_activations_and_sums_are_those_of_torch(kind: Activation, in_bytes: bool, summed: str) -> None:
    torch.manual_seed(0)
    conv = CONVS["3x3"]().requires_grad_(False)
    fused, (x, maps) = FusedConv(conv, None, kind), any_bytes(conv)
    term, y = Bytes(0.03, 100), Bytes.between(-9.0, 9.0) if in_bytes else None
    other = {
        "alone": None,
        "bytes": torch.randint(0, 256, (2, 8, 9, 9), dtype=torch.uint8),
        "float": torch.randn(2, 8, 9, 9),
        "broadcast": torch.randn(8, 1, 1),
    }[summed]
    wanted = simulated(fused, x, maps)
    if other is not None:
        wanted = wanted + (term.unpacked(other) if summed == "bytes" else other).double()
    wanted = kind.run_(wanted.float())
    kept = None if other is None else other.clone()
    made = Int8Conv(fused, x, y, term)(maps, *([] if other is None else [other]))
    if y is None:
        assert relative(made, wanted) < 1e-5
    else:
        assert int((made.int() - y.packed(wanted).int()).abs().max()) <= 1
    if other is not None and kept is not None:
        assert torch.equal(other, kept), "it may not write to the other term"


def test_bytes_hold_zero_exactly_and_the_nearest_of_the_rest() -> None:
    for low, high in [(-1.0, 3.0), (0.0, 6.0), (-2.0, 0.0), (0.5, 1.0), (0.0, 0.0), (-1e-40, 1e-40)]:
        kept = Bytes.between(low, high)
        assert float(kept.unpacked(kept.packed(torch.zeros(1)))) == 0.0
        x = torch.linspace(low, high, 1001)
        assert float((kept.unpacked(kept.packed(x)) - x).abs().max()) <= 0.501 * kept.scale
    assert kept.packed(torch.tensor([-1e9, 1e9])).tolist() == [0, 255]


# The prefix of a model


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_features_are_close_to_those_in_float(layout: torch.memory_format) -> None:
    model: Any = trained()
    model, x = model.to(memory_format=layout), images(seed=9)
    exact = features(copy.deepcopy(model), x)
    made = features(calibrated(model), x)
    assert made.dtype == torch.float32
    assert F.cosine_similarity(made.flatten(), exact.flatten(), dim=0) > CLOSE
    assert 1e-4 < relative(made, exact) < 0.1
    change = change_of(model)
    assert change.cosine > CLOSE
    assert 0.5 < change.relative_error / relative(made, exact) < 2, "another batch, much the same error"
    told = str(gf.acceleration(model))
    assert told.count("int8 conv") == sum(isinstance(m, nn.Conv2d) for m in model.modules()) - 1
    assert f"cosine {change.cosine:.6f}" in told


@pytest.mark.parametrize("factor", [0.5, 8.0])
def test_a_wrong_scale_is_noticed(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Bytes.between
    wrong = classmethod(lambda cls, low, high: right(factor * low, factor * high))
    monkeypatch.setattr(Bytes, "between", wrong)
    monkeypatch.setattr(int8_prefix, "ALARMING", 1e9)
    assert change_of(calibrated(trained())).cosine < CLOSE


def test_the_tail_is_the_one_of_float() -> None:
    """What trains gets other features, and does the same with them, bit by bit."""
    plain = gf.accelerate_(trained())
    model, x = calibrated(trained()), images(seed=9)
    model(x).sin().sum().backward()
    parts = gf.split(plain)
    parts.tail(gf.split(model).prefix(x)).sin().sum().backward()
    assert torch.equal(model[11].weight.grad, plain[11].weight.grad)  # type: ignore[index,union-attr]
    grads = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in model.named_parameters():
        assert (p.grad is None) == (grads[name] is None) == (not p.requires_grad)
        assert p.grad is None or torch.equal(p.grad, grads[name])


def test_evaluation_has_the_features_of_the_training() -> None:
    model, x = calibrated(trained()), images(seed=9)
    training = model(x)
    assert training.requires_grad
    with torch.no_grad():
        assert relative(model(x), training) < 1e-5
    with torch.inference_mode():
        assert relative(model(x), training) < 1e-5
    float_model = gf.accelerate_(trained())
    assert relative(float_model(x), training) > 1e-4, "or this shows nothing"


def test_a_model_that_does_not_train_runs_in_int8_to_its_end() -> None:
    model = calibrated(net().eval().requires_grad_(False))
    assert "int8" in gf.acceleration(model).rows[-1][1]
    x = images(seed=9)
    assert F.cosine_similarity(model(x).flatten(), net().eval()(x).flatten(), dim=0) > CLOSE


def test_what_was_frozen_later_stays_in_float() -> None:
    model, x = calibrated(trained()), images(seed=9)
    before = model(x)
    model.requires_grad_(False)
    assert relative(model(x), before) < 1e-5
    assert "int8" not in gf.acceleration(model).rows[-1][1]


def test_the_first_calls_run_in_float() -> None:
    exact, x = gf.accelerate_(trained()), images()
    model = gf.accelerate_(trained(), prefix="int8", calibration=3)
    for left in (3, 2, 1):
        assert f"{left} of 3 calibration calls to come" in str(gf.acceleration(model))
        assert gf.acceleration(model).features is None
        assert relative(model(x), exact(x)) < 1e-5
    assert relative(model(x), exact(x)) > 1e-4
    assert "relative error" in gf.acceleration(model).int8


def test_calls_that_cannot_run_in_int8_do_not_count() -> None:
    exact, x = gf.accelerate_(trained()), images()
    model = gf.accelerate_(trained(), prefix="int8", calibration=1)
    odd = {"empty": x[:0], "a gradient of the input": x.clone().requires_grad_()}
    for batch in odd.values():
        assert torch.allclose(model(batch), exact(batch), atol=1e-5)
    handle = model[0].register_forward_hook(lambda *_: None)  # type: ignore[index,operator]
    model(x)
    handle.remove()
    assert "1 of 1" in gf.acceleration(model).int8
    model(x)
    for batch in odd.values():
        assert torch.allclose(model(batch), exact(batch), atol=1e-5)


def test_the_ranges_are_those_of_all_calls() -> None:
    """The smaller batch comes last: with its ranges alone the larger one would be cut off."""
    model = gf.accelerate_(trained(), prefix="int8", calibration=2)
    exact, x = gf.accelerate_(trained()), images()
    for batch in (x, 0.1 * x):
        model(batch)
    assert F.cosine_similarity(model(x).flatten(), exact(x).flatten(), dim=0) > CLOSE


def test_other_weights_are_calibrated_anew() -> None:
    model, x = calibrated(trained()), images()
    other = trained()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.7)
    model.load_state_dict(other.state_dict())
    assert relative(model(x), other(x)) < 1e-5
    assert "1 of 2" in gf.acceleration(model).int8
    model(x)
    assert 1e-4 < relative(model(x), other(x)) < 0.2


def test_norms_that_change_are_seen() -> None:
    model, x = calibrated(trained()), images()
    before = features(model, x)
    with torch.no_grad():
        model[0][1].running_mean.add_(0.3)  # type: ignore[index,union-attr]
    assert relative(features(model, x), before) > 1e-2
    assert change_of(model).cosine > CLOSE, "it is still calibrated"


def test_a_term_that_is_read_again_is_not_written_to() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c, self.d, self.e = (nn.Conv2d(i, 8, 3, padding=1) for i in (3, 8, 8, 8, 8))

        def forward(self, x: Tensor) -> Any:
            y = torch.relu(self.a(x))
            z = torch.relu(y + self.c(torch.relu(self.b(y))))
            return self.d(z) + self.e(torch.relu(y))

    model, x = Again().eval().requires_grad_(False), images(seed=9)
    made = calibrated(copy.deepcopy(model))(x)
    assert F.cosine_similarity(made.flatten(), model(x).flatten(), dim=0) > CLOSE


def test_calibrating_leaves_no_trace() -> None:
    """Neither in the random numbers that dropout draws, nor in batch statistics, though a call runs twice."""
    noisy = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    )
    noisy.requires_grad_(False)[4].requires_grad_(True)
    seen = []
    for options in ({}, {"prefix": "int8", "calibration": 1}):
        model: Any = gf.accelerate_(copy.deepcopy(noisy).train(), **options)  # type: ignore[arg-type]
        torch.manual_seed(3)
        model(images())
        seen.append((torch.rand(()), model[1].running_mean.clone(), model[1].num_batches_tracked.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert change_of(model).cosine > CLOSE, "both runs drop the same"


def test_the_model_stays_what_it_was() -> None:
    model = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calibrated(model)(images()).sum().backward()
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    restored, plain = gf.restore_(model), net().eval()
    assert type(restored) is nn.Sequential
    assert torch.equal(restored(images()), plain(images()))


def test_copies_are_calibrated_anew() -> None:
    model, x = calibrated(trained()), images()
    before = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  our own
        assert "2 of 2" in gf.acceleration(twin).int8
        for seed in range(2):
            twin(images(seed=seed))
        assert torch.equal(twin(x), before)
    assert torch.equal(model(x), before)


# Features that are kept


def test_a_cache_does_not_mix_features(tmp_path: Path) -> None:
    data = [(image, 0) for image in images(6)]
    model = trained()
    exact = gf.FeatureCache(model, data, batch=3, folder=tmp_path)[0][0][0]
    calibrated(model)
    cache = gf.FeatureCache(model, data, batch=3, folder=tmp_path)
    (kept,) = cache.decode([part[None] for part in cache[0][0]])
    assert torch.equal(kept, features(model, images(6)[:3])[:1])
    assert not torch.equal(cache[0][0][0], exact)
    assert relative(cache.tail([part[None] for part in cache[0][0]]), model(images(6)[:1])) < 1e-5


def test_the_signature_tells_ranges_apart() -> None:
    same = [gf.split(calibrated(trained())).signature for _ in range(2)]
    others = [gf.split(calibrated(trained(), calls=3)).signature, gf.split(trained()).signature]
    assert len({*same, *others}) == 3


def test_what_is_not_calibrated_is_not_split() -> None:
    model = gf.accelerate_(trained(), prefix="int8", calibration=2)
    with pytest.raises(gf.GradFilterError, match="2 of its 2 calibration calls are to come: run the model"):
        gf.split(model)
    with pytest.raises(gf.GradFilterError, match="2 of its 2 calibration calls"):
        gf.FeatureCache(model, [(image, 0) for image in images()], batch=2)
    for _ in range(2):
        model(images())
    parts = gf.split(model)
    with torch.no_grad():
        model[0][0].weight.mul_(2)  # type: ignore[index,union-attr]
    with pytest.raises(gf.GradFilterError, match="1 of its 2 calibration calls"):
        parts.prefix(images())


# What is said


@pytest.mark.parametrize("has", [True, False])
def test_a_processor_without_dot_products_is_warned_of(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_prefix, "has_dot_products", lambda: has)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gf.accelerate_(trained())
        gf.accelerate_(trained(), prefix="int8")
    assert ["may be slower than float" in str(one.message) for one in told] == ([] if has else [True])
    assert all(Path(one.filename) == Path(__file__) for one in told), "it is the caller's line"


def test_features_that_change_a_lot_are_warned_of() -> None:
    """All of the range goes to a channel that nobody reads."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with torch.no_grad():
        model[0].weight[:, 0] = 0  # type: ignore[index]
    x = images() * torch.tensor([1e4, 1.0, 1.0]).view(1, 3, 1, 1)
    gf.accelerate_(gf.apply_(model, FILTER, "last:1"), prefix="int8", calibration=1)
    with pytest.warns(UserWarning, match=r"changes the features of the frozen prefix a lot \(relative error"):
        model(x)


REFUSED: dict[str, Callable[[], Any]] = {
    'prefix must be "float" or "int8", not \'int4\'': lambda: gf.accelerate_(trained(), prefix="int4"),  # type: ignore[arg-type]
    "calibration must be a whole number": lambda: gf.accelerate_(trained(), prefix="int8", calibration=0),
    "No 2-d convolution is frozen": lambda: gf.accelerate_(gf.apply_(net(), FILTER, "all"), prefix="int8"),
    "those here are torch.float64 on cpu": lambda: gf.accelerate_(trained().double(), prefix="int8"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_is_said(sentence: str) -> None:
    with pytest.raises(gf.GradFilterError, match=sentence):
        REFUSED[sentence]()


def test_a_model_in_parts_is_refused() -> None:
    class Branches(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self[0](x)
            return self[1](y) if y.sum() > 0 else y

    model = Branches(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.Conv2d(4, 4, 3)))
    with pytest.raises(gf.GradFilterError, match=r"Branches can have no int8 prefix, .* as a whole"):
        gf.accelerate_(model.requires_grad_(False), prefix="int8")


def test_without_onednn_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_prefix, "is_available", lambda: False)
    with pytest.raises(gf.GradFilterError, match="needs oneDNN"):
        gf.accelerate_(trained(), prefix="int8")
