"""Signs of causes: patterns that a run leaves in its steps, ranks, exchanges, kernels and memory."""
