"""Benchmarks: each measures its arms in turn, and says under which conditions.

A benchmark is a module with ``measure``, which gives a record ready for JSON, and ``lines``, which makes a
table of such a record. Tables in the documentation are made from the records in experiments/results.
"""
