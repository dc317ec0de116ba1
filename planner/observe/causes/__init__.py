"""Hypotheses why a run is slow, and what would help."""
