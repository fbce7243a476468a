"""What a worker and its routers tell one another: one stream for each router."""
