"""The places where a run's seconds differ from those that were predicted."""
