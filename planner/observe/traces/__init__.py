"""Readers of the traces that torch's profiler leaves."""
