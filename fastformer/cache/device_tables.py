"""The tables of a `KVCache` where the ops read them: on a CPU the host's own memory, elsewhere a copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastformer.cache.block_pool import Ints
from fastformer.cache.block_table import BlockTables, spread


class DeviceTables:
    """The tensors of a `BlockTables`. They keep their addresses; a device is sent what has changed, and not waited for.

    Args:
        max_rows, max_seqlen, max_source_seqlen, num_blocks, block_size: as in `KVCache`.
        device: where the keys and values are.

    Attributes:
        host: what there is to know; it alone is written to.
        seqlens, keys, slots, source_seqlens, source_slots: as in `BlockTables`; current after `upload`.
    """

    def __init__(
        self,
        max_rows: int,
        max_seqlen: int,
        max_source_seqlen: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        ends = BlockTables.ends(max_rows, max_seqlen, max_source_seqlen)
        self._memory = torch.zeros(ends[-1], dtype=torch.int32, device="cpu")
        self._sent = self._memory if self.is_host(device) else torch.zeros_like(self._memory, device=device)
        parts = self._sent.tensor_split(ends[:-1])
        self.seqlens, self.keys, slots, self.source_seqlens, sources = parts
        self.slots, self.source_slots = slots.view(max_rows, max_seqlen), sources.view(max_rows, max_source_seqlen)
        memory = self._memory.numpy()
        self.host = BlockTables(max_rows, max_seqlen, max_source_seqlen, num_blocks, block_size, memory)
        # The rows and columns of each table outside of which the device has zeros.
        self._slots_sent = self._sources_sent = (0, 0)

    @staticmethod
    def is_host(device: torch.device) -> bool:
        """Whether ops on this device read the host's memory."""
        return device.type == "cpu"

    def upload(self, slots: bool = True) -> None:
        """Makes the tensors current; without `slots`, the lengths and keys of rows alone are needed."""
        host = self.host
        host.settle()
        if self._sent is self._memory:
            return
        if host.rows_changed:
            rows = host.num_rows
            self._copy(self._sent[: host.max_rows + rows], self._memory[: host.max_rows + rows])
            host.rows_changed = False
        if slots and host.slots_changed:
            self._slots_sent = self._send(self.slots, host.slots, (host.num_rows, host.used), self._slots_sent)
            host.slots_changed = False
        if host.sources_changed:
            self._copy(self.source_seqlens, torch.from_numpy(host.source_seqlens))
            used = max(host.group_keys, default=-1) + 1, host.longest_source
            self._sources_sent = self._send(self.source_slots, host.source_slots, used, self._sources_sent)
            host.sources_changed = False

    def reserve(self, first: int, num_tokens: int, counts: Ints | None) -> None:
        """`BlockTables.reserve`. Where nothing else has changed, the device is sent the new entries alone."""
        host = self.host
        if self._sent is self._memory:
            host.reserve(first, num_tokens, counts)
            return
        host.settle()
        current, version = not host.slots_changed, host.version
        host.reserve(first, num_tokens, counts)
        if not current or host.version == version:
            return
        begin, rows = host.row_of(first), host.num_rows
        row, ahead = spread(np.full(rows - begin, num_tokens, np.int32) if counts is None else counts)
        row += begin
        position = host.seqlens[row] + ahead
        entries = self.place(np.stack((row * host.max_seqlen + position, host.slots[row, position])))
        self.slots.view(-1).index_copy_(0, entries[0], entries[1].int())
        self._slots_sent = max(rows, self._slots_sent[0]), max(host.used, self._slots_sent[1])
        host.slots_changed = False

    def advance(self, first: int, num_tokens: int, counts: Ints | None) -> None:
        """`BlockTables.advance`. Where a step ends and nothing else has changed, the device counts along: no upload."""
        current = not self.host.rows_changed
        self.host.advance(first, num_tokens, counts)
        if current and counts is None and self._sent is not self._memory:
            self.seqlens[self.host.row_of(first) : self.host.num_rows] += num_tokens
            self.host.rows_changed = False

    def place(self, array: npt.NDArray[np.integer]) -> Tensor:
        """Any other array of the host on the device."""
        return self._staged(torch.from_numpy(array)).to(self._sent.device, non_blocking=True)

    def _send(self, table: Tensor, of_host: Ints, used: tuple[int, int], sent: tuple[int, int]) -> tuple[int, int]:
        # The rows and columns that are used, and zeros for what is on the device beside them; gives what is there now.
        rows, width = np.maximum(used, sent).tolist()
        if rows and width:
            self._copy(table[:rows, :width], torch.from_numpy(of_host[:rows, :width]))
        return used

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(self._staged(source.contiguous()), non_blocking=True)

    def _staged(self, tensor: Tensor) -> Tensor:
        # A pinned copy, so that the host may go on writing while the upload is under way: torch gives the copy's memory
        # to others only when the device is done with it.
        return tensor.pin_memory() if self._sent.is_cuda else tensor
