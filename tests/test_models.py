"""Models by name, weight files that fit and that do not, and the libraries behind the names."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import models, optional
from gradfilter.errors import ModelError, WeightsError
from gradfilter.models import _torchvision, build, load_weights, names

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"
FOLDED = {
    "mcunet-5fps": 630_224,
    "proxyless-w0.3": 423_232,
    "mbv2-w0.35": 357_448,
}  # as in the published files


@pytest.fixture(scope="session")
def shared() -> Path:
    if not WEIGHTS.is_dir():
        pytest.skip(f"the shared weights are not there: {WEIGHTS}")
    return WEIGHTS


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, msg=name)


def cloned(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def saved(state: Mapping[str, Any], file: Path) -> Path:
    if file.suffix == ".safetensors":
        save_file(dict(state), file)
    else:
        torch.save(state, file)
    return file


# Our own networks


def test_public_names() -> None:
    assert models.__all__ == ["build", "load_weights", "names"]


@pytest.mark.parametrize(("name", "parameters"), FOLDED.items())
def test_folded_nets(name: str, parameters: int) -> None:
    model = build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 1000)
    assert build(name, classes=7)(torch.randn(2, 3, 33, 47)).shape == (2, 7)


@pytest.mark.parametrize("name", FOLDED)
def test_untrained_folded_nets_pass_signal_and_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, classes=5)
    logits = model(torch.randn(4, 3, 64, 64))
    assert logits.std(0).mean() > 1e-3  # torch's own initialisation gives 1e-9
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.shared
@pytest.mark.parametrize("name", FOLDED)
def test_folded_nets_equal_the_published_ones(name: str, shared: Path) -> None:
    spec = importlib.util.spec_from_file_location("mcu_nets", shared / "mcu_nets.py")
    assert spec
    assert spec.loader
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    expected, _ = reference.load(shared / f"{name}.pth")
    model = build(name, weights=shared / f"{name}.pth").eval()
    assert_same(model.state_dict(), expected.state_dict())
    images = torch.rand(2, 3, 128, 128) * 2 - 1
    with torch.no_grad():
        assert torch.equal(model(images), expected(images))


def test_tiny_has_every_kind_of_layer_and_learns() -> None:
    model = build("tiny")
    convs = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert any(conv.groups == conv.in_channels > 1 for conv in convs)
    assert any(conv.kernel_size == (1, 1) and conv.stride == (2, 2) for conv in convs)
    logits = model(torch.randn(4, 3, 32, 32))
    assert logits.shape == (4, 10)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Names of other libraries


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v2", "squeezenet1_1", "timm:test_resnet.r160_in1k", "timm:test_byobnet"]
)
def test_classifiers_of_other_libraries(name: str) -> None:
    model = build(name, classes=7).eval()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("name", ["smp:DeepLabV3/mobilenet_v2", "smp:FPN/tu-test_resnet", "smp:FCN/resnet18"])
def test_segmentation_models(name: str) -> None:
    model = build(name, classes=3).eval()
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3, 64, 64)


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("head", ["FPN", "UPerNet", "DeepLabV3", "DeepLabV3Plus", "PSPNet", "Unet", "FCN"])
def test_frozen_encoders_of_segmentation_models_run_apart(head: str) -> None:
    """Several processes and feature caches need that."""
    model, x = build(f"smp:{head}/mobilenet_v2", classes=3).eval(), torch.randn(2, 3, 64, 96)
    plain = model(x)
    gf.accelerate_(gf.apply_(model, gf.GradientFilter(2), "decoder, segmentation_head"))
    parts = gf.split(model)
    assert torch.equal(parts.tail(parts.prefix(x)), model(x))
    assert torch.allclose(model(x), plain, rtol=1e-3, atol=1e-4)
    copied = copy.deepcopy(gf.restore_(model))
    assert torch.equal(copied(x), plain)


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize("accelerated", [False, True])
def test_pictures_that_a_segmentation_model_cannot_take_are_refused(accelerated: bool) -> None:
    model = build("smp:FPN/mobilenet_v2", classes=3).eval().requires_grad_(False)
    if accelerated:
        gf.accelerate_(model)
    with pytest.raises(gf.GradFilterError, match=r"multiples of 32 for this model, not 70 by 64\."):
        model(torch.zeros(1, 3, 70, 64))
    model(torch.zeros(1, 3, 96, 64))


@pytest.mark.usefixtures("vision")
def test_fcn_reads_the_encoder_at_an_eighth_where_it_can_be_dilated() -> None:
    with torch.device("meta"):
        dilated, pooling = build("smp:FCN/resnet18", classes=3), build("smp:FCN/vgg11", classes=3)
        images = torch.zeros(1, 3, 70, 64)  # no multiple of 8
    assert dilated.encoder(images)[-1].shape == (1, 512, 9, 8)
    assert pooling.encoder(images)[-1].shape[2:] == (2, 2)
    assert dilated(images).shape == pooling(images).shape == (1, 3, 70, 64)
    convs = {name: layer for name, layer in dilated.named_modules() if isinstance(layer, nn.Conv2d)}
    shapes = {name: tuple(conv.weight.shape) for name, conv in convs.items() if name[:8] != "encoder."}
    assert shapes == {
        "decoder.convs.0.0": (128, 512, 3, 3),
        "decoder.convs.1.0": (128, 128, 3, 3),
        "decoder.conv_cat.0": (128, 640, 3, 3),
        "segmentation_head": (3, 128, 1, 1),
    }


@pytest.mark.usefixtures("vision")
def test_torchvision_segmentation_does_not_download_its_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a download")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    model = build("lraspp_mobilenet_v3_large", classes=4).eval()
    assert model(torch.randn(1, 3, 64, 64))["out"].shape == (1, 4, 64, 64)


@pytest.mark.usefixtures("vision")
def test_options_reach_the_constructor() -> None:
    assert build("resnet18", norm_layer=nn.InstanceNorm2d).bn1.__class__ is nn.InstanceNorm2d
    assert build("timm:test_resnet", in_chans=1)(torch.randn(2, 1, 64, 64)).shape == (2, 1000)


@pytest.mark.usefixtures("vision")
def test_names_can_be_built() -> None:
    listed = names()
    assert listed[:4] == ["mcunet-5fps", "proxyless-w0.3", "mbv2-w0.35", "tiny"]
    assert {"resnet18", "mobilenet_v2", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"} < set(listed)
    assert not any(name.startswith(("fasterrcnn", "quantized", "raft")) for name in listed)
    assert len(listed) == len(set(listed))


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("resnet81", "There is no model resnet81. Did you mean resnet18"),
        ("mcunet-5fp", "Did you mean mcunet-5fps"),
        ("fasterrcnn_resnet50_fpn", "There is no model"),
        ("", "There is no model"),
        ("timm:test_resnt", "timm has no model test_resnt. Did you mean test_resnet"),
        ("timm:hf-hub:someone/something", "timm has no model"),
        (
            "smp:DeeplabV3/mobilenet_v2",
            "smp has no head 'DeeplabV3' (smp:HEAD/ENCODER). Did you mean DeepLabV3",
        ),
        ("smp:Unet", "smp has no encoder '' (smp:HEAD/ENCODER)."),
        (
            "smp:Unet/mobilenetv2",
            "smp has no encoder 'mobilenetv2' (smp:HEAD/ENCODER). Did you mean mobilenet_v2",
        ),
        ("smp:Unet/tu-nothing", "smp has no encoder 'tu-nothing'"),
        ("no_such.module:net", "names a module that Python does not find: no_such."),
        ("torch.no_such:net", "names a module that Python does not find: torch.no_such."),
        ("torch.nn:Liner", "torch.nn has no function Liner. Did you mean Linear"),
        (":net", "is no model name"),
        ("torch.nn:", "is no model name"),
        ("../torch:net", "is no model name"),
    ],
)
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        build(name)
    assert says in str(caught.value)


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("tiny", {"classes": 0}, "at least one class, not 0"),
        ("tiny", {"width": 3}, "tiny cannot be built with {'width': 3}"),
        ("resnet18", {"width": 3}, "resnet18 cannot be built with {'width': 3}"),
        ("resnet18", {"classes": 3, "num_classes": 4}, "does not take num_classes as an option"),
        ("timm:test_resnet", {"pretrained": True}, "does not take pretrained as an option"),
        ("smp:Unet/resnet18", {"encoder_weights": "imagenet"}, "does not take encoder_weights as an option"),
        ("fcn_resnet50", {"weights_backbone": "DEFAULT"}, "does not take weights_backbone as an option"),
    ],
)
def test_options_that_do_not_fit(name: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        build(name, **arguments)
    assert says in str(caught.value)


# Factories of the user


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_nets.py").write_text(
        """
