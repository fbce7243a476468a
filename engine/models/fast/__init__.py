"""The decoder that kvrelay computes itself, and the families that it serves."""
