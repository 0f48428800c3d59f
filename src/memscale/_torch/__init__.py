"""What lies below: PyTorch's private API, overridden methods, live bytes, random states. Knows no technique.

private/                                             every use of PyTorch's private API
overrides, interception                              a user's modules and the process's functions, changed for a time
optimizer_steps, quiet_steps, released_gradients     an optimizer's step: who is told of it, and what it leaves
waiting_gradients                                    what stands for a gradient that is elsewhere
live_bytes, device_memory, step_meter                what tensors, the card and a training take
fake_numbers, fake_repeats                           what fake tensors cannot say, and work that stands for more
each_operator, plain_path, outputs                   operators, who looks at them, and the tensors of an output
host_rng, moment, snapshots                          random states and values, kept and put back
entries, state_beside                                Python state that code can reach, kept and put back
carried_attributes, tensor_marks                     what somebody has put on a tensor, and its other marks
harmless, messages                                   functions whose calls change nothing, and messages shown once
"""
