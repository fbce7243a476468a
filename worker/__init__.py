"""What prefill and decode workers share: identity, the relay to routers, heartbeats, the engine thread."""
