"""What commands ask of a running cluster: the supervisor's status and commands, and the routers."""
