"""Real networks, and what people put around them: DDP, compilers, checkpoints, autocast."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import gradfilter as gf

FILTER = gf.GradientFilter(patch=2)
Grads = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def images(n: int = 2, side: int = 64) -> Tensor:
    return torch.randn(n, 3, side, side)


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> Grads:
    model.zero_grad()
    (run or model)(x).float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: Grads, expected: Grads, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        error = (found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-30)
        assert error <= tolerance, name


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.flatten().double(), b.flatten().double(), 0))


# Models of other libraries


def calibrated(model: nn.Module, x: Tensor) -> nn.Module:
    """A fresh model whose signals and gradients reach all layers: norms have statistics, ConvNeXt scales."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.abs().max() < 1e-4
                and parameter.dim() in (1, 3)
                and "ConvNeXt" in type(model).__name__
            ):
                parameter.fill_(0.5)
        for norm in norms:
            norm.momentum = 1.0
        model.train()(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return model.eval()


MODELS = [
    "resnet18",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "regnet_y_400mf",
    "convnext_tiny",
    "shufflenet_v2_x0_5",
    "densenet121",
    "timm:resnet18",
    "timm:mobilenetv3_small_050",
    "timm:tf_efficientnet_lite0",
    "timm:convnext_atto",
    "timm:mobilenetv4_conv_small",
    "timm:repvgg_a0",
    "timm:ghostnet_050",
    "timm:regnetx_002",
]


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    x = F.interpolate(images(2, 4), size=64, mode="bicubic")  # smooth, as images are
    model = calibrated(gf.models.build(name, classes=5), x)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    plain = model(x).detach()
    exact = gradients(model, x)

    def applied(method: gf.Method) -> Grads:
        gf.apply_(model, method, example=x)
        assert torch.equal(model(x), plain)
        found = gradients(model, x)
        assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}
        assert all(grad.isfinite().all() for grad in found.values())
        gf.restore_(model)
        return {name: grad for name, grad in found.items() if exact[name].any()}

    assert_close(found := applied(gf.GradientFilter(patch=1)), {key: exact[key] for key in found}, 1e-4)
    assert all(grad.any() for grad in applied(FILTER).values())
    found = applied(gf.GradientFilter(patch=2, input_gradient="exact"))  # so that errors do not add up
    close = [cosine(found[key], exact[key]) > 0.3 for key in found]
    assert sum(close) > 0.9 * len(close)

    assert [type(module) for module in model.modules()] == classes
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(x), plain)


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "timm:mobilenetv3_small_050"])
def test_a_frozen_prefix_trains(name: str) -> None:
    x, target = images(4, 32), torch.tensor([0, 1, 0, 1])
    model = calibrated(gf.models.build(name, classes=2), x)
    gf.apply_(model, FILTER, "last:4", example=x)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    losses = []
    for _ in range(12):
        model.train()
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 2.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses[-3:]) < 0.7 * losses[0]


@pytest.mark.usefixtures("vision")
def test_extracted_features() -> None:
    """torchvision gives these as a torch.fx.GraphModule, whose class is made for the object."""
    from torchvision.models.feature_extraction import create_feature_extractor

    model = create_feature_extractor(gf.models.build("resnet18").eval(), {"layer2": "maps"})
    x = images(2, 32)
    plain = model(x)["maps"].detach()
    exact = gradients(model, x, lambda t: model(t)["maps"])
    gf.apply_(model, gf.GradientFilter(patch=1), example=x)
    assert torch.equal(model(x)["maps"], plain)
    found = gradients(model, x, lambda t: model(t)["maps"])
    assert_close(found, {key: exact[key] for key in found}, 1e-4)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x)["maps"], plain)
    assert torch.equal(gf.restore_(model)(x)["maps"], plain)


# DDP

