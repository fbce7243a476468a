"""The kernels for CPUs: C++ in `native/`, called through ctypes, and torch operators where that can't be built.

There is a module for each kind of kernel, and some to build and load the library, so they lie side by side.
"""
