"""A model over several ranks: what they compute of it, how they add their parts, and how rank 0's plan reaches them."""
