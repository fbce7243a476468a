"""The commands of `kvrelay` that have files of their own; `cli.py` has the others."""
