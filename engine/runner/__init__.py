"""Runners: one step's plan in, one step's tokens out, on the CPU or a GPU.

A runner (`cpu`, `gpu`, `general`, `leading`) is put together from the other modules, each a part that several runners
have, so they lie side by side.
"""
