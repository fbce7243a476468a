"""Who is in the cluster, who is believed to be alive, and what members are told of it."""
