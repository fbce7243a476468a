"""The life of one request: it is placed, followed, placed again if a worker fails it, and ended."""
