"""What carries the bulk bytes: one file for each transport, behind the interface in `base`."""
