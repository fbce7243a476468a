"""KV as bytes: the frames that links carry, and where they lie in a pool."""
