"""Months of training: the step that they sustain, and the share of their time in which the model trains."""
