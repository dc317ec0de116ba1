"""Readers of everything that is no text log: profiler traces, memory snapshots, flight-recorder dumps, nsys exports."""
