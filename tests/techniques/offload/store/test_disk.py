"""The disk tier: a clear error for everything that a disk can do wrong, no file left, no page cache filled."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import threading

import pytest
import torch

from memscale._errors import ChecksumError, MemScaleError, StoreFullError, StoreIOError
from memscale.techniques.offload.store import disk as disk_module
from memscale.techniques.offload.store.disk import BLOCK_BYTES, CHUNK_BYTES, DiskStore, sweep_stale
from memscale.techniques.offload.store.stores import Layout, Ticket

MIB = 1 << 20


@pytest.fixture
def store(tmp_path):
    with_checks = DiskStore(tmp_path, verify=True)
    yield with_checks
    with_checks.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "num_bytes", [1, BLOCK_BYTES - 1, BLOCK_BYTES, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5]
)
def test_lengths_around_blocks_and_chunks(direct, num_bytes, tmp_path):
    store = DiskStore(tmp_path, direct=direct, verify=True)
    assert store.direct == direct
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    first, second = store.put(data), store.put(255 - data)
    assert torch.equal(store.get(first), data)
    assert torch.equal(store.get(second), 255 - data)
    store.close()


def test_aligned_memory_is_used_as_it_is(tmp_path):
    store = DiskStore(tmp_path, num_buffers=0)  # a bounce buffer would be waited for for ever
    memory = mmap.mmap(-1, 4 * BLOCK_BYTES)
    aligned = torch.frombuffer(memory, dtype=torch.uint8)
    aligned.copy_(torch.arange(4 * BLOCK_BYTES) % 251)
    ticket = store.put(aligned)
    expected = aligned.clone()
    aligned.zero_()
    store.read(ticket, [aligned])
    assert torch.equal(aligned, expected)
    store.close()


def test_of_aligned_memory_only_a_last_block_that_is_not_full_is_copied(tmp_path, monkeypatch):
    store = DiskStore(tmp_path)
    copied = []
    copy_ = torch.Tensor.copy_
    memory = torch.frombuffer(mmap.mmap(-1, 4 * BLOCK_BYTES), dtype=torch.uint8)[: 3 * BLOCK_BYTES + 5]
    memory.copy_(torch.arange(len(memory)) % 251)
    expected = memory.clone()
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source: copied.append(len(source)) or copy_(to, source))
    ticket = store.put(memory)
    memory.zero_()
    store.read(ticket, [memory])
    monkeypatch.undo()
    assert copied == [5, 5]
    assert torch.equal(memory, expected)
    store.close()


def cached_bytes(store: DiskStore, num_bytes: int) -> int:
    """How much of the file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, store._file.fd, 0)
    pages = (ctypes.c_ubyte * (num_bytes // BLOCK_BYTES))()
    assert libc.mincore(address, num_bytes, pages) == 0
    libc.munmap(address, num_bytes)
    return sum(page & 1 for page in pages) * BLOCK_BYTES


@pytest.mark.parametrize("direct", [True, False])
def test_the_page_cache_stays_empty(direct, tmp_path):
    store = DiskStore(tmp_path, direct=direct)
    ticket = store.put(torch.ones(32 * MIB, dtype=torch.uint8))
    assert cached_bytes(store, 32 * MIB) <= MIB
    store.get(ticket)
    assert cached_bytes(store, 32 * MIB) <= MIB
    store.close()


def test_the_page_cache_would_have_been_filled_otherwise(tmp_path, monkeypatch):
    """That the test above can fail."""
    monkeypatch.setattr(disk_module._UnlinkedFile, "forget", lambda *args: None)
    store = DiskStore(tmp_path, direct=False)
    store.put(torch.ones(32 * MIB, dtype=torch.uint8))
    assert cached_bytes(store, 32 * MIB) >= 30 * MIB
    store.close()


# -------------------------------------------------------------------------------------------------------- parts

CUTS = (0, 512, 512 + CHUNK_BYTES + 2048, 3 * MIB + CHUNK_BYTES + 17)
NUM_BYTES = 20 * MIB + 3


def part(store: DiskStore, ticket: Ticket, index: int) -> Ticket:
    ends = (*CUTS[1:], NUM_BYTES)
    line = torch.empty(ends[index] - CUTS[index], dtype=torch.uint8, device="meta")
    return store.part_of(ticket, Layout.of(line), CUTS[index])


@pytest.mark.parametrize("direct", [True, False])
def test_parts_come_and_go_by_themselves(direct, tmp_path):
    """Wherever they are cut, and in whatever pieces the memory comes that the whole is read into."""
    store = DiskStore(tmp_path, direct=direct, verify=True)
    other = store.put(torch.ones(100, dtype=torch.uint8))
    data = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8)
    ticket = store.reserve(Layout.of(data), CUTS)
    after = store.put(torch.ones(100, dtype=torch.uint8))
    store.write(ticket, data.split([5 * MIB + 4096, 4097, NUM_BYTES - 5 * MIB - 8193]))
    for index in (2, 0, 3, 1):
        one = part(store, ticket, index)
        line = torch.empty(one.num_bytes, dtype=torch.uint8)
        store.read(one, [line])
        assert torch.equal(line, data[slice(*one.place)])
        store.write(one, [255 - line])
    given = []

    def memory():
        for size in (CHUNK_BYTES, 100, NUM_BYTES - CHUNK_BYTES - 100):
            line = torch.empty(size, dtype=torch.uint8)
            yield line
            given.append(line.clone())  # who gives the memory uses it before the next is asked for

    store.read(ticket, memory())
    assert torch.equal(torch.cat(given), 255 - data)
    assert torch.equal(store.get(ticket), 255 - data)
    assert torch.equal(store.get(other), store.get(after))
    assert store.counters.held_bytes == NUM_BYTES + 200
    for one in (ticket, other, after):
        store.free(one)
    assert store.counters.held_bytes == 0
    assert store.room_bytes() >= store.counters.allocated_bytes
    assert store._extents.free_bytes == store.counters.allocated_bytes, "all of it is free again"
    store.close()


def test_a_changed_byte_is_found_in_its_part_and_in_the_whole(store):
    data = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    ticket = store.reserve(Layout.of(data), CUTS)
    store.fill(ticket, data)
    store.write(part(store, ticket, 2), [torch.ones(CUTS[3] - CUTS[2], dtype=torch.uint8)])
    flip_a_byte(store, ticket.spot[2].offset + 1000)
    for index in (0, 1):
        store.read(part(store, ticket, index), [torch.empty(CUTS[index + 1] - CUTS[index], dtype=torch.uint8)])
    with pytest.raises(ChecksumError, match="came back changed"):
        store.read(part(store, ticket, 2), [torch.empty(CUTS[3] - CUTS[2], dtype=torch.uint8)])
    with pytest.raises(ChecksumError, match="came back changed"):
        store.get(ticket)
    store.write(part(store, ticket, 2), [torch.ones(CUTS[3] - CUTS[2], dtype=torch.uint8)])
    assert int(store.get(ticket).sum()) == CUTS[3] - CUTS[2]


# ----------------------------------------------------------------------------------------------------- failures


def flip_a_byte(store: DiskStore, offset: int) -> None:
    fcntl.fcntl(store._file.fd, fcntl.F_SETFL, fcntl.fcntl(store._file.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    byte = os.pread(store._file.fd, 1, offset)
    os.pwrite(store._file.fd, bytes([byte[0] ^ 1]), offset)
    os.fsync(store._file.fd)


def test_a_changed_byte_is_found(store):
    ticket = store.put(torch.zeros(CHUNK_BYTES + 100, dtype=torch.uint8))
    flip_a_byte(store, ticket.spot[0].offset + CHUNK_BYTES + 50)
    with pytest.raises(ChecksumError, match="came back changed"):
        store.get(ticket)


def test_without_verify_nobody_looks(tmp_path):
    """That the test above tests the checksum."""
    store = DiskStore(tmp_path, verify=False)
    ticket = store.put(torch.zeros(100, dtype=torch.uint8))
    flip_a_byte(store, ticket.spot[0].offset)
    assert int(store.get(ticket)[0]) == 1
    store.close()


def test_a_file_that_ends_early_is_a_short_read(store):
    ticket = store.put(torch.ones(10 * BLOCK_BYTES, dtype=torch.uint8))
    os.ftruncate(store._file.fd, 5 * BLOCK_BYTES)
    with pytest.raises(StoreIOError, match=r"short read: .* ends at offset 20480, 20.5 kB early"):
        store.get(ticket)


@pytest.mark.parametrize("function", ["pwrite", "preadv"])
def test_short_moves_are_continued(function, store, monkeypatch):
    """A disk may move less than it was asked to; that is no error."""
    original = getattr(os, function)

    def move_a_block(fd, data, offset):
        part = data[:BLOCK_BYTES] if function == "pwrite" else [data[0][:BLOCK_BYTES]]
        return original(fd, part, offset)

    monkeypatch.setattr(os, function, move_a_block)
    data = torch.randint(0, 256, (5 * BLOCK_BYTES + 7,), dtype=torch.uint8)
    assert torch.equal(store.get(store.put(data)), data)


@pytest.mark.parametrize(
    ("function", "error", "expected"),
    [
        ("pwrite", errno.EIO, StoreIOError),
        ("pwrite", errno.ENOSPC, StoreFullError),
        ("preadv", errno.EIO, StoreIOError),
        ("posix_fallocate", errno.ENOSPC, StoreFullError),
        ("posix_fallocate", errno.EDQUOT, StoreFullError),
    ],
)
def test_errors_of_the_disk_are_ours_and_leave_no_room_taken(function, error, expected, store, monkeypatch):
    def fail(*args):
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(expected, match=os.strerror(error)):
            store.get(store.put(torch.ones(1000)))
    store.sweep()
    assert store.counters.held_bytes == 0
    assert torch.equal(store.get(store.put(torch.ones(1000))), torch.ones(1000))


def test_a_disk_without_space_is_refused_before_anything_is_written(store):
    free = os.statvfs(store.directory).f_bavail * os.statvfs(store.directory).f_frsize
    with pytest.raises(
        StoreFullError, match=r"[\d.]+ .B are to wait .* disk store has room for [\d.]+ .B; .*offload_dir"
    ):
        store.require_room(free)
    line = Layout.of(torch.empty(free, dtype=torch.uint8, device="meta"))
    with pytest.raises(StoreFullError, match=r"B free; offloading needs [\d.]+ .B .*offload_dir"):
        store.reserve(line)
    assert os.fstat(store._file.fd).st_size == 0
    store.require_room(1000)


def test_a_budget(tmp_path):
    store = DiskStore(tmp_path, budget_bytes=10 * BLOCK_BYTES)
    ticket = store.put(torch.ones(9 * BLOCK_BYTES, dtype=torch.uint8))
    with pytest.raises(StoreFullError, match=r"budget of 41\.0 kB is spent"):
        store.put(torch.ones(BLOCK_BYTES + 1, dtype=torch.uint8))
    assert os.fstat(store._file.fd).st_size <= 10 * BLOCK_BYTES
    assert store.room_bytes() == BLOCK_BYTES
    store.free(ticket)
    assert store.room_bytes() == 10 * BLOCK_BYTES
    store.close()


FILE_LIMIT = """
import sys, resource, torch
from memscale import MemScaleError
from memscale._errors import StoreFullError
from memscale.techniques.offload.store.disk import DiskStore
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
store = DiskStore(sys.argv[1])
ticket = store.put(torch.ones(1 << 19, dtype=torch.uint8))
try:
    store.put(torch.ones(1 << 20, dtype=torch.uint8))
except StoreFullError as error:
    assert isinstance(error, MemScaleError)
    assert torch.equal(store.get(ticket), torch.ones(1 << 19, dtype=torch.uint8))
    print("refused:", error)
"""


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)


def test_the_kernels_own_refusal_of_space(tmp_path):
    done = run_python(FILE_LIMIT, str(tmp_path))
    assert "refused: failed to reserve 1.0 MB" in done.stdout, done.stderr


def test_a_directory_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreIOError, match="cannot be used"):
        DiskStore(tmp_path / "file" / "below")
    assert issubclass(StoreIOError, MemScaleError)


# ------------------------------------------------------------------------------------------------- nothing is left


def test_the_file_has_no_name(store, tmp_path):
    store.put(torch.ones(1000))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_made(tmp_path):
    DiskStore(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b").is_dir()


KILLED_BEFORE_UNLINK = """
import os, signal, sys
from memscale.techniques.offload.store.disk import DiskStore
os.unlink = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)  # others remove files when they are imported
DiskStore(sys.argv[1])
"""


def test_files_of_dead_processes_are_swept(tmp_path):
    done = run_python(KILLED_BEFORE_UNLINK, str(tmp_path))
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.stat().st_size == 0
    stranger = tmp_path / "checkpoint.pt"
    stranger.write_text("")
    DiskStore(tmp_path).close()
    assert list(tmp_path.iterdir()) == [stranger]


STALE_NAME = "memscale-offload-abcd_123"


def make_stale(path: pathlib.Path, text: str = "", mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


FOREIGN = {
    "a directory": lambda path: path.mkdir(),
    "a dangling link": lambda path: path.symlink_to("/nonexistent/file"),
    "a link to a file": lambda path: path.symlink_to(path.parent / "results"),
    "a pipe": lambda path: os.mkfifo(path, 0o600),
    "a file with something in it": lambda path: make_stale(path, "results"),
    "a file that others may read": lambda path: make_stale(path, mode=0o644),
    "another name": lambda path: make_stale(path.with_name("memscale-offload-results")),
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_ours_blocks_nobody_and_stays(make, tmp_path):
    make_stale(tmp_path / "results")
    make(tmp_path / STALE_NAME)
    before = sorted(tmp_path.iterdir())
    DiskStore(tmp_path).close()
    assert sorted(tmp_path.iterdir()) == before


AS_NOBODY = """
import os, pathlib, sys
from memscale.techniques.offload.store.disk import DiskStore, sweep_stale
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
DiskStore(sys.argv[1]).close()
print("opened, and removed", sweep_stale(pathlib.Path(sys.argv[1])))
"""


@pytest.mark.parametrize("mode", [0o1777, 0o1733], ids=["shared", "not to be listed"])
def test_a_stale_file_of_another_user_blocks_nobody(mode):
    with tempfile.TemporaryDirectory() as name:  # not below pytest's, which is closed to others
        directory = pathlib.Path(name)
        make_stale(directory / STALE_NAME)
        if os.geteuid() == 0:  # nobody else can become another user
            directory.chmod(mode)
            done = run_python(AS_NOBODY, name)
            assert "opened, and removed 0" in done.stdout, done.stderr
            assert [path.name for path in directory.iterdir()] == [STALE_NAME]
        assert sweep_stale(directory) == 1


def test_a_sweep_that_is_quicker_than_the_owner_does_no_harm(tmp_path, monkeypatch):
    unlink = os.unlink

    def sweep_before(path, *args, **kwargs):
        monkeypatch.setattr(os, "unlink", unlink)
        assert sweep_stale(tmp_path) == 1
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", sweep_before)
    store = DiskStore(tmp_path)
    ticket = store.put(torch.ones(1000))
    assert torch.equal(store.get(ticket), torch.ones(1000))
    store.close()


def test_freed_room_is_used_again(store):
    for _ in range(20):
        store.free(store.put(torch.ones(3 * BLOCK_BYTES, dtype=torch.uint8)))
    assert os.fstat(store._file.fd).st_size == 3 * BLOCK_BYTES


def test_threads_at_once(store):
    failures = []

    def work(number: int) -> None:
        data = torch.full((300_000 + number,), number, dtype=torch.uint8)
        for _ in range(10):
            ticket = store.put(data)
            if not torch.equal(store.get(ticket), data):
                failures.append(number)
            store.free(ticket)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.counters.held_bytes == 0


def test_no_descriptor_is_left(tmp_path):
    def count() -> int:
        return len(list(pathlib.Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(5):
        DiskStore(tmp_path).close()
    assert count() == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 5
