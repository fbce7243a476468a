"""The options of a whole cluster, and the file that they come from."""
