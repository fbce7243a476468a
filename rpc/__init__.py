"""Shared by all kvrelay processes: gRPC options, worker ids, heartbeats, logs, the main of a server.

The modules are small and independent of each other, so they lie side by side.
"""
