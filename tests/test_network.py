"""Nothing of ours talks to a network, at import or at run, unless the user asked for metrics.

Python's own audit events say it: they are raised before a socket connects, binds or sends, and before a name is looked
up, whichever library does it.
"""

import subprocess
import sys

import pytest

WATCHED = """
import sys

seen = []
sys.addaudithook(lambda event, arguments: seen.append((event, arguments)) if event.startswith("socket.") else None)
"""
TRAINED = """
import torch

import memscale

model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
batch = torch.randn(2, 4, 16)
memscale.wrap(model, memscale.Config(force_optimize=True), sample_input=batch)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(batch).square().mean().backward()
    optimizer.step()
memscale.detach(model)
"""
COMMANDS = """
from memscale.cli import main

for arguments in (["estimate", "bert-mini", "--mode", "conservative"], ["doctor"]):
    sys.argv = ["memscale", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
"""
JUDGED = """
used = [(event, arguments[1:]) for event, arguments in seen if event not in ("socket.__new__", "socket.gethostname")]
assert not used, used
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=1200)


@pytest.mark.slow
def test_no_socket_is_used():
    ended = run(WATCHED + TRAINED + COMMANDS + JUDGED)
    assert ended.returncode == 0, ended.stderr


def test_a_socket_that_is_used_is_seen():
    ended = run(WATCHED + "import socket\nsocket.socket().bind(('127.0.0.1', 0))\n" + JUDGED)
    assert ended.returncode == 1
    assert "socket.bind" in ended.stderr
