"""Offloading: tensors wait on the next tier (host, disk) and are back before they are needed.

`stores` take a tensor and give it back, `transfers` moves it beside compute (with `waits` between streams, sources
`in_flight`, and `io_threads` for disks), and three users stand on them: activations, optimizer state (`optimizer`) and
parameters (`streaming`).
"""
