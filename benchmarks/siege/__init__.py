"""A live cluster under siege by one tenant, while another tenant's streams are compared token by token."""
