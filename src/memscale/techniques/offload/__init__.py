"""Offloading: tensors wait on the next tier (host, disk) and are back before they are needed.

`store` holds tensors and gives them back. `transfer` moves them beside compute: `transfers` does the copying,
`stream_order` makes one stream wait for another, `in_flight` keeps sources alive, `io_threads` serve disks. Three users
build on these two folders: `activations`, `optimizer` (its state) and `parameters` (streaming).
"""
