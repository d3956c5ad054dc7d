"""A callback for the Trainer of Hugging Face's transformers."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import GradFilterError
from ..files import replacing
from ..models._torchvision import neighbour
from ..plans import NormPolicy, Plan
from ..selection import Layers
from ..state import load_method_state_, method_state
from ..surgery import Methods, has_plan
from .recipe import Recipe

__all__ = ["GradFilterCallback"]

_FILE = "gradfilter.safetensors"
_TrainerCallback: Any = neighbour("transformers", "transformers").TrainerCallback


class GradFilterCallback(_TrainerCallback):  # type: ignore[misc]
    """Train the planned layers of a model: ``Trainer(model, ..., callbacks=[GradFilterCallback(...)])``.

    The plan is applied when the Trainer has been made, before its optimizer is; ``gf.restore_(model)`` takes
    it away. What the methods remember is written into each checkpoint's folder, and read when the training
    goes on from it.

    >>> import gradfilter as gf
    >>> callback = GradFilterCallback(gf.GradientFilter(patch=2), layers="last:4")

    Args:
        plan, layers, norm, example: as for ``gf.apply_``.
        accelerate: run what can be traced fused, as ``gf.accelerate_`` does.
    """

    def __init__(
        self,
        plan: Plan | Methods,
        layers: Layers | None = None,
        *,
        norm: NormPolicy | None = None,
        example: Tensor | None = None,
        accelerate: bool = True,
    ) -> None:
        super().__init__()
        self.recipe = Recipe(plan, layers, norm, example, accelerate)

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        self.recipe.apply_(model, by_parts=True)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Optimizer, **others: Any
    ) -> None:
        if not has_plan(model):  # the Trainer's model_init made a new one
            self.recipe.apply_(model, by_parts=True)
        _check_optimized(model, optimizer)
        if state.global_step:
            _load_(model, _resumed_folder(args, state) / _FILE)

    def on_save(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        if state.is_world_process_zero and _own_folder(args, state).is_dir():
            _save(model, _own_folder(args, state) / _FILE)


def _check_optimized(model: nn.Module, optimizer: Optimizer) -> None:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise GradFilterError(
                f"The optimizer does not have {name}, which the plan added to the model later; give the "
                "Trainer a model in place of model_init, and let it make the optimizer."
            )


def _own_folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _resumed_folder(args: Any, state: Any) -> Path:
    """The Trainer does not say where it resumes from: its own folder, unless the arguments name another."""
    given = args.resume_from_checkpoint
    return Path(given) if given and Path(given).is_dir() else _own_folder(args, state)


def _save(model: nn.Module, file: Path) -> None:
    state = {name: value.detach().clone().contiguous() for name, value in method_state(model).items()}
    with replacing(file) as partial:
        save_file(state, partial, metadata={"weights": _fingerprint(model)})


def _load_(model: nn.Module, file: Path) -> None:
    """Let the methods remember what they did at a checkpoint, if it is that of the weights they have."""
    where = "name the folder that you resume from in TrainingArguments(resume_from_checkpoint=...)"
    if not file.is_file():
        raise GradFilterError(
            f"There is no {file}, so the methods cannot go on from where they were; {where}."
        )
    with safe_open(file, "pt") as found:
        if found.metadata()["weights"] != _fingerprint(model):
            raise GradFilterError(f"{file} belongs to other weights than those that were resumed; {where}.")
        load_method_state_(model, {name: found.get_tensor(name) for name in found.keys()})  # noqa: SIM118


def _fingerprint(model: nn.Module) -> str:
    """Of the weights that train."""
    trained = {name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad}
    return sha256(save({name: value.contiguous() for name, value in trained.items()})).hexdigest()
