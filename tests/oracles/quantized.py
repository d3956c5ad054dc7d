"""Quantised storage: what was kept is decoded value by value, checked, and used in place of the input."""

from __future__ import annotations

from functools import partial

import numpy as np

import gradfilter as gf
from oracle import Gradients, conv_gradients, padded_input

from . import Array, Problem, Sample
from .exact import exact


def decoded(problem: Problem, shape: tuple[int, ...], bits: int, block: int) -> Array:
    """The values in the order they were stored."""
    codes, ranges = problem.kept[-2:]
    count, per_byte = int(np.prod(shape)), 8 // bits
    values, at = np.empty(count), 0
    for number, start in enumerate(range(0, count, block)):
        width = min(block, count - start)
        span = -(-width // per_byte)
        for i in range(width):
            byte = int(codes[at + i % span])  # part k of a block is in the k-th bits of its bytes
            whole = (byte >> (i // span * bits)) % 2**bits
            values[start + i] = ranges[number, 0] + whole * ranges[number, 1]
        at += span
    assert at == codes.size
    assert ranges.dtype == np.float64
    return values


def stored(problem: Problem, bits: int, block: int) -> Gradients:
    p, plain = problem, exact(problem)
    if p.x.size == 0 or not any(kept.dtype == np.uint8 for kept in p.kept):
        return plain
    x, layer = padded_input(p.layer, p.x)
    values = decoded(p, x.shape, bits, block)
    last = np.moveaxis(values.reshape(x.shape[0], *x.shape[2:], x.shape[1]), -1, 1)
    found = min((values.reshape(x.shape), last), key=lambda v: float(np.abs(v - x).max()))
    steps = p.kept[-1][:, 1]
    assert np.abs(found - x).max() <= steps.max() * (1 + 1e-12), "a value is more than a step off"
    weight = conv_gradients(layer, found, p.w, p.g, p.dense).w
    return Gradients(plain.x, weight, plain.b)


SAMPLES = [
    Sample(gf.Quantized(8), partial(stored, bits=8, block=256)),
    Sample(gf.Quantized(4, block=64), partial(stored, bits=4, block=64)),
    Sample(gf.Quantized(2, block=16), partial(stored, bits=2, block=16)),
    Sample(gf.Quantized(8, block=1), exact),  # a block of one value is its own minimum
]
