"""The hand-off without I/O: ownership, messages, attempts, and the coordinators' common part.

The state machines, their table and their messages are read together, so they lie side by side.
"""
