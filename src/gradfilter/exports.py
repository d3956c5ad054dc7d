"""A trained model as a file for others: checked against the model before the file is put in place."""

from __future__ import annotations

import copy
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils import _pytree

from .errors import GradFilterError, nearest
from .files import replacing
from .merging import has_adapters, merge_
from .surgery import restore_

__all__ = ["Kind", "export", "write_safetensors"]

Kind = Literal["safetensors", "state_dict", "onnx", "executorch"]

_SUFFIXES = {
    "safetensors": (".safetensors",),
    "state_dict": (".pth", ".pt", ".th"),
    "onnx": (".onnx",),
    "executorch": (".pte",),
}
_TOLERANCE = 1e-4  # of the largest output


def export(
    model: nn.Module, example: Tensor, file: str | os.PathLike[str], kind: Kind = "safetensors"
) -> Path:
    """Write the model's inference form to a file, plan and acceleration taken away; the model stays as it is.

    Adapters are merged into their weights; what cannot be merged, as ``LiteResidual``, is refused.

    Whatever is written is first read back and run on the example: where the outputs are not the model's, no
    file is left. ``safetensors`` and ``state_dict`` load into the unmodified model. ``onnx`` runs in
    onnxruntime, ``executorch`` on its runtime.

    >>> import tempfile, gradfilter as gf
    >>> model = gf.apply_(gf.models.build("tiny", classes=3), gf.GradientFilter(2), "last:2")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = gf.export(model, torch.zeros(1, 3, 32, 32), f"{folder}/tiny.safetensors")
    ...     plain = gf.models.build("tiny", classes=3, weights=file)

    Args:
        example: a batch of inputs. With two or more samples an ONNX program takes any number of them, where
            the model allows it; an ExecuTorch program takes batches like the example alone.
    """
    if kind not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise GradFilterError(f"There is no kind of export {kind!r}; take {known}.{nearest(kind, _SUFFIXES)}")
    target = Path(file).expanduser()
    if target.suffix not in _SUFFIXES[kind]:
        raise GradFilterError(f"{file} must end in {' or '.join(_SUFFIXES[kind])} for kind={kind!r}.")
    writers: dict[str, Callable[[nn.Module, Tensor, Path], list[Any]]] = {
        "safetensors": _through_safetensors,
        "state_dict": _through_state_dict,
        "onnx": _through_onnx,
        "executorch": _through_executorch,
    }
    plain = _plain(model).to("cpu").eval().requires_grad_(False)
    sample = example.detach().to("cpu")
    with torch.no_grad():
        expected = _tensors(plain(sample))
    with replacing(target) as partial:
        found = writers[kind](plain, sample, partial)
        _check_same(found, expected, kind)
    return target


def _plain(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    return merge_(copied) if has_adapters(copied) else restore_(copied)


def write_safetensors(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """The model's state dict as a file, whole or not at all, with no check."""
    with replacing(file) as partial:
        _save_safetensors(model, partial)


def _save_safetensors(model: nn.Module, file: Path) -> None:
    try:
        save_file(_state(model), file)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict on the CPU. Tensors that share memory, as tied weights do, become separate ones."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise GradFilterError(f"The model cannot be exported: its state {name} is not a tensor.")
        tensor = value.detach().to("cpu").contiguous()
        place = tensor.untyped_storage().data_ptr()
        state[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return state


def _through_safetensors(model: nn.Module, example: Tensor, file: Path) -> list[Any]:
    _save_safetensors(model, file)
    return _loaded_outputs(model, load_file(file), example)


def _through_state_dict(model: nn.Module, example: Tensor, file: Path) -> list[Any]:
    made = io.BytesIO()  # torch does not say why it cannot write to a file
    torch.save(_state(model), made)
    file.write_bytes(made.getbuffer())
    return _loaded_outputs(model, torch.load(file, weights_only=True), example)


def _loaded_outputs(model: nn.Module, state: dict[str, Tensor], example: Tensor) -> list[Any]:
    """Outputs with the numbers of the file, and no others: the copy forgets its own first."""
    fresh = copy.deepcopy(model)
    for tensor in fresh.state_dict().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    fresh.load_state_dict(state)
    with torch.no_grad():
        return _tensors(fresh(example))


def _through_onnx(model: nn.Module, example: Tensor, file: Path) -> list[Any]:
    with _exporting("ONNX"):
        runtime = _needed("onnxruntime", "onnx")
        _needed("onnxscript", "onnx")
        free = ({0: torch.export.Dim.AUTO},) if len(example) > 1 else None
        torch.onnx.export(
            model,
            (example,),
            file,
            dynamo=True,
            dynamic_shapes=free,
            input_names=["images"],
            external_data=False,  # one file
            verbose=False,
        )
        session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        outputs = session.run(None, {"images": example.numpy()})
    return [torch.from_numpy(output) for output in outputs]


def _through_executorch(model: nn.Module, example: Tensor, file: Path) -> list[Any]:
    with _exporting("ExecuTorch"):
        exir = _needed("executorch.exir", "executorch")
        partition = _needed("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch")
        runtime = _needed("executorch.runtime", "executorch")
        # XNNPACK orders maps itself, and its passes fail on weights that are channels-last already
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        example = example.contiguous()
        graph = torch.export.export(model, (example,))
        lowered = exir.to_edge_transform_and_lower(graph, partitioner=[partition.XnnpackPartitioner()])
        file.write_bytes(lowered.to_executorch().buffer)
        program = runtime.Runtime.get().load_program(file)
        return _tensors(program.load_method("forward").execute([example]))


def _needed(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise GradFilterError(
            f'kind="{extra}" needs {error.name}, which is not installed: pip install "gradfilter[{extra}]".'
        ) from None


@contextmanager
def _exporting(name: str) -> Iterator[None]:
    """Exporters warn about their own insides, and fail with any error of many lines; ours is one sentence."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OSError, GradFilterError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise GradFilterError(f"The model cannot be exported to {name}: {reason}.") from error
    finally:
        logging.disable(disabled)


def _tensors(outputs: Any) -> list[Any]:
    return [leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _check_same(found: list[Any], expected: list[Any], kind: str) -> None:
    for ours, theirs in zip(found, expected, strict=False):
        if ours.shape == theirs.shape and torch.allclose(
            ours.double(), theirs.double(), rtol=0, atol=_TOLERANCE * _largest(theirs), equal_nan=True
        ):
            continue
        raise GradFilterError(
            f"The {kind} file does not give the model's outputs on the example, so it was not kept; "
            "please tell us which model it is."
        )
    if len(found) != len(expected):
        raise GradFilterError(
            f"The {kind} file gives {len(found)} outputs where the model gives {len(expected)}, so it was "
            "not kept."
        )


def _largest(tensor: Tensor) -> float:
    finite = tensor.double().abs()
    finite = finite[finite.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0
