"""What MemScale shows: on the console, in log files, on a page, as metrics.

explain, outcomes                                    a plan in words, and what the full stack did
console, terminal, tables                            lines for a terminal or a log
page, charts, step_memory, step_times                a report as one HTML file, and the data that it draws
measured                                             what a notebook shows of a measurement
metrics, watch                                       numbers of a training that runs, and a view of them
doctor, versions                                     this machine, and the packages that are installed
"""
