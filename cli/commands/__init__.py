"""The commands of `kvrelay` that have files of their own; `cli/main.py` has the others."""
