"""The common part of prefill and decode workers: identity, the relay to routers, heartbeats, the engine thread."""
