"""Exported files give the model's outputs, or are not there."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradfilter as gf
from gradfilter import exports as module
from gradfilter.errors import GradFilterError
from gradfilter.exports import export

SUFFIXES = {"safetensors": ".safetensors", "state_dict": ".pth", "onnx": ".onnx", "executorch": ".pte"}
needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))), reason="gradfilter[onnx] is not installed"
)
needs_executorch = pytest.mark.skipif(
    find_spec("executorch") is None, reason="gradfilter[executorch] is not installed"
)
KINDS = [
    "safetensors",
    "state_dict",
    pytest.param("onnx", marks=needs_onnx),
    pytest.param("executorch", marks=[needs_executorch, pytest.mark.filterwarnings("ignore")]),
]


def changed_model() -> nn.Module:
    """With a plan applied, accelerated, after a step of training."""
    torch.manual_seed(0)
    model = gf.apply_(gf.models.build("tiny", classes=3), gf.GradientFilter(2), "last:2", norm="batch")
    gf.accelerate_(model)
    model.train()(torch.randn(4, 3, 32, 32)).sum().backward()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_model_is_exported_and_stays_as_it_is(tmp_path: Path, kind: Any) -> None:
    model, example = changed_model(), torch.randn(2, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    classes = [type(part) for part in model.modules()]
    modes = [part.training for part in model.modules()]
    trained = [p.requires_grad for p in model.parameters()]
    file = export(model, example, tmp_path / f"model{SUFFIXES[kind]}", kind)
    assert list(tmp_path.iterdir()) == [file]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [type(part) for part in model.modules()] == classes
    assert [part.training for part in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == trained


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trained_in_channels_last_is_exported_for_all_to_read(tmp_path: Path, kind: Any) -> None:
    model = changed_model().to(memory_format=torch.channels_last)
    example = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    file = export(model, example, tmp_path / f"model{SUFFIXES[kind]}", kind)
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("kind", ["safetensors", "state_dict"])
def test_weights_load_into_the_plain_model(tmp_path: Path, kind: Any) -> None:
    model, x = changed_model(), torch.randn(2, 3, 32, 32)
    file = export(model, x, tmp_path / f"model{SUFFIXES[kind]}", kind)
    plain = gf.models.build("tiny", classes=3)
    fresh = plain.eval()(x)
    loaded = gf.models.build("tiny", classes=3, weights=file).eval()(x)
    expected = gf.restore_(model).eval()(x)
    assert torch.equal(loaded, expected)
    assert not torch.allclose(fresh, expected)
    if kind == "state_dict":
        plain.load_state_dict(torch.load(file, weights_only=True))


@needs_onnx
def test_a_program_takes_any_batch_if_the_example_had_two(tmp_path: Path) -> None:
    import onnxruntime

    model = changed_model()
    file = export(model, torch.randn(2, 3, 32, 32), tmp_path / "a.onnx", "onnx")
    x = torch.randn(5, 3, 32, 32)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": x.numpy()})
    expected = gf.restore_(model).eval()(x).detach()
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


class Several(nn.Module):
    """A dict of outputs, as segmentation models give."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.conv(x), "aux": self.conv(x).mean((2, 3))}


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_several_outputs(tmp_path: Path, kind: Any) -> None:
    assert export(Several(), torch.randn(1, 3, 8, 8), tmp_path / f"a{SUFFIXES[kind]}", kind).exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("off", [False, True])
def test_a_file_with_other_outputs_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, off: bool
) -> None:
    """One thousandth of the largest output is too much; a millionth is not."""
    tensors = module._tensors
    calls: list[int] = []

    def shifted(outputs: Any) -> list[Any]:
        calls.append(1)  # the first call has the model's own outputs
        found = tensors(outputs)
        return [t + t.abs().max() * (1e-3 if off else 1e-6) for t in found] if len(calls) == 1 else found

    monkeypatch.setattr(module, "_tensors", shifted)
    file = tmp_path / f"a{SUFFIXES[kind]}"
    file.write_bytes(b"an older one")
    if off:
        with pytest.raises(GradFilterError, match="does not give the model's outputs"):
            export(nn.Conv2d(3, 2, 3), torch.randn(1, 3, 8, 8), file, kind)
        assert file.read_bytes() == b"an older one"
    else:
        export(nn.Conv2d(3, 2, 3), torch.randn(1, 3, 8, 8), file, kind)
        assert file.read_bytes() != b"an older one"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("kind", ["safetensors", "state_dict"])
def test_a_full_disk_is_one_sentence(tmp_path: Path, kind: Any) -> None:
    resource = pytest.importorskip("resource", reason="needs limits for files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = tmp_path / f"a{SUFFIXES[kind]}"
    file.write_bytes(b"an older one")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        with pytest.raises(GradFilterError, match=r"cannot be written \(.*File too large"):
            export(nn.Conv2d(3, 1000, 3), torch.randn(1, 3, 8, 8), file, kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == b"an older one"


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor(float(x.sum().item()) if x.mean() > 0 else 1.0)


@needs_onnx
def test_a_model_that_cannot_be_exported_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(GradFilterError, match=r"^The model cannot be exported to ONNX: [^\n]*$"):
        export(Untraceable(), torch.randn(1, 3, 8, 8), tmp_path / "a.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_public_name_is_the_function_whatever_was_imported_before() -> None:
    import gradfilter.training.run_folder  # noqa: F401  which imports the module

    assert gf.export is export


def test_errors_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Conv2d(3, 2, 3), torch.randn(1, 3, 8, 8)
    kind: Any = "onxx"
    with pytest.raises(GradFilterError, match="Did you mean onnx"):
        export(model, x, tmp_path / "a.onnx", kind)
    with pytest.raises(GradFilterError, match=r"must end in \.pth or \.pt or \.th for kind='state_dict'"):
        export(model, x, tmp_path / "a.safetensors", "state_dict")
    with pytest.raises(GradFilterError, match=r"cannot be written \(No such file or directory\)"):
        export(model, x, tmp_path / "none" / "a.pth", "state_dict")

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name.partition(".")[0])

    monkeypatch.setattr(module, "import_module", missing)
    for kind in ("onnx", "executorch"):
        with pytest.raises(GradFilterError, match=rf'not installed: pip install "gradfilter\[{kind}\]"\.$'):
            export(model, x, tmp_path / f"a{SUFFIXES[kind]}", kind)
    assert list(tmp_path.iterdir()) == []
