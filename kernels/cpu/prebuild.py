"""Compiles the native kernels into the package, for images without a compiler; run with `python -m`."""

from kvrelay.kernels.cpu.library import INSTRUCTION_SETS, PREBUILT, prebuild

if __name__ == "__main__":
    prebuild()
    print(f"{PREBUILT}: {', '.join(each.name for each in INSTRUCTION_SETS)}")
