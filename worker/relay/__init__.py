"""The relay between a worker and its routers: one stream for each router."""
