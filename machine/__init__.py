"""What this machine lets a process use."""
