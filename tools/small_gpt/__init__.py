"""A small GPT that trains for real on CPUs, and what can be made wrong with it: the runs of `tools/record_faults`."""
