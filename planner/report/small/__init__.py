"""The first screen of a small job: a few GPUs, one after the other the questions of who has them."""
