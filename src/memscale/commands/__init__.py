"""What single commands of the command line do beyond the public verbs: `memscale verify`, `memscale table`."""
