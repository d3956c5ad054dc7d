"""What a forward pass does, from shapes alone: it runs on torch's meta device, where tensors have no numbers.

Because the very code that keeps tensors in training runs here, its bytes are those of training, to the byte.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .calls import asked
from .errors import PlanError
from .geometry import ConvGeometry
from .modules import LAYERS
from .ops.exact_conv import Want

__all__ = ["LayerCall", "Tokens", "Trace", "kept_by", "trace"]

Tokens = Callable[[str], tuple[int, int] | None]  # by layer name: height and width of the map behind tokens


class LayerCall(NamedTuple):
    """One call of a layer."""

    geometry: ConvGeometry
    want: Want


@dataclass
class Trace:
    """What one forward pass did: modules in the order they ran, calls of layers, bytes kept by module."""

    executed: list[str] = field(default_factory=list)
    calls: dict[str, list[LayerCall]] = field(default_factory=lambda: defaultdict(list))
    kept: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def trace(model: nn.Module, example: Tensor, prepare: Callable[[nn.Module], Any], tokens: Tokens) -> Trace:
    """Run a copy of the model, once ``prepare`` has changed it, on the meta device and note what it does."""
    if not isinstance(example, Tensor):
        raise PlanError(f"example must be an input tensor of the model, not {type(example).__name__}.")
    found = Trace()
    try:
        copied = _on_meta(model)
        prepare(copied)
        _run(copied, example, tokens, found)
    except PlanError:
        raise
    except Exception as error:
        place = f"at {found.executed[-1]}: " if found.executed and found.executed[-1] else ""
        raise PlanError(
            f"The model could not be run on the shape {tuple(example.shape)} of the example ({place}"
            f"{str(error).partition(chr(10))[0]}); give an input it accepts, or plan without an example."
        ) from error
    return found


def _run(model: nn.Module, example: Tensor, tokens: Tokens, found: Trace) -> None:
    stack = [""]
    for name, module in model.named_modules():
        _note_modules(name, module, found, stack)
    x = torch.empty_like(example, device="meta", requires_grad=False)
    with ExitStack() as contexts:
        for context in (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            kept_by(stack, found.kept, model),
            _NoteCalls(found, stack, tokens),
            _AsOnRealDevices(),
        ):
            contexts.enter_context(context)
        model(x)


def _note_modules(name: str, module: nn.Module, found: Trace, stack: list[str]) -> None:
    def enter(*_: Any) -> None:
        stack.append(name)
        found.executed.append(name)

    def leave(*_: Any) -> None:
        stack.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


class _NoteCalls(TorchFunctionMode):
    """Notes what the module on top of the stack asks of torch's convolution and linear functions."""

    def __init__(self, found: Trace, stack: list[str], tokens: Tokens) -> None:
        super().__init__()
        self.found, self.stack, self.tokens = found, stack, tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, self.stack[-1]
        call = asked(func, args, kwargs, self.tokens(name))
        if call is not None:
            want = Want(call.x.requires_grad, call.weight.requires_grad)
            self.found.calls[name].append(LayerCall(call.geometry, want))
        return func(*args, **kwargs)


class _AsOnRealDevices(TorchDispatchMode):
    """Batch norm with fixed statistics returns none; on the meta device alone it does, and they are kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_batch_norm.default and not args[5]:
            x = args[0]
            return torch.empty_like(x), x.new_empty(0), x.new_empty(0)
        return func(*args, **(kwargs or {}))


@contextmanager
def kept_by(stack: list[str], kept: dict[str, int], model: nn.Module | None) -> Iterator[None]:
    """Add bytes of unique storages saved for the backward to ``kept``, by the module on top of ``stack``.

    What a layer and another module both keep, as a convolution and the ReLU before it do, is the layer's.
    """
    modules = dict(model.named_modules()) if model else {}
    layers = {name for name, module in modules.items() if isinstance(module, LAYERS)}
    own = [*model.parameters(), *model.buffers()] if model else []
    uncounted = {tensor.untyped_storage()._cdata for tensor in own}
    owners: dict[int, str] = {}
    held: list[Tensor] = []  # so that their addresses are not used again

    def pack(tensor: Tensor) -> Tensor:
        storage, name = tensor.untyped_storage(), stack[-1]
        if storage._cdata in uncounted:
            return tensor
        owner = owners.setdefault(storage._cdata, name)
        if len(owners) > len(held):
            held.append(tensor)
            kept[name] += storage.nbytes()
        elif name in layers and owner not in layers:
            owners[storage._cdata] = name
            kept[name] += storage.nbytes()
            kept[owner] -= storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model whose tensors have shapes but no memory, and without its users' hooks."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in [*module.__dict__.values(), *module._parameters.values(), *module._buffers.values()]:
            if isinstance(value, Tensor):
                memo[id(value)] = _shell(value)
        for name, hooks in module.__dict__.items():
            if name.endswith("_hooks"):
                memo[id(hooks)] = type(hooks)(item for item in hooks.items() if _is_torchs(item[1]))
    return copy.deepcopy(model, memo)


def _shell(tensor: Tensor) -> Tensor:
    shell = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(shell, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shell


def _is_torchs(hook: Any) -> bool:
    """Whether a hook is one of torch's own, such as weight_norm's, which the forward needs."""
    return str(hook.__module__).startswith("torch.")
