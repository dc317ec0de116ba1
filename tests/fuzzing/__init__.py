"""A seeded fuzzer of everything that reads a file: corpus, mutations, and a process that counts what escapes."""
