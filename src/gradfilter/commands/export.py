"""gradfilter export: a trained run as a file for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import GradFilterError
from .options import add_command, add_run

__all__ = ["add"]

KINDS = {
    ".safetensors": "safetensors",
    ".pth": "state_dict",
    ".pt": "state_dict",
    ".onnx": "onnx",
    ".pte": "executorch",
}
EXAMPLES = """\
The suffix says what is written: .safetensors and .pth load into the unmodified model, .onnx runs in
onnxruntime, .pte in ExecuTorch. What is written is read back and run: its outputs must be the model's.

examples:
  gradfilter export runs/1 model.onnx
  gradfilter export runs/1 weights.safetensors --weights last
"""


def add(commands: Any) -> None:
    parser = add_command(
        commands, "export", "write a trained run as ONNX, ExecuTorch, safetensors or state dict", EXAMPLES
    )
    add_run(parser)
    parser.add_argument("file", metavar="FILE", help=f"ends in {', '.join(KINDS)}")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    import torch

    from ..exports import export
    from ..plans import format_bytes
    from ..training.saved import open_run

    kind: Any = KINDS.get(Path(arguments.file).suffix)
    if kind is None:
        raise GradFilterError(
            f"{arguments.file} must end in {', '.join(KINDS)}; the suffix says what is written."
        )
    saved = open_run(arguments.folder, arguments.weights)
    batch = 2 if kind == "onnx" else 1  # with two, the program takes any number
    size = saved.config.size
    example = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    file = export(saved.model, example, arguments.file, kind)
    print(f"{file}: {format_bytes(file.stat().st_size)}, pictures of {size} px; outputs checked.")