DDP = """
    import os, sys, torch, torch.distributed as dist, gradfilter as gf
    from torch.nn.parallel import DistributedDataParallel as DDP

    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for order in ("apply first", "wrap first"):
        torch.manual_seed(0)
        model, x = gf.models.build("tiny"), torch.randn(4, 3, 16, 16)
        if order == "apply first":
            ddp = DDP(gf.apply_(model, gf.GradientFilter(2), "last:3"))
        else:
            ddp = gf.apply_(DDP(model, find_unused_parameters=True), gf.GradientFilter(2), "last:3")
        for _ in range(2):
            ddp.zero_grad()
            ddp(x[2 * rank : 2 * rank + 2]).square().sum().backward()
        if rank == 0:
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            torch.save(grads, f"{folder}/{order}")
    dist.barrier()
    os._exit(0)  # gloo's threads could abort an orderly end
"""


def test_ddp(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(DDP)]
    runs = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [run.wait(300) for run in runs] == [0, 0]
    torch.manual_seed(0)
    model, x = gf.models.build("tiny"), torch.randn(4, 3, 16, 16)
    gf.apply_(model, FILTER, "last:3")
    parts = [gradients(model, x[:2]), gradients(model, x[2:])]
    mean = {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}
    for order in ("apply first", "wrap first"):
        assert_close(torch.load(tmp_path / order), mean, 1e-6)


# torch.compile


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # inductor's own
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled(backend: str) -> None:
    model, x = gf.apply_(gf.models.build("tiny"), FILTER, "last:3"), images(2, 16)
    expected, plain = gradients(model, x), model(x)
    compiled = torch.compile(model, backend=backend)
    assert torch.equal(compiled(x), plain)
    assert_close(gradients(model, x, compiled), expected, 1e-6)
    if backend == "eager":  # without gradients it is compiled as a whole
        with torch.no_grad():
            assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(x), plain)


def test_applied_to_a_compiled_model() -> None:
    model, x = gf.models.build("tiny").eval(), images(2, 16)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x).detach()
    assert gf.apply_(compiled, FILTER) is compiled
    assert torch.equal(compiled(x), plain)
    found = gradients(model, x, compiled)
    assert_close(found, gradients(model, x), 1e-6)
    gf.restore_(compiled)
    assert set(found) < set(gradients(model, x, compiled))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
def test_compiled_around_a_part() -> None:
    """The rest of the model is compiled, with a break in its graph where the part runs."""
    model, x = gf.models.build("tiny").eval(), images(2, 16)
    gf.apply_(model.inverted, FILTER)
    expected = gradients(model, x)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    assert_close(gradients(model, x, torch.compile(model, backend=backend)), expected, 1e-6)
    assert graphs


# Checkpoints


