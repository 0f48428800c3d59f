"""A plan, carried out: the executor, its settings, and what it does to the process."""

from memscale._execute.executor import Executor as Executor
from memscale._execute.executor import executor_of as executor_of
