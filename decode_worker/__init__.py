"""The decode role: takes KV over and generates tokens."""
