"""The filtered gradients, computed slowly and literally in float64 numpy.

Nothing here comes from gradfilter or from torch: this is the definition that the library is measured against.

A convolution and a transposed convolution are one bilinear form, y[i] = sum over k, j of w[k] T[k, i, j] x[j]
with a 0/1 tap matrix T per axis. The exact gradients are its two other contractions. Patches are visited one
after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MISTAKES",
    "Gradients",
    "Layer",
    "conv_forward",
    "conv_gradients",
    "linear_gradients",
    "padded_input",
]

Array = NDArray[np.float64]
Box = tuple[slice, ...]
Cell = tuple[int, ...]

MISTAKES = ("stride scale left out", "kernel flipped", "ragged edge miscounted")
_NUMPY_MODE = {"reflect": "reflect", "circular": "wrap", "replicate": "edge"}


@dataclass(frozen=True)
class Layer:
    """Geometry of a (transposed) convolution; every tuple has one entry per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    groups: int = 1
    padding_mode: str = "zeros"
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def out_size(self, size: Sequence[int]) -> tuple[int, ...]:
        """Size of the output map for an input map of `size` (before any padding)."""
        spans = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        axes = zip(size, self.stride, spans, self.pads, strict=True)
        if self.transposed:
            plain = [(n - 1) * s - sum(pad) + span for n, s, span, pad in axes]
            return tuple(n + extra for n, extra in zip(plain, self.output_padding, strict=True))
        return tuple((n + sum(pad) - span) // s + 1 for n, s, span, pad in axes)

    def in_patch(self, patch: Sequence[int]) -> tuple[int, ...]:
        """Patch of the input grid that goes with `patch` of the output grid."""
        pairs = zip(patch, self.stride, strict=True)
        return tuple(max(1, r // s) if self.transposed else r * s for r, s in pairs)


@dataclass(frozen=True)
class Gradients:
    """Gradients of input, weight and bias, in the shapes torch gives them."""

    x: Array
    w: Array
    b: Array


def conv_forward(layer: Layer, x: Array, w: Array) -> Array:
    """Output of the layer without bias."""
    batched, plain, _ = _explicit_padding(layer, _batched(x, layer))
    taps = _tap_matrices(plain, batched.shape[2:])
    y = _contract("y", taps, w=_dense_weight(w, plain), x=batched)
    return y if x.ndim == batched.ndim else y[0]


def padded_input(layer: Layer, x: Array) -> tuple[Array, Layer]:
    """The input as the convolution itself sees it, batched and padded by its mode; and what layer is left."""
    batched, plain, _ = _explicit_padding(layer, _batched(x, layer))
    return batched, plain


def conv_gradients(
    layer: Layer,
    x: Array,
    w: Array,
    g: Array,
    patch: Sequence[int],
    taps: str = "overlap",
    input_gradient: str = "coarse",
    mistake: str = "",
) -> Gradients:
    """Filtered gradients by definition; patch 1 on every axis is exact backpropagation.

    `mistake` names one of MISTAKES and makes the answer wrong in that way, to see whether a test notices.
    """
    batched, plain, padding = _explicit_padding(layer, _batched(x, layer))
    dense_g = _batched(g, layer)
    dense_w = _dense_weight(w, plain)
    exact = _tap_matrices(plain, batched.shape[2:])

    if all(r == 1 for r in patch):
        grad_x = _contract("x", exact, w=dense_w, y=dense_g)
        grad_w = _contract("w", exact, x=batched, y=dense_g)
    else:
        filtered = {"overlap": _overlap, "collapse": _collapse_transposed if plain.transposed else _collapse}
        grad_x, grad_w = filtered[taps](plain, batched, dense_w, dense_g, patch, mistake)
        if mistake == "stride scale left out":
            # As in the released code: sums of x are not divided, patch values are copied to all input pixels.
            grad_x, grad_w = grad_x * prod(plain.stride), grad_w * prod(plain.stride)
        if input_gradient == "exact":
            grad_x = _contract("x", exact, w=dense_w, y=dense_g)

    for axis, matrix in enumerate(padding):
        grad_x = _along(matrix.T, grad_x, axis + 2)
    return Gradients(
        x=grad_x if x.ndim == grad_x.ndim else grad_x[0],
        w=_own_blocks(grad_w, w.shape, plain),
        b=dense_g.sum(axis=(0, *_spatial(dense_g))),
    )


def linear_gradients(
    x: Array,
    w: Array,
    g: Array,
    patch: Sequence[int],
    tokens: Sequence[int] | None = None,
    input_gradient: str = "coarse",
) -> Gradients:
    """Linear layer as a 1x1 convolution over (H, W): x is (N, H, W, C), or (N, H*W, C) with tokens=(H, W)."""
    if x.ndim == 2:
        return Gradients(x=g @ w, w=g.T @ x, b=g.sum(axis=0))
    rows, columns = tokens if tokens is not None else x.shape[1:3]
    as_map = [np.moveaxis(v.reshape(len(v), rows, columns, v.shape[-1]), -1, 1) for v in (x, g)]
    pointwise = Layer(kernel=(1, 1), stride=(1, 1), dilation=(1, 1), pads=((0, 0), (0, 0)))
    grads = conv_gradients(
        pointwise, as_map[0], w[:, :, None, None], as_map[1], patch, input_gradient=input_gradient
    )
    return Gradients(x=np.moveaxis(grads.x, 1, -1).reshape(x.shape), w=grads.w[:, :, 0, 0], b=grads.b)


def patch_mean(x: Array, patch: Sequence[int], miscounted: bool = False) -> Array:
    """Every pixel of (N, C, *map) replaced by the mean over its patch; only real pixels count."""
    out = np.empty_like(x)
    for box in _boxes(x.shape[2:], patch):
        count = prod(patch) if miscounted else _pixels(box)
        out[_at(box)] = x[_at(box)].sum(axis=_spatial(x), keepdims=True) / count
    return out


# --- the two kinds of taps


def _overlap(
    layer: Layer, x: Array, w: Array, g: Array, patch: Sequence[int], mistake: str
) -> tuple[Array, Array]:
    """Exact gradients of patch means: P_in(exact(P_out(g))) and exact(P_in(x), P_out(g))."""
    taps = _tap_matrices(layer, x.shape[2:])
    if mistake == "kernel flipped":
        taps = [matrix[::-1] for matrix in taps]
    in_patch = layer.in_patch(patch)
    smooth_g = patch_mean(g, patch, miscounted=mistake == "ragged edge miscounted")
    grad_x = patch_mean(_contract("x", taps, w=w, y=smooth_g), in_patch)
    grad_w = _contract("w", taps, x=patch_mean(x, in_patch), y=smooth_g)
    return grad_x, grad_w


def _collapse(
    layer: Layer, x: Array, w: Array, g: Array, patch: Sequence[int], mistake: str
) -> tuple[Array, Array]:
    """All taps of output patch p read input patch q(p) = min(p, Q - 1)."""
    out_grid, in_grid = _grid(g.shape[2:], patch), _grid(x.shape[2:], layer.in_patch(patch))
    last = max(in_grid)  # the cell (Q - 1, Q - 1, ...)
    wsum = w.sum(axis=_spatial(w))
    grad_x, one_tap = np.zeros_like(x), np.zeros_like(wsum)
    for p, box_p in out_grid.items():
        q = tuple(map(min, p, last))
        box_q = in_grid[q]
        n_p, n_q = _pixels(box_p), _pixels(box_q)
        count = prod(patch) if mistake == "ragged edge miscounted" else n_p
        mean_g = g[_at(box_p)].sum(axis=_spatial(g)) / count
        mean_x = x[_at(box_q)].mean(axis=_spatial(x))
        grad_x[_at(box_q)] += _as_pixels(n_p / n_q * mean_g @ wsum, x.ndim)
        one_tap += n_p * mean_g.T @ mean_x
    return grad_x, _every_tap(one_tap, w.shape)


def _collapse_transposed(
    layer: Layer, x: Array, w: Array, g: Array, patch: Sequence[int], mistake: str
) -> tuple[Array, Array]:
    """Input patch q meets the mean over the output patches p with min(floor(p*r / (s*R)), Q - 1) = q."""
    in_patch = layer.in_patch(patch)
    in_grid = _grid(x.shape[2:], in_patch)
    numbers = zip(patch, layer.stride, in_patch, max(in_grid), g.shape[2:], strict=True)
    # owner[axis][i]: the input patch to which output pixel i belongs through its output patch i // r.
    owner = [
        [min((i // r) * r // (s * big_r), last) for i in range(size)] for r, s, big_r, last, size in numbers
    ]
    wsum = w.sum(axis=_spatial(w))
    grad_x, one_tap = np.zeros_like(x), np.zeros_like(wsum)
    for q, box_q in in_grid.items():
        mine = [[i for i, who in enumerate(axis) if who == at] for axis, at in zip(owner, q, strict=True)]
        number = prod(map(len, mine))
        if number == 0:
            continue
        if mistake == "ragged edge miscounted":
            number = prod(len({i // r for i in pixels}) * r for pixels, r in zip(mine, patch, strict=True))
        mean_g = g[_at(np.ix_(*mine))].sum(axis=_spatial(g)) / number
        mean_x = x[_at(box_q)].mean(axis=_spatial(x))
        grad_x[_at(box_q)] = _as_pixels(mean_g @ wsum, x.ndim)
        one_tap += _pixels(box_q) * mean_g.T @ mean_x
    return grad_x, _every_tap(one_tap, w.shape)


# --- exact convolution as dense algebra


def _tap_matrices(layer: Layer, size: Sequence[int]) -> list[Array]:
    """Per axis, T[k, i, j] = 1 where tap k connects output pixel i and input pixel j."""
    matrices = []
    sizes = zip(size, layer.out_size(size), strict=True)
    axes = zip(sizes, layer.kernel, layer.stride, layer.dilation, layer.pads, strict=True)
    for (in_size, out_size), kernel, stride, dilation, (left, _) in axes:
        matrix = np.zeros((kernel, out_size, in_size))
        for k, i, j in product(range(kernel), range(out_size), range(in_size)):
            many, few = (i, j) if layer.transposed else (j, i)
            matrix[k, i, j] = many == stride * few + k * dilation - left
        matrices.append(matrix)
    return matrices


def _contract(result: str, taps: Sequence[Array], **given: Array) -> Array:
    """Contract the tap matrices with two of x, y (batch, channel, *map) and w (out, in, *taps): the third."""
    a, i, j = "abd"[: len(taps)], "ijl"[: len(taps)], "pqr"[: len(taps)]
    letters = {"x": "nc" + j, "y": "no" + i, "w": "oc" + a}
    terms = [(letters[name], given[name]) for name in sorted(given, key="xwy".index)]
    tap_terms = [("".join(names), matrix) for *names, matrix in zip(a, i, j, taps, strict=True)]
    # Left to right: unfold x, or fold (w, y) back. The order numpy finds by itself is many times slower.
    terms[1:1] = [] if result == "x" else tap_terms
    terms += tap_terms if result == "x" else []
    path = ["einsum_path", (0, 1), *((0, last) for last in range(len(terms) - 2, 0, -1))]
    names = ",".join(name for name, _ in terms)
    third: Array = np.einsum(f"{names}->{letters[result]}", *(array for _, array in terms), optimize=path)
    return third


def _explicit_padding(layer: Layer, x: Array) -> tuple[Array, Layer, list[Array]]:
    """x padded by its mode, the layer left without padding, and the 0/1 matrix (padded, real) per axis.

    Zero padding needs no copy: a tap that reads it finds no input pixel.
    """
    if layer.padding_mode == "zeros":
        return x, layer, []
    matrices = []
    for axis, (size, pad) in enumerate(zip(x.shape[2:], layer.pads, strict=True)):
        source = np.pad(np.arange(size), pad, mode=_NUMPY_MODE[layer.padding_mode])  # type: ignore[call-overload]
        matrices.append(np.eye(size)[source])
        x = _along(matrices[-1], x, axis + 2)
    unpadded = Layer(layer.kernel, layer.stride, layer.dilation, ((0, 0),) * len(layer.pads), layer.groups)
    return x, unpadded, matrices


def _dense_weight(w: Array, layer: Layer) -> Array:
    """Weight as (out, in, *taps) over all channels, zero where the groups do not connect them."""
    blocks = np.split(w, layer.groups)
    if layer.transposed:
        blocks = [block.swapaxes(0, 1) for block in blocks]
    rows, columns = blocks[0].shape[:2]
    dense = np.zeros((rows * layer.groups, columns * layer.groups, *w.shape[2:]))
    for group, block in enumerate(blocks):
        dense[group * rows : (group + 1) * rows, group * columns : (group + 1) * columns] = block
    return dense


def _own_blocks(dense: Array, shape: Sequence[int], layer: Layer) -> Array:
    """Undo `_dense_weight`: keep the connected blocks, in the layout of the parameter."""
    rows, columns = dense.shape[0] // layer.groups, dense.shape[1] // layer.groups
    blocks = [
        dense[group * rows : (group + 1) * rows, group * columns : (group + 1) * columns]
        for group in range(layer.groups)
    ]
    if layer.transposed:
        blocks = [block.swapaxes(0, 1) for block in blocks]
    return np.concatenate(blocks).reshape(shape)


# --- small pieces


def _boxes(size: Sequence[int], patch: Sequence[int]) -> Iterator[Box]:
    """Patches from the origin in row order; the last one on each axis may be ragged."""
    axes = [[slice(at, min(at + r, n)) for at in range(0, n, r)] for n, r in zip(size, patch, strict=True)]
    return product(*axes)


def _grid(size: Sequence[int], patch: Sequence[int]) -> dict[Cell, Box]:
    """The same patches by their place on the grid, per axis 0, 1, ..."""
    return {
        tuple(side.start // r for side, r in zip(box, patch, strict=True)): box for box in _boxes(size, patch)
    }


def _at(box: tuple[Any, ...]) -> tuple[Any, ...]:
    """Index into (N, C, *map) that takes these pixels of the map."""
    return (slice(None), slice(None), *box)


def _pixels(box: Box) -> int:
    return prod(side.stop - side.start for side in box)


def _spatial(x: Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


def _as_pixels(values: Array, ndim: int) -> Array:
    """(N, C) ready to be broadcast over the pixels of a patch."""
    return values.reshape(*values.shape, *[1] * (ndim - 2))


def _every_tap(one_tap: Array, shape: Sequence[int]) -> Array:
    return np.broadcast_to(_as_pixels(one_tap, len(shape)), shape)


def _along(matrix: Array, x: Array, axis: int) -> Array:
    """Multiply `matrix` onto one axis of x."""
    return np.moveaxis(np.tensordot(matrix, x, axes=(1, axis)), 0, axis)


def _batched(x: Array, layer: Layer) -> Array:
    return x if x.ndim == len(layer.kernel) + 2 else x[None]
