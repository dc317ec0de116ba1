"""Seconds of kernels on one GPU, timed alone: products, attention, streams through memory, and updates of weights."""
