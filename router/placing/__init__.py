"""Placement of requests on workers, the queue of those that wait, and the streams to the workers."""
