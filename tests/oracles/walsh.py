"""Walsh coefficients: each patch projected on the smooth functions of its own size, one after the other."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from math import prod

import numpy as np

import gradfilter as gf
from oracle import Gradients, _along, _explicit_padding, conv_gradients

from . import Array, Problem, Sample
from .exact import exact

FULL = 99  # an order that keeps all functions


@cache
def functions(side: int) -> Array:
    """Orthonormal rows: Walsh functions as products of square waves, or cosines if there are none."""
    if side & (side - 1):
        rows = [[np.cos(np.pi * k * (2 * j + 1) / (2 * side)) for j in range(side)] for k in range(side)]
    else:
        bits = side.bit_length() - 1
        # the function of k sign changes multiplies the square waves of the ones in the Gray code of k
        rows = [
            [
                prod((-1) ** (j >> (bits - 1 - b) & 1) for b in range(bits) if (k ^ k >> 1) >> b & 1)
                for j in range(side)
            ]
            for k in range(side)
        ]
    matrix = np.array(rows, dtype=np.float64)
    return matrix / np.sqrt((matrix**2).sum(1, keepdims=True))


def low_pass(x: Array, patch: int | tuple[int, ...], order: int) -> Array:
    """(N, C, *map) with only the smooth part of each patch left."""
    out, patches = np.zeros_like(x), patch if isinstance(patch, tuple) else (patch,) * (x.ndim - 2)
    for corner in product(*(range(0, n, p) for n, p in zip(x.shape[2:], patches, strict=True))):
        box = (..., *(slice(at, at + p) for at, p in zip(corner, patches, strict=True)))
        sides = x[box].shape[2:]
        for numbers in product(*map(range, sides)):
            if sum(numbers) < order:
                function = np.ones(())
                for side, number in zip(sides, numbers, strict=True):
                    function = np.multiply.outer(function, functions(side)[number])
                axes = tuple(range(2, x.ndim))
                out[box] += (x[box] * function).sum(axes, keepdims=True) * function
    return out


def smoothed(problem: Problem, patch: int | tuple[int, ...], order: int) -> Gradients:
    """A 1x1 convolution of low-pass input and gradient; nothing else mixes pixels."""
    p, plain = problem, exact(problem)
    x, g = (t if t.ndim == p.w.ndim else t[None] for t in (p.x, p.g))
    x, layer, padding = _explicit_padding(p.layer, x)
    found = conv_gradients(layer, low_pass(x, patch, order), p.w, low_pass(g, patch, order), p.dense)
    x_grad = found.x
    for axis, matrix in enumerate(padding):
        x_grad = _along(matrix.T, x_grad, axis + 2)
    return Gradients(x_grad.reshape(plain.x.shape), found.w, plain.b)


def filtered(problem: Problem, patch: int) -> Gradients:
    p = problem
    return conv_gradients(p.layer, p.x, p.w, p.g, (patch,) * len(p.layer.kernel))


SAMPLES = [
    Sample(gf.WalshHadamard(4, 2), partial(smoothed, patch=4, order=2)),
    Sample(gf.WalshHadamard(8, 3), partial(smoothed, patch=8, order=3)),
    Sample(gf.WalshHadamard(2, 1), partial(filtered, patch=2)),
    Sample(gf.WalshHadamard(4, FULL), exact),
]
