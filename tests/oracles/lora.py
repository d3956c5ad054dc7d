"""Adapters that start as zero: input gradients are exact. tests/test_adapters.py has them after a start."""

import gradfilter as gf

from . import Sample, exact

SAMPLES = [Sample(gf.LowRankAdapter(rank=2), exact), Sample(gf.LowRankAdapter(rank=1, alpha=3), exact)]
