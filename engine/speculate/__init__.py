"""Speculative decoding: tokens that are guessed, checked in one step, and kept where the model agrees."""
