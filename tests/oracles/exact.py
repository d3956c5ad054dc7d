"""Exact backpropagation."""

from gradfilter import Exact

from . import Sample, exact

SAMPLES = [Sample(Exact(), exact)]
