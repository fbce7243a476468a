"""Transports of bulk bytes: one file each, all with the interface of `base`."""
