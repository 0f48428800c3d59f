"""What each command of the command line does; `cli.py` has their options.

    estimate, plan, report, fit, doctor, watch, cache, bench    one module each, whose `run` is the command
    verify/, table/                                              the longer ones: `memscale verify` and `memscale table`
    subject, files, progress                                     what they have in common

`cli.py` imports a command when it is called, and a command imports torch once cheap checks have passed, so that
`memscale --help` and an answer to a wrong option come at once.
"""

MAX_SIZE = 2**24
"""The largest batch or sequence; with more, bytes could not be counted in 64 bits."""
