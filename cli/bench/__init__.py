"""`kvrelay bench`: sends a workload to a server, measures each request, and reports figures that can be compared."""
