"""The front door: faces, admission, placement, the life of a request."""
