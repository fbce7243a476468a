"""A simulated cluster of the hand-off: seeded worlds on a virtual clock."""
