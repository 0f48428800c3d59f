"""How a plan follows the loop that trains: what is seen of its steps, and when another plan takes over."""
