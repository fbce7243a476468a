"""The Triton kernels: a file each, with formula, shapes, launcher and checks; so there are many files side by side."""