class Shortcut(nn.Module):
    """Functional activations before and after; the shortcut comes out of a gate."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return F.relu(x + self.conv2(F.silu(self.bn(self.conv1(x)))))


class Checkpointed(nn.Module):
    how: str = "plain"
    reentrant: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Shortcut(4), Shortcut(4))
        self.head = nn.Linear(4, 2)

    def blocks_and_more(self, x: Tensor) -> Tensor:
        return F.relu(self.blocks[1](F.silu(self.blocks[0](x))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        settings = {"use_reentrant": self.reentrant}
        if self.how == "modules":
            for block in self.blocks:
                x = checkpoint(block, x, **settings)
        elif self.how == "sequence":
            x = checkpoint_sequential(self.blocks, 2, x, **settings)
        elif self.how == "function":
            x = checkpoint(self.blocks_and_more, x, **settings)
        elif self.how == "the same function":
            x = self.blocks_and_more(x)
        else:
            x = self.blocks(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["modules", "sequence", "function"])
def test_checkpoints(how: str, reentrant: bool) -> None:
    model, x = gf.apply_(Checkpointed().eval(), FILTER), images(2, 16)
    model.how = "the same function" if how == "function" else "plain"
    expected, plain = gradients(model, x), model(x)
    model.how, model.reentrant = how, reentrant
    assert torch.equal(model(x), plain)
    found = gradients(model, x)
    if how == "function" or reentrant:  # the grid ends where a reentrant checkpoint or a function begins
        assert found.keys() == expected.keys()
        assert all(cosine(found[name], expected[name]) > 0.9 for name in expected)
    else:
        assert_close(found, expected, 1e-6)
    gf.restore_(model)
    exact = gradients(model, x)
    gf.apply_(model, gf.GradientFilter(patch=1))
    found = gradients(model, x)
    assert_close(found, {name: exact[name] for name in found}, 1e-5)


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_resnet(reentrant: bool) -> None:
    model, x = gf.apply_(gf.models.build("resnet18").eval(), FILTER), images(2, 64)
    expected = gradients(model, x)

    def run(x: Tensor) -> Tensor:
        x = model.maxpool(model.relu(model.bn1(model.conv1(x))))
        for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
            for block in stage:
                x = checkpoint(block, x, use_reentrant=reentrant)
        return model.fc(model.avgpool(x).flatten(1))

    found = gradients(model, x, run)
    if reentrant:
        assert all(cosine(found[name], expected[name]) > 0.9 for name in expected)
    else:
        assert_close(found, expected, 1e-6)


def test_saved_tensors_on_cpu() -> None:
    model, x = gf.apply_(gf.models.build("tiny"), FILTER), images(2, 16)
    expected = gradients(model, x)

    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    assert_close(gradients(model, x, run), expected, 1e-6)


# Batches, layouts and types


@pytest.mark.parametrize("norm", ["fixed", "affine"])
def test_gradient_accumulation(norm: Any) -> None:
    model, x = gf.apply_(gf.models.build("tiny").double(), FILTER, norm=norm), images(4, 16).double()
    expected = gradients(model, x)
    model.zero_grad()
    for part in x.split([1, 3]):
        model(part).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_close(found, expected, 1e-6)


def test_channels_last_is_kept() -> None:
    model = gf.models.build("tiny").to(memory_format=torch.channels_last).eval()
    x = images(2, 16).contiguous(memory_format=torch.channels_last).requires_grad_()
    layouts: list[bool] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.ReLU | nn.ReLU6):
            module.register_forward_hook(
                lambda _, args, y: layouts.append(y.is_contiguous(memory_format=torch.channels_last))
            )
    plain = model(x).detach()
    for method in (FILTER, gf.GradientFilter(1), gf.Exact()):
        gf.apply_(model, method)
        assert torch.equal(model(x), plain)
        x.grad = None
        model(x).sum().backward()
        assert x.grad is not None
        assert x.grad.is_contiguous(memory_format=torch.channels_last)
        gf.restore_(model)
    assert layouts
    assert all(layouts)


@pytest.mark.parametrize("patch", [1, 2])
def test_autocast(patch: int) -> None:
    model, x = gf.apply_(gf.models.build("tiny"), gf.GradientFilter(patch)).eval(), images(2, 32)
    expected = gradients(model, x)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    found = gradients(model, x, run)
    assert found.keys() == expected.keys()
    assert all(grad.dtype is torch.float32 for grad in found.values())
    assert all(cosine(found[name], expected[name]) > 0.95 for name in expected)
    applied = run(x)
    with torch.autocast("cpu", torch.bfloat16):
        plain = gf.restore_(model)(x)
    assert applied.dtype is plain.dtype is torch.bfloat16
    assert torch.equal(applied, plain)


@pytest.mark.parametrize("norm", ["fixed", "affine", "batch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, norm: Any) -> None:
    model, x = gf.models.build("tiny"), images(2, 16)
    expected = gradients(gf.apply_(copy.deepcopy(model), FILTER, norm=norm), x)
    half = gf.apply_(model.to(dtype), FILTER, norm=norm)
    found = gradients(half, x.to(dtype))
    assert found.keys() == expected.keys()
    assert all(grad.dtype is dtype and grad.isfinite().all() for grad in found.values())
    assert all(cosine(found[name], expected[name]) > 0.8 for name in expected)


def test_torch_of_another_type_than_its_input_is_refused_as_ever() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    x = images(2, 8).double()
    with pytest.raises(RuntimeError) as plain:
        model(x)
    gf.apply_(model, FILTER)
    with pytest.raises(RuntimeError) as applied:
        model(x)
    assert str(applied.value) == str(plain.value)
    for wrong in (torch.randn(3), torch.randn(2, 3, 8), torch.randn(2, 4, 8, 8), torch.randn(2, 3, 1, 1)):
        with pytest.raises(RuntimeError) as applied:
            model(wrong)
        with pytest.raises(RuntimeError) as plain:
            gf.restore_(model)(wrong)
        assert str(applied.value) == str(plain.value)
        gf.apply_(model, FILTER)
