"""From tokens to what the client reads: text, stop strings, tool calls, reasoning."""
