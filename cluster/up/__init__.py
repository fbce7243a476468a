"""`kvrelay up` and `down`: a cluster's start and end, and the process that owns it."""
