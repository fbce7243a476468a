"""The way of every call into a session: who calls, and what the caller may use."""
