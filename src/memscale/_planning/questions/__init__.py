"""Questions that are answered without attaching a plan: estimates, largest batches, a predicted step as pictures."""
