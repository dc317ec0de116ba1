"""A followed run on one screen, and in one line."""
