"""Changes of a job that runs: what would help, what it would give, and how it is typed."""
