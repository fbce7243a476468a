"""Questions that commands ask a running cluster: the supervisor for its status and commands, and the routers."""
