"""Attention over paged KV: the protocol a runner plans with, and its backends."""
