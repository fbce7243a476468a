"""Reads checkpoints: configuration, weights as stored, quantized weights."""
