"""Runs ahead of every import of Triton, whichever test comes first."""

import glob
import os

# Triton decides as a kernel's module is imported whether the kernel will be interpreted. Without a GPU all are, in this
# process and its children; what needs the compiler asks `support.triton_compile`.
if not glob.glob("/dev/nvidia[0-9]*"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
