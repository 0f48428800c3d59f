"""Where tensors wait: stores in host memory and on disk, and which of them is used."""
