"""The kernels for CPUs: C++ in `native/`, called through ctypes, and torch operators where that can't be built."""
