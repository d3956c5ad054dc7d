"""Only the bias trains; its gradient, and that of the input, are exact."""

import gradfilter as gf

from . import Sample, exact

SAMPLES = [Sample(gf.BiasOnly(), exact)]
