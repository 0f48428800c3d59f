"""What a plan makes the allocator reserve: a step's allocations in order, recorded, lengthened and played.

recording, event_recorder, allocation_log            a step on the stage, written down as a log
bucket_steps, left_gradients, found_memory           the optimizer's step, what it leaves, and what was there before
kernel_temporaries, attention_temporaries            what kernels allocate inside themselves
lengthened, known_passes                             logs that are made from others
allocations, least_reserved                          logs that are played, also with releases (`_decide/allocator/`)
"""
