"""What a method is: how a layer keeps its input, and how it forms gradients from what it kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import ClassVar

from torch import Tensor, nn

from ..coarse import densify
from ..geometry import ConvGeometry
from ..grid import Grid
from ..ops.exact_conv import Gradients, Want, exact_backward, exact_weight_gradient
from ..ops.storage import Store
from ..ops.walsh import Basis

__all__ = ["Memory", "Method"]

Memory = dict[str, Tensor]  # what a layer's method remembers from step to step; ``gf.method_state`` saves it


class Method:
    """A value (frozen dataclass) that says what a convolution or linear layer keeps and computes.

    Layers are seen as convolutions of (N, C, spatial...); a linear layer is a 1x1 convolution over what is
    between its first and last dimension. The gradient of the input is exact unless a method says otherwise.
    """

    trains: frozenset[str] = frozenset({"weight", "bias"})  # which parameters of a layer
    trains_norm: bool = False  # also those of the norm behind it
    adds_parameters: bool = False  # it has some of its own, which train too
    forward_is_exact: ClassVar[bool] = True
    bytes_depend_on_data: ClassVar[bool] = False  # then costs are the most it may keep
    tokens: tuple[int, int] | None = None
    store: Store = "same"

    def __str__(self) -> str:
        """Short: the first setting, and those that differ from their defaults."""
        shown = [
            f"{f.name}={getattr(self, f.name)}"
            for i, f in enumerate(fields(self))  # type: ignore[arg-type]
            if i == 0 or getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def warns(self) -> str:
        """What a plan says beside each layer of this method, if there is something to say."""
        return ""

    def for_layer(self, name: str) -> Method:
        """The method of the layer called ``name``; differs from self where settings are given by layer."""
        return self

    def refuses(self, geometry: ConvGeometry) -> str | None:
        """Why this layer must stay exact, or None."""
        return None

    def misfits(self, module: nn.Module) -> str | None:
        """Why such a module must stay exact, or None; settings that fit no such module are a PlanError."""
        return None

    def prepare(self, name: str, module: nn.Module, memory: Memory) -> None:
        """Put into ``memory`` what is chosen once, when the layer called ``name`` is given the method."""

    def added(self, name: str, module: nn.Module) -> dict[str, Tensor]:
        """First values of the method's own parameters; the layer has them as ``gradfilter_<name>``."""
        return {}

    def adapt(self, y: Tensor, x: Tensor, run: Callable[..., Tensor], module: nn.Module) -> Tensor:
        """The output of a layer with parameters added, from its plain output; autograd follows.

        ``run(x, weight, bias)`` is the plain layer, for any weight of its kind.
        """
        return y

    def merged(self, module: nn.Module) -> Tensor | None:
        """The weight with which the plain layer does what this one does; None where there is none."""
        return None

    def patches(self, geometry: ConvGeometry) -> tuple[int, ...]:
        """The patch per spatial axis on which the gradient of the output is wanted; ones mean dense."""
        return (1,) * geometry.spatial

    def basis(self, geometry: ConvGeometry) -> Basis | None:
        """In whose coefficients the gradient of the output is wanted, if not in pixels or patches."""
        return None

    def forward(self, run: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output; ``run`` is the plain layer."""
        return run(x, weight, bias)

    def keep(self, x: Tensor, geometry: ConvGeometry, memory: Memory) -> tuple[Tensor, ...]:
        """What the forward keeps of the input for the weight gradient; asked only if the weight trains."""
        return (x,)

    def kept_grid(self, geometry: ConvGeometry) -> Grid | None:
        """The patches of the input whose means are all that is kept, if they are, and gradients coarse.

        Then a layer may run without its input ever being in memory.
        """
        return None

    def gradients(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry, want: Want
    ) -> Gradients:
        """Gradients of input and weight; ``grad`` and the input gradient may be coarse or dense."""
        grad = densify(grad)
        x_grad = exact_backward(grad, None, weight, geometry, Want(True, False)).x if want.x else None
        return Gradients(x_grad, self.weight_gradient(grad, kept, weight, geometry) if want.weight else None)

    def weight_gradient(
        self, grad: Tensor, kept: Sequence[Tensor], weight: Tensor, geometry: ConvGeometry
    ) -> Tensor:
        """The gradient of the weight, from the dense one of the output; exact where the input was kept."""
        return exact_weight_gradient(grad, kept[0], weight.shape, geometry)

    def weight_gradient_tells_scale(self, module: nn.Module) -> bool:
        """Whether weight times its gradient sums up to output times its gradient, as where all is exact.

        Then a norm that is folded into the weight gets its gradients from the weight's.
        """
        return False

    def forward_macs(self, geometry: ConvGeometry) -> int:
        """Multiply-adds of the layer's output."""
        return geometry.macs

    def backward_macs(self, geometry: ConvGeometry, want: Want) -> int:
        """Multiply-adds of ``gradients``, and of those of parameters added."""
        return geometry.macs * (want.x + want.weight)
