"""The step of a run, replayed with one operation, rank or stage idealised."""
