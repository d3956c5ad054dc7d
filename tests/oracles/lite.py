"""Residuals that start as zero: gradients are exact. tests/test_adapters.py has them after a start."""

import gradfilter as gf

from . import Sample, exact

SAMPLES = [Sample(gf.LiteResidual(), exact), Sample(gf.LiteResidual(3, 4, 1), exact)]
