"""Memory of a warehouse that writers fill and nobody sees: for one commit, or kept ready for a writer's next ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from mindspeed_rl_plugin.dock.distributed.arena import LINE, Arena, Extent, rounded

MOST = 16 << 20  # bytes of a spare
SEVERAL = 8  # commits that a spare is made for


class Reservations:
    """Extents by who asked for them. They are taken by a commit, or return when their owner goes away.

    A spare is an extent that a writer gets with the answer to a commit, and cuts the extents of its next commits from:
    a commit is then one round trip. lends: whether there are any; memory that lies ready would count against a cap.
    """

    def __init__(self, arena: Arena, lends: bool) -> None:
        self._arena, self._lends = arena, lends
        self._owner: dict[Extent, Hashable] = {}
        self._spares: dict[Extent, Hashable] = {}

    def __len__(self) -> int:
        return len(self._owner)

    @property
    def idle(self) -> int:
        """Bytes of spares."""
        return sum(extent.nbytes for extent in self._spares)

    def make(self, owner: Hashable, sizes: Sequence[int]) -> list[Extent]:
        """Extents of `sizes` bytes."""
        found = [self._arena.allocate(size) for size in sizes]
        self._owner.update(dict.fromkeys(found, owner))
        return found

    def holds(self, owner: Hashable, extents: Iterable[Extent]) -> bool:
        """Whether all extents are the owner's."""
        return all(self._owner.get(extent) == owner for extent in extents)

    def lent(self, owner: Hashable, spare: Extent) -> bool:
        """Whether a spare is the owner's."""
        return self._spares.get(spare) == owner

    def check(self, owner: Hashable, column: str, extent: Extent) -> None:
        """Raise ValueError for an extent that is not the owner's."""
        if self._owner.get(extent) != owner:
            raise ValueError(f"column {column!r}: {extent} was not reserved by this writer")

    def take(self, extent: Extent) -> None:
        """It is committed, or given back to the arena by the caller."""
        del self._owner[extent]

    def forget(self, owner: Hashable, extents: Iterable[Extent] | None = None) -> None:
        """Take back what a writer will not commit; extents: None for all that it has, spares too."""
        among = None if extents is None else set(extents)
        for held in (self._owner, self._spares):
            for extent in [e for e, o in held.items() if o == owner and (among is None or e in among)]:
                del held[extent]
                self._arena.free(extent)

    def carve(self, owner: Hashable, spare: Extent, extents: Sequence[Extent]) -> Extent | None:
        """Make extents that the owner has cut from the front of its spare reserved ones; the rest is its spare then.

        Raises ValueError, and changes nothing, where it is not its spare or they are not whole lines in a row.
        """
        at, end = spare.offset, spare.offset + spare.nbytes
        for extent in extents:
            if (extent.segment, extent.offset) != (spare.segment, at) or extent.nbytes < LINE or extent.nbytes % LINE:
                raise ValueError(f"{extent} is not the next part of {spare}")
            at += extent.nbytes
        if not self.lent(owner, spare) or at > end:
            raise ValueError(f"{spare} was not lent to this writer, or is too small")
        del self._spares[spare]
        self._owner.update(dict.fromkeys(extents, owner))
        if at == end:
            return None
        rest = Extent(spare.segment, at, end - at)
        self._spares[rest] = owner
        return rest

    def renew(self, owner: Hashable, rest: Extent | None, want: int) -> Extent | None:
        """A spare that has room for `want` bytes, the rest of the last one where it has; None where there is none."""
        if rest is not None and rest.nbytes >= want and self.lent(owner, rest):
            return rest
        if rest is not None:
            self.forget(owner, [rest])
        if not self._lends or not 0 < want <= MOST:
            return None
        try:
            found = self._arena.allocate(rounded(min(SEVERAL * want, MOST)))
        except OSError:  # no memory to lie idle
            return None
        self._spares[found] = owner
        return found
