"""A live cluster under siege by one tenant, while another tenant's streams are compared token by token.

__main__  the rows, and their table
rows      wrong requests, deadlines, too much KV, one tenant at its worst, edits of the file of keys
bodies    the worst bodies of each endpoint
up        processes of `kvrelay up` that are killed or frozen
cluster   the cluster under siege
router    its router
load      processes that call it: the witness, and attackers
fuzz      requests that are wrong in every place
witness   what the witness saw, and measures of it
"""
