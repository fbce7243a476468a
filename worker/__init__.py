"""The common part of prefill and decode workers: identity, the relay to routers, heartbeats, the engine thread.

The relay to routers and the processes of ranks have rooms of their own; the rest is one subject, side by side.
"""
