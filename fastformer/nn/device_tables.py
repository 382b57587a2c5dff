"""The tables of a `KVCache` where the ops read them: on a CPU the host's own memory, elsewhere a copy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastformer.nn.blocks import BlockTables


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
        self._memory = torch.zeros(ends[-1], dtype=torch.int32)
        self._sent = self._memory if self.is_host(device) else torch.zeros_like(self._memory, device=device)
        self._sources_begin = ends[2]
        parts = self._sent.tensor_split(ends[:-1])
        self.seqlens, self.keys, slots, self.source_seqlens, sources = parts
        self.slots, self.source_slots = slots.view(max_rows, max_seqlen), sources.view(max_rows, max_source_seqlen)
        memory = self._memory.numpy()
        self.host = BlockTables(max_rows, max_seqlen, max_source_seqlen, num_blocks, block_size, memory)

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
        if host.rows_changed or (slots and host.slots_changed):
            self._copy(0, 2 * host.max_rows + host.num_rows * host.max_seqlen)
            host.rows_changed = host.slots_changed = False
        if host.sources_changed:
            self._copy(self._sources_begin, len(self._memory))
            host.sources_changed = False

    def advance(self, first: int, num_tokens: int, counts: npt.NDArray[np.int32] | None) -> None:
        """`BlockTables.advance`. Where a step ends and nothing else has changed, the device counts along: no upload."""
        current = not self.host.rows_changed
        self.host.advance(first, num_tokens, counts)
        if current and counts is None and self._sent is not self._memory:
            self.seqlens[self.host.row_of(first) : self.host.num_rows] += num_tokens
            self.host.rows_changed = False

    def place(self, array: npt.NDArray[np.integer]) -> Tensor:
        """Any other array of the host on the device."""
        return self._staged(torch.from_numpy(array)).to(self._sent.device, non_blocking=True)

    def _copy(self, begin: int, end: int) -> None:
        self._sent[begin:end].copy_(self._staged(self._memory[begin:end]), non_blocking=True)

    def _staged(self, tensor: Tensor) -> Tensor:
        # A pinned copy, so that the host may go on writing while the upload is under way: torch gives the copy's memory
        # to others only when the device is done with it.
        return tensor.pin_memory() if self._sent.is_cuda else tensor
