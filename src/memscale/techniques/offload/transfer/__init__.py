"""How tensors travel: copies, their order on streams, threads for files."""
