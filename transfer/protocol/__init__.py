"""The hand-off without I/O: ownership, messages, attempts, and the coordinators' common part."""
