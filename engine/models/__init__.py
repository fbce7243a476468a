"""Models: the families that are served, their decoder, and the reading of checkpoints."""
