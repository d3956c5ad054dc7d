"""Models by name, and weights from files. Other libraries are imported when a name asks for them."""

from gradfilter.models._build import build as build
from gradfilter.models._build import names as names
from gradfilter.models._weights import load_weights as load_weights

__all__ = ["build", "load_weights", "names"]
