"""`kvrelay top`: the cluster, live on a terminal."""
