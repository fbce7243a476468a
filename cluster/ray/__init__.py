"""Members as Ray actors, and the watch over Ray's own processes."""
