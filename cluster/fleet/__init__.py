"""The desired members, and the steps by which a cluster gets there."""
