"""The decode role, and the co-located one."""
