"""The connections of clients: how many there may be, and how long each may wait."""
