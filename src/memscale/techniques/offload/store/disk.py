"""`DiskStore`: tensors wait in a file that nobody else can see and that cannot outlive the process.

NOTE [no file is left behind]: the file is unlinked as soon as it is open, so the kernel removes it with the process,
however that ends. Only a kill between the two calls leaves the name of an empty file, which the user's next start
removes. If its owner is still between the two calls, nothing is lost: the owner was about to remove it too. Other files
in the directory are not ours: they are neither opened nor followed nor removed.

NOTE [page cache]: bytes go past the page cache (O_DIRECT, from aligned buffers). Where the file system refuses that,
they are flushed and dropped from the cache after every move. Either way the RAM that offloading frees stays free.

NOTE [parts]: a tensor whose parts will come and go by themselves lies in pieces, which are cut where a part begins or
ends. Each piece has blocks of its own in the file, so that two threads never write to one block, and a checksum of its
own, so that a part and the whole are checked by the same ones. Pieces of one tensor lie one after another.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import mmap
import os
import pathlib
import queue
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from memscale._errors import ChecksumError, StoreFullError, StoreIOError
from memscale._units import show_bytes
from memscale.techniques.offload.store.extents import Extents
from memscale.techniques.offload.store.stores import PART_BYTES, Layout, Store, Ticket

BLOCK_BYTES = PART_BYTES
"""Direct I/O moves whole blocks from block-aligned memory."""
CHUNK_BYTES = 8 * 1024 * 1024
"""One system call moves at most this many bytes, through one bounce buffer."""
RESERVE_BYTES = 64 * 1024 * 1024
"""Free space that is left to the rest of the machine."""
_PREFIX = "memscale-offload-"
_OWN_NAME = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")
"""The names of our files: the prefix and what `tempfile` adds to it."""


@dataclasses.dataclass(slots=True)
class Piece:
    """A stretch of the file: some bytes of a waiting tensor. See NOTE [parts]."""

    offset: int
    num_bytes: int
    checksum: int | None = None
    """The CRC-32 of what was written last, with `verify`."""


class DiskStore(Store):
    """Tensors wait in a directory's free space, up to `budget_bytes`.

    Space is reserved on the disk before anything is written, so a full disk shows when room is asked for, not in the
    middle of a write. `verify=True` keeps a CRC-32 of every piece and compares it when it is read. `num_buffers` bounce
    buffers of 8 MiB are the RAM that it costs, and the number of threads that can move at once.
    """

    name = "disk"
    survives_fork = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        budget_bytes: int | None = None,
        *,
        verify: bool = False,
        direct: bool = True,
        num_buffers: int = 2,
    ) -> None:
        super().__init__(budget_bytes)
        self.directory = pathlib.Path(directory)
        self.verify = verify
        self._extents = Extents(BLOCK_BYTES)
        self._buffers: queue.LifoQueue[mmap.mmap] = queue.LifoQueue()
        self._file = _UnlinkedFile(self.directory, direct=direct)
        self.direct = self._file.direct
        for _ in range(num_buffers):
            self._buffers.put(mmap.mmap(-1, CHUNK_BYTES))
        self.buffer_bytes = num_buffers * CHUNK_BYTES

    # ---------------------------------------------------------------------------------------------------- bytes

    def write(self, ticket: Ticket, parts: Iterable[torch.Tensor]) -> None:
        self.process.require()
        source = _Line(parts)
        for piece in ticket.spot:
            done, checksum = 0, 0
            while done < piece.num_bytes:
                with self._block_aligned(source, piece.num_bytes - done, fill=True) as (buffer, num_bytes):
                    if self.verify:
                        checksum = zlib.crc32(buffer[:num_bytes], checksum)
                    self._file.write(buffer, piece.offset + done)
                done += num_bytes
            self._file.forget(piece.offset, piece.num_bytes)
            piece.checksum = checksum if self.verify else None
        with self._lock:
            self.counters.bytes_in += ticket.num_bytes

    def read(self, ticket: Ticket, parts: Iterable[torch.Tensor]) -> None:
        self.process.require()
        target = _Line(parts)
        for piece in ticket.spot:
            done, checksum = 0, 0
            while done < piece.num_bytes:
                with self._block_aligned(target, piece.num_bytes - done, fill=False) as (buffer, num_bytes):
                    self._file.read(buffer, piece.offset + done)
                    if self.verify:
                        checksum = zlib.crc32(buffer[:num_bytes], checksum)
                done += num_bytes
            self._file.forget(piece.offset, piece.num_bytes)
            self._check(piece, checksum)
        target.finish()
        with self._lock:
            self.counters.bytes_out += ticket.num_bytes

    def _check(self, piece: Piece, checksum: int) -> None:
        """Raise if a piece was read otherwise than it was written. Gaps between parts may never have been written."""
        if self.verify and piece.checksum is not None and checksum != piece.checksum:
            raise ChecksumError(
                f"{show_bytes(piece.num_bytes)} at offset {piece.offset} of the offload file in {self.directory} came "
                f"back changed (CRC-32 {checksum}, was {piece.checksum}); the disk or its driver is at fault"
            )

    @contextlib.contextmanager
    def _block_aligned(self, line: _Line, left_bytes: int, *, fill: bool) -> Iterator[tuple[memoryview, int]]:
        """Give the line's own memory if direct I/O can use it, or a bounce buffer that is copied before or after.

        `left_bytes` are left of the piece. Return what is to be moved, in whole blocks, and how much of it counts.
        """
        num_bytes = line.next_bytes(left_bytes)
        here = line.here(num_bytes)
        if here is not None and here.data_ptr() % BLOCK_BYTES == 0 and num_bytes % BLOCK_BYTES == 0:
            yield memoryview((ctypes.c_char * num_bytes).from_address(here.data_ptr())).cast("B"), num_bytes
            line.skip(num_bytes)
            return
        buffer = self._buffers.get()
        try:
            bounce = torch.frombuffer(buffer, dtype=torch.uint8, count=num_bytes)
            if fill:
                line.copy_to(bounce)
            yield memoryview(buffer)[: self._extents.rounded(num_bytes)], num_bytes
            if not fill:
                line.copy_from(bounce)
        finally:
            self._buffers.put(buffer)

    # ----------------------------------------------------------------------------------------------------- room

    def part_of(self, ticket: Ticket, layout: Layout, offset: int) -> Ticket:
        pieces, start, end = [], 0, offset + layout.num_bytes
        for piece in ticket.spot:
            if offset <= start and start + piece.num_bytes <= end:
                pieces.append(piece)
            start += piece.num_bytes
        assert sum(piece.num_bytes for piece in pieces) == layout.num_bytes, "room was not reserved with these cuts"
        return ticket.part(layout, offset, tuple(pieces))

    def _reserve(self, num_bytes: int, cuts: Sequence[int]) -> tuple[Piece, ...]:
        """Reserve whole blocks for each piece. See NOTE [parts]."""
        ends = [*cuts, num_bytes]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False) if end > start]
        if not sizes:
            return ()
        offset, pieces = self._take(sum(map(self._extents.rounded, sizes))), []
        for size in sizes:
            pieces.append(Piece(offset, size))
            offset += self._extents.rounded(size)
        return tuple(pieces)

    def _take(self, num_bytes: int) -> int:
        offset = self._extents.take(num_bytes)
        if offset is None:
            self._grow(num_bytes - self._extents.tail_gap)
            offset = self._extents.take(num_bytes)
            assert offset is not None
        return offset

    def _grow(self, num_bytes: int) -> None:
        size = self._extents.num_bytes
        if self.budget_bytes is not None and size + num_bytes > self.budget_bytes:
            raise StoreFullError(
                f"the disk store's budget of {show_bytes(self.budget_bytes)} is spent ({show_bytes(size)} in use) and "
                f"{show_bytes(num_bytes)} more are needed"
            )
        free = shutil.disk_usage(self.directory).free
        if num_bytes + RESERVE_BYTES > free:
            raise StoreFullError(
                f"{self.directory} has {show_bytes(free)} free; offloading needs {show_bytes(num_bytes)} and leaves "
                f"{show_bytes(RESERVE_BYTES)} to the rest of the machine. Free some space or set offload_dir to "
                "another disk"
            )
        self._file.reserve(size, num_bytes)
        self._extents.grow(num_bytes)
        self.counters.allocate(num_bytes, num_bytes)

    def room_bytes(self) -> int:
        reserved = self._extents.free_bytes
        free = max(0, shutil.disk_usage(self.directory).free - RESERVE_BYTES)
        if self.budget_bytes is not None:
            free = min(free, self.budget_bytes - self._extents.num_bytes)
        return reserved + free

    def _release(self, spot: tuple[Piece, ...], num_bytes: int) -> None:
        if spot:
            self._extents.give(spot[0].offset, sum(self._extents.rounded(piece.num_bytes) for piece in spot))

    def close(self) -> None:
        if not self.process.is_here():  # only the descriptor belongs to this process, the file is the parent's
            self.closed = True
            self._file.close()
            return
        with self._lock:
            if not self.closed:
                super().close()
                self._file.close()
                while not self._buffers.empty():
                    self._buffers.get()
                self.counters.allocate(-self.counters.requested_bytes, -self.counters.allocated_bytes)
                self.counters.hold(-self.counters.held_bytes)


class _Line:
    """Parts of memory as one line of bytes, gone through once. A part is asked for when the one before it is done."""

    def __init__(self, parts: Iterable[torch.Tensor]) -> None:
        self._parts = iter(parts)
        self._part = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._done = 0

    def next_bytes(self, left_bytes: int) -> int:
        """How many bytes are moved next: whole blocks of one part. What is less than a block is moved by itself."""
        num_bytes = min(CHUNK_BYTES, left_bytes, self._here_bytes())
        whole_bytes = num_bytes - num_bytes % BLOCK_BYTES
        return whole_bytes or min(BLOCK_BYTES, left_bytes)

    def here(self, num_bytes: int) -> torch.Tensor | None:
        """Return the next bytes if they are in one part."""
        return self._part[self._done : self._done + num_bytes] if num_bytes <= self._here_bytes() else None

    def skip(self, num_bytes: int) -> None:
        """Go on after bytes that were moved in their own memory."""
        self._done += num_bytes

    def finish(self) -> None:
        """Ask for one part more: whoever gives parts to read into may be waiting for that to use the last one."""
        left_bytes = self._part.numel() - self._done + sum(part.numel() for part in self._parts)
        assert not left_bytes, "there is more memory than bytes"

    def copy_to(self, bounce: torch.Tensor) -> None:
        for stretch, here in self._along(bounce):
            stretch.copy_(here)

    def copy_from(self, bounce: torch.Tensor) -> None:
        for stretch, here in self._along(bounce):
            here.copy_(stretch)

    def _along(self, bounce: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        done = 0
        while done < bounce.numel():
            count = min(bounce.numel() - done, self._here_bytes())
            yield bounce[done : done + count], self._part[self._done : self._done + count]
            self._done += count
            done += count

    def _here_bytes(self) -> int:
        """The bytes that are left of the current part."""
        while self._done == self._part.numel():
            self._part, self._done = next(self._parts), 0
        return self._part.numel() - self._done


class _UnlinkedFile:
    """An open file without a name."""

    def __init__(self, directory: pathlib.Path, *, direct: bool) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            sweep_stale(directory)
            self.fd, self.direct = _open_unlinked(directory, direct)
        except OSError as error:
            raise StoreIOError(f"the offload directory {directory} cannot be used: {error}") from error

    def reserve(self, offset: int, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self.fd, offset, num_bytes)
        except OSError as error:
            raise self._failure("reserve", num_bytes, offset, error) from error

    def write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                moved = os.pwrite(self.fd, data[done:], offset + done)
            except OSError as error:
                raise self._failure("write", len(data) - done, offset + done, error) from error
            if moved == 0:
                raise StoreIOError(f"the disk under {self.directory} took none of {show_bytes(len(data) - done)}")
            done += moved - moved % BLOCK_BYTES if self.direct and moved < len(data) - done else moved

    def read(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            try:
                moved = os.preadv(self.fd, [data[done:]], offset + done)
            except OSError as error:
                raise self._failure("read", len(data) - done, offset + done, error) from error
            if moved == 0:
                raise StoreIOError(
                    f"short read: the offload file in {self.directory} ends at offset {offset + done}, "
                    f"{show_bytes(len(data) - done)} early"
                )
            done += moved

    def forget(self, offset: int, num_bytes: int) -> None:
        """Drop these bytes from the page cache, if they went through it. See NOTE [page cache]."""
        if self.direct or not hasattr(os, "posix_fadvise"):
            return
        try:
            os.fdatasync(self.fd)
            os.posix_fadvise(self.fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._failure("flush", num_bytes, offset, error) from error

    def _failure(self, verb: str, num_bytes: int, offset: int, error: OSError) -> StoreFullError | StoreIOError:
        where = f"at offset {offset} of the offload file in {self.directory}"
        what = f"failed to {verb} {show_bytes(num_bytes)} {where}: {error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFullError(f"{what}. Free some space or set offload_dir to another disk")
        return StoreIOError(what)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()


def _open_unlinked(directory: pathlib.Path, direct: bool) -> tuple[int, bool]:
    """Open a file and unlink it at once. See NOTE [no file is left behind]."""
    fd, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
    try:
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            os.unlink(name)
        direct = _try_direct(fd) if direct and hasattr(os, "O_DIRECT") else False
    except BaseException:
        os.close(fd)
        raise
    return fd, direct


def _try_direct(fd: int) -> bool:
    """Switch to direct I/O if a real write and read of one block work; some file systems refuse no earlier."""
    import fcntl  # not on Windows, where a plain `wrap` must still be possible

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            ok = os.pwrite(fd, block, 0) == BLOCK_BYTES and os.preadv(fd, [block], 0) == BLOCK_BYTES
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            ok = False
    os.ftruncate(fd, 0)
    if not ok:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return ok


def sweep_stale(directory: pathlib.Path) -> int:
    """Remove the empty files that killed processes of this user left behind. Return their number."""
    try:
        with os.scandir(directory) as entries:
            stale = [pathlib.Path(entry.path) for entry in entries if _is_ours(entry)]
    except PermissionError:
        return 0  # the directory may be written to, but not listed
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether `_open_unlinked` made this file. Nothing is opened to find out, and no link is followed."""
    if not _OWN_NAME.fullmatch(entry.name):
        return False
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False  # its owner has just unlinked it
    is_private = stat.S_IMODE(found.st_mode) == stat.S_IRUSR | stat.S_IWUSR
    return stat.S_ISREG(found.st_mode) and is_private and found.st_uid == os.geteuid() and found.st_size == 0