from torch import nn, float64

def counted(num_classes=2, width=4):
    return nn.Sequential(nn.Linear(width, num_classes))

def fixed():
    body = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU())
    return nn.Sequential(body, nn.Flatten(), nn.Linear(6, 5, bias=False, dtype=float64))

def pixels():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 1))

def single():
    return nn.Linear(3, 2)

def headless():
    return nn.ReLU()

def no_model():
    return 3

def broken():
    raise TypeError("my own mistake")
"""
    )
    (tmp_path / "my_broken.py").write_text("import something_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("factories")
def test_factory_with_a_number_of_classes() -> None:
    assert build("my_nets:counted", width=3)(torch.ones(1, 3)).shape == (1, 2)
    assert build("my_nets:counted", classes=9)(torch.ones(1, 4)).shape == (1, 9)


@pytest.mark.usefixtures("factories")
def test_factory_without_one_gets_a_new_last_layer() -> None:
    head = build("my_nets:fixed", classes=3).get_submodule("2")
    assert isinstance(head, nn.Linear)
    assert (head.out_features, head.weight.dtype) == (3, torch.float64)
    assert head.bias is None
    assert build("my_nets:fixed").get_submodule("2").out_features == 5
    assert build("my_nets:pixels", classes=3)(torch.ones(1, 3, 8, 8)).shape == (1, 3, 8, 8)
    assert build("my_nets:single", classes=7)(torch.ones(1, 3)).shape == (1, 7)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("my_nets:headless", ModelError, "has no linear or 1x1 layer to replace"),
        ("my_nets:no_model", ModelError, "my_nets:no_model returned a int, not a torch.nn.Module"),
        ("my_nets:cuonted", ModelError, "my_nets has no function cuonted. Did you mean counted?"),
        ("my_nets:broken", TypeError, "my own mistake"),
        ("my_broken:net", ModuleNotFoundError, "something_not_installed"),
    ],
)
def test_factories_that_fail(name: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        build(name, classes=3)
    assert says in str(caught.value)


# Weight files that fit


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".th"])
def test_every_format(suffix: str, tmp_path: Path) -> None:
    source, target = build("tiny"), build("tiny")
    assert load_weights(target, saved(source.state_dict(), tmp_path / f"net{suffix}")) == ()
    assert_same(target.state_dict(), source.state_dict())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"lr": 0.1}},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}},
        lambda state: {n: t for n, t in state.items() if not n.endswith("num_batches_tracked")},
    ],
    ids=["state_dict", "model", "module", "both", "no counters"],
)
def test_every_wrapping(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    source, target = build("tiny"), build("tiny")
    load_weights(target, saved(wrap(source.state_dict()), tmp_path / "net.pth"))
    assert_same(target.state_dict(), source.state_dict())


def test_old_serialisation_and_half_precision(tmp_path: Path) -> None:
    source, target = build("tiny"), build("tiny")
    torch.save(source.half().state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    load_weights(target, tmp_path / "old.pth")
    assert_same(target.state_dict(), source.float().state_dict())


def test_names_that_torchvision_has_changed(tmp_path: Path) -> None:
    dense = nn.ModuleDict({"norm1": nn.BatchNorm2d(2), "conv2": nn.Conv2d(2, 2, 1)})
    mlp = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Dropout(), nn.Linear(2, 2))
    model = nn.ModuleDict({"denselayer1": dense, "mlp": mlp})
    expected = {name: torch.full_like(tensor, 2) for name, tensor in model.state_dict().items()}
    changes = {"norm1": "norm.1", "conv2": "conv.2", "mlp.0": "mlp.linear_1", "mlp.3": "mlp.linear_2"}
    old = dict(expected)
    for new, former in changes.items():
        old = {name.replace(new, former): tensor for name, tensor in old.items()}
    assert not old.keys() & expected.keys()
    load_weights(model, saved(old, tmp_path / "old.pth"))
    assert_same(model.state_dict(), expected)


@pytest.mark.shared
@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(
    ("name", "file", "head"),
    [
        ("resnet18", "resnet18_imagenet1k.pth", "fc."),
        ("mobilenet_v2", "mobilenet_v2-b0353104.pth", "classifier.1."),
        ("mcunet-5fps", "mcunet-5fps.pth", "head."),
    ],
)
def test_published_weights_and_a_new_head(name: str, file: str, head: str, shared: Path) -> None:
    published = torch.load(shared / file, weights_only=True)
    published = published.get("state_dict", published)
    assert_same(build(name, weights=shared / file).state_dict(), published)
    assert_same(build(name, weights=shared / file, classes=1000).state_dict(), published)

    state = build(name, weights=str(shared / file), classes=37).state_dict()
    assert state[f"{head}weight"].shape[0] == state[f"{head}bias"].shape[0] == 37
    body = {key: tensor for key, tensor in published.items() if not key.startswith(head)}
    assert_same({key: state[key] for key in body}, body)
    assert state.keys() == published.keys()


@pytest.mark.shared
@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(
    ("name", "file", "part", "head"),
    [
        ("smp:DeepLabV3/mobilenet_v2", "mobilenet_v2-b0353104.pth", "encoder", "classifier."),
        ("smp:Unet/resnet18", "resnet18_imagenet1k.pth", "encoder", "fc."),
        ("smp:FCN/resnet18", "resnet18_imagenet1k.pth", "encoder", "fc."),
    ],
)
def test_classification_weights_go_into_the_encoder(
    name: str, file: str, part: str, head: str, shared: Path
) -> None:
    published = torch.load(shared / file, weights_only=True)
    expected = {key: tensor for key, tensor in published.items() if not key.startswith(head)}
    model = build(name, classes=3)
    unused = load_weights(model, shared / file)
    assert unused == tuple(sorted(published.keys() - expected.keys()))
    assert_same(model.get_submodule(part).state_dict(), expected)
    assert_same(build(name, weights=shared / file).get_submodule(part).state_dict(), expected)


def test_classification_weights_go_into_the_backbone(tmp_path: Path) -> None:
    classifier = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 1), "fc": nn.Linear(4, 9)})
    file = saved(classifier.state_dict(), tmp_path / "classifier.safetensors")
    backbone = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 1)})
    model = nn.ModuleDict({"backbone": backbone, "classifier": nn.Conv2d(4, 2, 1)})
    assert load_weights(model, file) == ("fc.bias", "fc.weight")
    assert_same(
        backbone.state_dict(), {k: t for k, t in classifier.state_dict().items() if k.startswith("conv.")}
    )


@pytest.mark.usefixtures("vision")
@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("tiny", 1),
        ("squeezenet1_1", 1),
        ("timm:test_resnet", 1),
        ("smp:FPN/tu-test_resnet", 1),
        ("lraspp_mobilenet_v3_large", 2),
    ],
)
def test_trained_model_with_other_classes_keeps_all_but_its_heads(
    name: str, heads: int, tmp_path: Path
) -> None:
    trained = build(name, classes=11)
    file = saved(trained.state_dict(), tmp_path / "trained.safetensors")
    assert_same(build(name, classes=11, weights=file).state_dict(), trained.state_dict())

    model = build(name, classes=4)
    unused = load_weights(model, file)
    assert len(unused) == 2 * heads
    kept = {key: tensor for key, tensor in trained.state_dict().items() if key not in unused}
    assert_same({key: model.state_dict()[key] for key in kept}, kept)
    assert all(len(model.state_dict()[key]) == 4 for key in unused)


def test_trained_head_is_not_lost_unless_classes_are_asked_for(tmp_path: Path) -> None:
    file = saved(build("tiny", classes=37).state_dict(), tmp_path / "pets.safetensors")
    with pytest.raises(WeightsError, match=r"has 37 classes and Tiny has 10: ask for classes=37 to keep"):
        build("tiny", weights=file)


# Weight files that do not fit or cannot be read


def refusal(model: nn.Module, file: Path) -> str:
    """Return the message of the refusal, having checked that it names the file and left the model alone."""
    before = cloned(model)
    with pytest.raises(WeightsError) as caught:
        load_weights(model, file)
    assert_same(model.state_dict(), before)
    message = str(caught.value)
    assert str(file) in message
    assert "\n" not in message
    return message


def test_misfits_are_counted_and_the_first_three_named(tmp_path: Path) -> None:
    state = build("tiny").state_dict()
    wrong = {
        **{name: tensor for name, tensor in state.items() if not name.startswith("residual.body")},
        "stem.0.weight": torch.zeros(16, 3, 5, 5),
        **{f"extra.{number}": torch.zeros(1) for number in range(5)},
    }
    message = refusal(build("tiny"), saved(wrong, tmp_path / "wrong.safetensors"))
    body = [key for key in state if key.startswith("residual.body") and not key.endswith("tracked")]
    assert message.endswith(
        f"does not fit Tiny: {len(body)} missing ({body[0]}, {body[1]}, {body[2]}, ...); "
        "5 unexpected (extra.0, extra.1, extra.2, ...); "
        "1 of another shape (stem.0.weight 16x3x5x5 for 16x3x3x3)."
    )


def test_other_widths_are_no_other_classes(tmp_path: Path) -> None:
    def net(width: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 1), nn.Conv2d(width, width, 3, groups=width), nn.Conv2d(width, 2, 1)
        )

    message = refusal(net(4), saved(net(8).state_dict(), tmp_path / "wide.pth"))
    assert "5 of another shape (0.weight 8x3x1x1 for 4x3x1x1, 0.bias 8 for 4, 1.weight 8x1x3x3 for" in message


def test_two_heads_of_different_numbers_are_no_head(tmp_path: Path) -> None:
    file = saved(nn.ModuleList([nn.Linear(2, 5), nn.Linear(2, 6)]).state_dict(), tmp_path / "two.pth")
    assert "4 of another shape" in refusal(nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)]), file)


@pytest.mark.usefixtures("vision")
def test_weights_of_another_network_do_not_fit_the_encoder(tmp_path: Path) -> None:
    file = saved(build("tiny").state_dict(), tmp_path / "tiny.safetensors")
    message = refusal(build("smp:Unet/resnet18"), file)
    assert (
        "does not fit ResNetEncoder: 100 missing (conv1.weight, bn1.weight, bn1.bias, ...); 44 unexp"
        in message
    )


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    assert refusal(build("tiny"), tmp_path / "none.pth").endswith("does not exist.")
    assert refusal(build("tiny"), tmp_path / f"{'long' * 100}.pth").endswith("does not exist.")
    assert refusal(build("tiny"), tmp_path).endswith("is a directory, not a weight file.")
    (tmp_path / "net.onnx").touch()
    assert "must end in .safetensors, .pth, .pt, .th" in refusal(build("tiny"), tmp_path / "net.onnx")


@pytest.mark.parametrize("kept", [0, 1, 7, 60, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["new.pth", "old.pth", "net.safetensors"])
def test_truncated_files(kind: str, kept: float, tmp_path: Path) -> None:
    file, state = tmp_path / kind, build("tiny").state_dict()
    if kind == "old.pth":
        torch.save(state, file, _use_new_zipfile_serialization=False)
    else:
        saved(state, file)
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    assert "is damaged or not a weight file" in refusal(build("tiny"), file)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize(
    "content", [b"hello, this is no weight file\n", b"<html>404</html>", bytes(range(256)) * 9]
)
def test_files_of_another_kind(content: bytes, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"net{suffix}"
    file.write_bytes(content)
    assert "is damaged or not a weight file" in refusal(build("tiny"), file)


@pytest.mark.parametrize(
    "content",
    [3, [torch.ones(1)], {}, {"weight": 1}, {1: torch.ones(1)}, {"weight": torch.eye(2).to_sparse()}],
    ids=["number", "list", "empty", "values", "keys", "sparse"],
)
def test_contents_that_are_no_state_dict(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "net.pth")
    assert "holds no state dict" in refusal(nn.Linear(2, 2), tmp_path / "net.pth")


class Hostile:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize("protocol", [None, 0, 2, 4])
def test_hostile_pickles_do_not_run(protocol: int | None, tmp_path: Path) -> None:
    file, canary = tmp_path / "net.pth", tmp_path / "canary"
    content = {"weight": torch.ones(2, 2), "bias": Hostile(canary)}
    if protocol is None:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(Hostile(canary), protocol))
    message = refusal(nn.Linear(2, 2), file)
    assert not canary.exists()
    assert "holds more than tensors" in message or protocol == 4  # torch stops before it knows what for
    assert "weights_only" not in message

    if protocol is not None:  # the canary does sing
        pickle.loads(file.read_bytes())  # noqa: S301
        assert canary.exists()


# torchvision and what is built on it


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let `import_module` of the helper answer from a list; return the list of the names it was asked for."""

    def answer_with(*answers: Exception | ModuleType) -> list[str]:
        asked: list[str] = []

        def import_module(name: str) -> ModuleType:
            answer = answers[min(len(asked), len(answers) - 1)]
            asked.append(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(optional, "import_module", import_module)
        return asked

    return answer_with


NO_NMS = RuntimeError("operator torchvision::nms does not exist")


def test_broken_torchvision_is_mended_once(imports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, declared = ModuleType("torchvision"), []
    asked = imports(NO_NMS, module)
    half_imported = {"torchvision": 1, "torchvision.extension": 2, "torchvisionary": 3, "torch": 4}
    monkeypatch.setattr(_torchvision, "sys", SimpleNamespace(modules=half_imported))
    monkeypatch.setattr(_torchvision, "_declare_missing_operators", lambda: declared.append("nms"))
    with pytest.warns(RuntimeWarning, match="The real cure is the matching wheel"):
        assert _torchvision.torchvision() is module
    assert _torchvision.torchvision() is module  # without a second warning
    assert asked == ["torchvision"] * 3
    assert declared == ["nms"]
    assert half_imported == {"torchvisionary": 3, "torch": 4}


@pytest.mark.parametrize(
    "error", [RuntimeError("something else"), ModuleNotFoundError("numpy", name="numpy")]
)
def test_other_import_errors_pass_through(error: Exception, imports: Any) -> None:
    asked = imports(error)
    with pytest.raises(type(error)) as caught:
        build("resnet18")
    assert caught.value is error
    assert asked == ["torchvision"]


@pytest.mark.parametrize(
    ("name", "extra"),
    [("resnet18", "vision"), ("timm:resnet18", "vision"), ("smp:Unet/resnet18", "seg")],
)
def test_missing_torchvision(name: str, extra: str, imports: Any) -> None:
    imports(ModuleNotFoundError("No module named 'torchvision'", name="torchvision"))
    with pytest.raises(ModelError) as caught:
        build(name)
    assert str(caught.value).endswith(f'torchvision is not installed: pip install "gradfilter[{extra}]".')
    assert names() == ["mcunet-5fps", "proxyless-w0.3", "mbv2-w0.35", "tiny"]


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("timm:resnet18", "timm", "vision"), ("smp:Unet/resnet18", "segmentation_models_pytorch", "seg")],
)
def test_missing_library(name: str, module: str, extra: str, imports: Any) -> None:
    imports(ModuleType("torchvision"), ModuleNotFoundError(f"No module named '{module}'", name=module))
    with pytest.raises(ModelError) as caught:
        build(name)
    assert str(caught.value) == f'{module} is not installed: pip install "gradfilter[{extra}]".'


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_import_is_lazy() -> None:
    run(
        """
import sys, gradfilter.models
assert gradfilter.models.build("tiny")
heavy = {"torchvision", "timm", "segmentation_models_pytorch", "PIL"} & sys.modules.keys()
assert not heavy, heavy
"""
    )


