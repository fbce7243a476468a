"""Shared by all kvrelay processes: gRPC options, worker ids, heartbeats, logs, the main of a server."""
