"""A cluster in simulated time: the router, the scheduler and the block pools are the product's own."""
