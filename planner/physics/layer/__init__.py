"""The operators and exchanges of a decoder layer: one module for each mixer, the MLPs, and what they share."""
