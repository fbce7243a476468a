"""The supervisor: hears heartbeats, keeps the fleet, records it for its successor."""
