"""A plan, carried out: the executor, its settings, and what it does to the process.

executor, settings, attachment, offloading           a plan on a model, and what techniques find there
early_moments, late_moments                          when state that comes early is fetched, and late state lets go
parking, telemetry                                   between two steps, and over many
malloc, reserving, orderly_exit, interrupts          what is done to the process
"""

from memscale._execute.executor import Executor as Executor
from memscale._execute.executor import executor_of as executor_of
