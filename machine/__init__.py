"""Code that every room may import: the limits of this machine, and the base of the classes of options."""
