"""A run that exists, read from what it left behind into one `Observation`, and held against the plan for its job."""
