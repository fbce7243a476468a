"""Paged KV memory: its layout, its tensors, who holds which block, and the prefix cache."""
