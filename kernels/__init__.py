"""One file per kernel, with `reference.py` as the plain-torch oracle of each."""
