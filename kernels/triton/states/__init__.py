"""Layers that keep a state, on GPU: short convolutions, Mamba-2, Gated DeltaNet, RWKV-4; see `kernels/states.py`.

Rows of one token take the recurrent form; longer ones the chunk-wise form, which keeps the state in registers.
"""
