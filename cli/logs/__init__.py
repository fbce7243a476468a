"""`kvrelay logs`: what the members of a cluster have written."""
