"""Members as plain processes of this machine."""
