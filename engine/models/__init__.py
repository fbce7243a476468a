"""Model architectures, one file each, their registry, and the checkpoint loader."""