def test_public_names_wait_for_torch_only_where_they_need_it() -> None:
    run(
        """
import sys, gradfilter
assert not any(hasattr(gradfilter, name) for name in ("_private", "no_such", "__wrapped__"))
assert "torch" not in sys.modules
assert not hasattr(gradfilter, "METHODS")
names = dir(gradfilter)
assert {"HOSVD", "Method", "apply_", "models"} <= set(names)
space = {}
exec("from gradfilter import *", space)
assert all(space[name] is getattr(gradfilter, name) for name in names)
"""
    )


@pytest.mark.usefixtures("vision")
def test_real_torchvision_in_a_fresh_process_warns_at_most_once() -> None:
    run(
        """
import warnings
from gradfilter.models import build, names
try:
    import torchvision
    broken = False
except RuntimeError as error:
    broken = "torchvision::nms" in str(error)
    assert broken
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    build("timm:test_resnet"), names()
about = [warning for warning in caught if "The real cure" in str(warning.message)]
assert len(about) == broken, caught
"""
    )


@pytest.mark.usefixtures("vision")
def test_torchvision_by_its_path() -> None:
    run(
        """
from gradfilter.errors import ModelError
from gradfilter.models import build
assert build("torchvision.models:resnet18", classes=3)
try:
    build("torchvision:resnet18")
except ModelError as error:
    assert str(error).startswith("torchvision has no function resnet18."), error
"""
    )


