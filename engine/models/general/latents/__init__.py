"""Attention of layers that keep latents: absorbed for a few tokens of a sequence, expanded for many.

absorbed    the weights of keys and values, taken from a module's own function; the interface of what attends, in torch
native      the same by native CPU kernels, and attention over expanded keys and values
triton      the same by Triton's kernel
layers      chooses among them, row by row
"""
