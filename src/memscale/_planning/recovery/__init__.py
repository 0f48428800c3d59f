"""A step that ran out of memory, done again under a tighter plan, and what may not be repeated.

oom_recovery, repeated_step    the repetition of a forward, a backward or an optimizer's step
not_repeatable                 what refuses one, with its sentence
plain_code                     whether a model's code keeps nothing, read before anything runs
watched_run, reach             what a run that is repeated could reach and call, and whether that is harmless
steps_beside                   Python state beside the model, from one forward to the next
"""
