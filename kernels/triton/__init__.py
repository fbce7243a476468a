"""The Triton kernels, one file each with its launcher and checks."""
