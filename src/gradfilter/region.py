"""Inside a region, torch's own functions keep only what a gradient on the grid needs.

Modules such as ``nn.ReLU`` call these functions too, so one table serves both ways of writing a network.
Functions that are not in the table, and tensors without a gradient, run as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .grid import per_axis
from .ops.activation import Gate, Slope, activate, prelu
from .ops.join import add
from .ops.max_pool import PoolWindow, max_pool
from .ops.norm import batch_norm, group_norm, layer_norm
from .ops.product import dropout, multiply
from .ops.spatial import spatial_mean, spatially_linear
from .wanted import wanted_grid

__all__ = ["region"]

_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
aten = torch.ops.aten
Handler = Callable[..., Any]


def region() -> Any:
    """A context in which torch's functions run as a region's; entering it again inside changes nothing."""
    current: _Region | None = getattr(_active, "region", None)
    return nullcontext() if current is not None and current.is_current() else _Region()


_active = threading.local()


class _Region(TorchFunctionMode):
    """Ends where other saved-tensor hooks begin: what runs in those, a checkpoint runs again without it."""

    def __enter__(self) -> _Region:
        self.hooks, self.outer = _saved_tensor_hooks(True), getattr(_active, "region", None)
        _active.region = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.region = self.outer

    def is_current(self) -> bool:
        return bool(_saved_tensor_hooks(True) == self.hooks)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _table().get(func)
        if handler is None or not torch.is_grad_enabled() or not self.is_current():
            return func(*args, **kwargs)
        if "input" in kwargs:
            args, kwargs = (kwargs["input"], *args), {k: v for k, v in kwargs.items() if k != "input"}
        if not any(map(_needs_gradient, (*args[:2], kwargs.get("other")))):
            return func(*args, **kwargs)
        return handler(func, *args, **kwargs)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _gate(gate: Gate, inplace: bool = False) -> Handler:
    """A gate whose every argument after the input is passed on as it is."""

    def handle(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        in_place = inplace or kwargs.get("inplace", False) or (bool(args) and args[-1] is True)
        return activate(x, lambda t: func(t, *args, **kwargs), gate, in_place)

    return handle


def _hardtanh(
    func: Any, x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Tensor:
    return activate(x, lambda t: func(t, min_val, max_val, inplace), Gate(min_val, max_val), inplace)


def _leaky_relu(func: Any, x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    return activate(x, lambda t: func(t, negative_slope, inplace), Gate(shut=negative_slope), inplace)


def _smooth(slope: Callable[[Tensor, Tensor], Tensor]) -> Handler:
    def handle(func: Any, x: Tensor, inplace: bool = False) -> Tensor:
        run = (lambda t: func(t, inplace=True)) if inplace else func
        return activate(x, run, Slope(slope), inplace)

    return handle


def _gelu(func: Any, x: Tensor, *, approximate: str = "none") -> Tensor:
    def slope(one: Tensor, t: Tensor) -> Tensor:
        result: Tensor = aten.gelu_backward(one, t, approximate=approximate)
        return result

    return activate(x, lambda t: func(t, approximate=approximate), Slope(slope), False)


def _elu(func: Any, x: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    def slope(one: Tensor, t: Tensor) -> Tensor:
        result: Tensor = aten.elu_backward(one, alpha, 1.0, 1.0, False, t)
        return result

    return activate(x, lambda t: func(t, alpha, inplace), Slope(slope), inplace)


def _sigmoid_slope(one: Tensor, x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    return y * (1 - y)


def _tanh_slope(one: Tensor, x: Tensor) -> Tensor:
    return 1 - torch.tanh(x) ** 2


def _direct(function: Handler) -> Handler:
    """Our function takes the very arguments of torch's."""

    def handle(func: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return handle


def _max_pool(axes: int) -> Handler:
    def handle(
        func: Any,
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if return_indices or x.dim() != axes + 2:
            return func(x, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        kernel, steps = per_axis(kernel_size, axes), per_axis(stride or kernel_size, axes)
        window = PoolWindow(kernel, steps, per_axis(padding, axes), per_axis(dilation, axes), ceil_mode)
        return max_pool(x, window)

    return handle


def _adaptive_max_pool(axes: int) -> Handler:
    def handle(func: Any, x: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        sizes = x.shape[-axes:]
        wanted = [s or n for s, n in zip(per_axis(output_size, axes), sizes, strict=True)]
        if return_indices or x.dim() != axes + 2 or any(n % s for n, s in zip(sizes, wanted, strict=True)):
            return func(x, output_size, return_indices)
        kernel = [n // s for n, s in zip(sizes, wanted, strict=True)]
        return max_pool(x, PoolWindow(kernel, kernel, [0] * axes, [1] * axes, False))

    return handle


def _avg_pool(axes: int) -> Handler:
    def handle(
        func: Any,
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        extra = () if axes == 1 else (divisor_override,)

        def run(t: Tensor) -> Tensor:
            strides = kernel_size if stride is None or stride == [] else stride
            result: Tensor = func(t, kernel_size, strides, padding, ceil_mode, count_include_pad, *extra)
            return result

        if divisor_override is not None or x.dim() != axes + 2:
            return run(x)
        settings = list(
            zip(*(per_axis(s, axes) for s in (kernel_size, stride or kernel_size, padding)), strict=True)
        )

        def along(k: int, s: int, p: int) -> Callable[[Tensor], Tensor]:
            return lambda line: F.avg_pool1d(line, k, s, p, ceil_mode, count_include_pad)

        key = ("avg", tuple(settings), ceil_mode, count_include_pad)
        return spatially_linear(x, run, [along(*s) for s in settings], key)

    return handle


def _adaptive_avg_pool(axes: int) -> Handler:
    def handle(func: Any, x: Tensor, output_size: Any) -> Any:
        if x.dim() != axes + 2:
            return func(x, output_size)
        sizes = [s or n for s, n in zip(per_axis(output_size, axes), x.shape[2:], strict=True)]

        def along(size: int) -> Callable[[Tensor], Tensor]:
            return lambda line: F.adaptive_avg_pool1d(line, size)

        return spatially_linear(
            x, lambda t: func(t, output_size), [along(s) for s in sizes], ("adaptive", *sizes)
        )

    return handle


def _interpolate(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    options = dict(zip(names, args, strict=False)) | kwargs
    if wanted_grid(x).is_dense or options.get("antialias") or options.get("mode") == "area":
        return func(x, **options)
    axes = x.dim() - 2
    options["mode"] = mode = options.get("mode", "nearest")
    line_mode = "linear" if mode in ("bilinear", "trilinear") else mode

    def along(axis: int) -> Callable[[Tensor], Tensor]:
        own = dict(options, mode=line_mode)
        for name in ("size", "scale_factor"):
            value = options.get(name)
            own[name] = value if value is None or isinstance(value, int | float) else value[axis]
        if line_mode != "bicubic":
            return lambda line: F.interpolate(line, **own)
        own = {k: (v, 1) if k in ("size", "scale_factor") and v is not None else v for k, v in own.items()}
        return lambda line: F.interpolate(line.unsqueeze(-1), **own).squeeze(-1)

    key = ("interpolate", *((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(options.items())))
    return spatially_linear(x, lambda t: func(t, **options), [along(i) for i in range(axes)], key)


def _pad(func: Any, x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    axes = x.dim() - 2
    if wanted_grid(x).is_dense or axes < 1 or len(pad) > 2 * axes:
        return func(x, pad, mode, value)
    ends = [(pad[2 * i], pad[2 * i + 1]) if 2 * i < len(pad) else (0, 0) for i in reversed(range(axes))]

    def along(before: int, after: int) -> Callable[[Tensor], Tensor]:
        return lambda line: F.pad(line, (before, after), mode)

    return spatially_linear(
        x, lambda t: func(t, pad, mode, value), [along(*e) for e in ends], ("pad", mode, tuple(ends))
    )


def _mean(func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dim, keepdim = kwargs.pop("axis", dim), kwargs.pop("keepdims", keepdim)

    def run(t: Tensor) -> Tensor:
        result: Tensor = func(t, **kwargs) if dim is None else func(t, dim, keepdim, **kwargs)
        return result

    dims = range(x.dim()) if dim is None else per_axis(dim, 1)
    pooled = wanted_grid(x).pooled
    if not pooled or kwargs or any(d not in [i % x.dim() for i in dims] for d in pooled):
        return run(x)
    return spatial_mean(x, list(dims), keepdim, run)


def _mul(func: Any, x: Any, other: Any) -> Any:
    if not (isinstance(x, Tensor) and isinstance(other, Tensor)):
        return func(x, other)
    return multiply(x, other)


def _add(inplace: bool = False) -> Handler:
    def handle(func: Any, x: Any, other: Any, **kwargs: Any) -> Any:
        joined = None
        if isinstance(x, Tensor) and isinstance(other, Tensor) and not kwargs:
            joined = add(x, other, inplace)
        return func(x, other, **kwargs) if joined is None else joined

    return handle


def _dropout(func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return dropout(x, p, inplace) if training else func(x, p, training, inplace)


@lru_cache(maxsize=1)
def _table() -> dict[Any, Handler]:
    """Every function that a region runs its own way; made on first use."""
    relu, relu_in_place = _gate(Gate()), _gate(Gate(), inplace=True)
    silu, hardswish = _smooth(aten.silu_backward), _smooth(aten.hardswish_backward)
    sigmoid, tanh = _smooth(_sigmoid_slope), _smooth(_tanh_slope)
    table: dict[Any, Handler] = {
        F.relu: relu,
        torch.relu: relu,
        Tensor.relu: relu,
        torch.relu_: relu_in_place,
        Tensor.relu_: relu_in_place,
        F.relu6: _gate(Gate(0.0, 6.0)),
        F.hardtanh: _hardtanh,
        F.leaky_relu: _leaky_relu,
        F.silu: silu,
        F.hardswish: hardswish,
        F.hardsigmoid: _smooth(aten.hardsigmoid_backward),
        F.mish: _smooth(aten.mish_backward),
        F.gelu: _gelu,
        F.elu: _elu,
        F.sigmoid: sigmoid,
        torch.sigmoid: sigmoid,
        Tensor.sigmoid: sigmoid,
        F.tanh: tanh,
        torch.tanh: tanh,
        Tensor.tanh: tanh,
        F.prelu: _direct(prelu),
        F.batch_norm: _direct(batch_norm),
        F.group_norm: _direct(group_norm),
        F.layer_norm: _direct(layer_norm),
        F.interpolate: _interpolate,
        F.pad: _pad,
        F.dropout: _dropout,
        torch.mean: _mean,
        Tensor.mean: _mean,
        torch.add: _add(),
        Tensor.add: _add(),
        Tensor.__add__: _add(),
        Tensor.__radd__: _add(),
        Tensor.add_: _add(inplace=True),
        Tensor.__iadd__: _add(inplace=True),
        torch.mul: _mul,
        Tensor.mul: _mul,
        Tensor.__mul__: _mul,
        Tensor.__rmul__: _mul,
    }
    pools = {
        1: (F.max_pool1d, F.avg_pool1d, F.adaptive_avg_pool1d, F.adaptive_max_pool1d),
        2: (F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d),
        3: (F.max_pool3d, F.avg_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d),
    }
    for axes, (maximum, average, adaptive, adaptive_maximum) in pools.items():
        table[maximum] = _max_pool(axes)
        table[average] = _avg_pool(axes)
        table[adaptive] = _adaptive_avg_pool(axes)
        table[adaptive_maximum] = _adaptive_max_pool(axes)
    return table
