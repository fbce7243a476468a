"""The Triton kernels: one file each, with its formula, shapes, launcher and checks, so there are many files side by side."""
