"""A plan, carried out: the executor, its settings, and what it does to the process."""
