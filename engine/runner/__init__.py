"""Runners: one step's plan in, one step's tokens out, on the CPU or a GPU."""
