"""Memory snapshots of torch's allocator."""
