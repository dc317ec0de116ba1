"""Runs that a user keeps of a cluster of one's own, and the correction that follows from them."""
