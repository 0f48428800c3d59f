"""How a plan follows the loop that trains: what is seen of its steps, and when another plan takes over.

replanning                                           the hook on a wrapped model, which asks the others
plans_in_force, plan_maker, known_plans              the plans of a model, and how one more is made
standing_job                                         what is to be planned, as it stands now
demand, shapes, plans_by_shape, deciding_values      what a batch needs, and which plan serves it
loop_watch, step_watch, open_passes, joint_forwards  what is seen of the steps
held_gradients, counted_gradients, counted_loop      what the loop holds, and plans that count it
observed_steps, observing                            models that cannot be rehearsed
trained_by, evaluation, uncalled, agreed_plans       the optimizer, `eval()`, models that are not called, ranks
"""
