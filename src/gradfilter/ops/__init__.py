"""Autograd functions: layers with a method, and everything between them."""