def test_weights_that_are_on_the_machine_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name torchvision gives them, and only if the checksum in that name is theirs."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    model = build("tiny", classes=3)
    torch.save(model.state_dict(), folder / "saved")
    digest = hashlib.sha256((folder / "saved").read_bytes()).hexdigest()[:8]
    wrong = folder / f"tiny-{'0' * 8}.pth"
    (folder / "saved").rename(wrong)
    with pytest.raises(WeightsError) as caught:
        build("tiny", classes=3, weights="auto")
    assert str(caught.value) == (
        "There are no pretrained weights of tiny on this machine; give a file of weights."
    )
    wrong.rename(folder / f"tiny-{digest}.pth")
    found = build("tiny", classes=3, weights="auto")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))


@pytest.mark.usefixtures("vision")
def test_weights_of_the_encoder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(WeightsError, match="no pretrained weights of resnet18 on this machine"):
        build("smp:FCN/resnet18", classes=3, weights="auto")
    expected = build("resnet18").state_dict()
    saved(expected, tmp_path / "saved.pth")
    digest = hashlib.sha256((tmp_path / "saved.pth").read_bytes()).hexdigest()[:8]
    (tmp_path / "saved.pth").rename(tmp_path / "checkpoints" / f"resnet18-{digest}.pth")
    found = build("smp:FCN/resnet18", classes=3, weights="auto").get_submodule("encoder").state_dict()
    assert_same(found, {name: tensor for name, tensor in expected.items() if not name.startswith("fc.")})
