"""What a plan makes the allocator reserve: a step's allocations in order, recorded, lengthened and played."""
