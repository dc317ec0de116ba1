"""The part of a training that small jobs have and long runs do not: adapters."""
