"""What every call passes first: who calls, what it may use, and the way into a session."""
