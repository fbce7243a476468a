"""The router's page: a playground, the life of each request, and the map of the workers."""
