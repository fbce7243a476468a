"""`kvrelay doctor`: what is wrong with the cluster, and why a request was slow."""
