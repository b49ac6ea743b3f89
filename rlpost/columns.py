"""Immutable columns of numbers: one compact array behind the interface of a tuple.

Samples hold one value for each token. A tuple of Python numbers takes about 40 bytes per value and
is pickled value by value; a column takes 4 bytes and is pickled as one buffer, which Ray's object
store maps into a reader's memory without a copy (pickle protocol 5, PEP 574).

    IntColumn     int32: token ids, counts
    FloatColumn   float32: log-probs, advantages
    DoubleColumn  float64: penalties, whose sums go into rewards
    RunColumn     run-length coded integers: loss masks
    RouteColumn   [tokens, layers, k] uint8 or uint16: the experts that a router chose
    TokenSetColumn  sets of token ids, one for each token: what top-p and top-k left to sample from

A column compares equal to any sequence of the same values. Its ``array`` is read-only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, overload


class _Numpy:
    """numpy, imported at its first use: the commands of a login node only name the types here."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module("numpy"), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import numpy as np
else:
    np = _Numpy()

Number = TypeVar("Number", bound=float)


class _NumberColumn(Sequence[Number]):
    """Base class of the columns with one number per token."""

    __slots__ = ("array",)
    DTYPE: ClassVar[str]

    def __init__(self, values: Iterable[float] = ()) -> None:
        """Copy ``values``. Raises OverflowError or ValueError if one does not fit into the type."""
        if not isinstance(values, np.ndarray | Sequence):
            values = list(values)
        self.array = np.array(values, dtype=self.DTYPE).reshape(-1)
        self.array.setflags(write=False)

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return ``values`` as a column; a column of this type is returned as it is."""
        return values if isinstance(values, cls) else cls(values)

    @classmethod
    def view(cls, array: np.ndarray | bytes | memoryview) -> Self:
        """Wrap a one-dimensional array of the right type, or a buffer of its bytes, without a copy.

        The caller must not change the memory afterwards.
        """
        column = cls.__new__(cls)
        if not isinstance(array, np.ndarray):
            array = np.frombuffer(array, dtype=cls.DTYPE)
        assert array.dtype == cls.DTYPE, (array.dtype, cls.DTYPE)
        assert array.ndim == 1, array.shape
        column.array = array.view()
        column.array.setflags(write=False)
        return column

    @classmethod
    def joined(cls, columns: Iterable[Self]) -> Self:
        """Concatenate columns; if only one of them has values, return it without a copy."""
        filled = [column for column in columns if len(column.array)]
        if len(filled) == 1:
            return filled[0]
        return cls.view(np.concatenate([column.array for column in filled])) if filled else cls()

    @classmethod
    def zeros(cls, length: int) -> Self:
        """Return ``length`` zeros."""
        return cls.view(np.zeros(length, dtype=cls.DTYPE))

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> Number: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Number | Self:
        # ``item`` returns a Python number: a numpy scalar is slow and prints differently.
        return self.view(self.array[index]) if isinstance(index, slice) else self.array.item(index)

    def __iter__(self) -> Iterator[Number]:
        return iter(self.array.tolist())

    def __add__(self, other: Iterable[float]) -> Self:
        return self.joined([self, self.of(other)])

    def __radd__(self, other: Iterable[float]) -> Self:
        return self.joined([self.of(other), self])

    def __array__(self, dtype: object = None, copy: bool | None = None) -> object:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence | np.ndarray) or isinstance(other, str | bytes):
            return NotImplemented
        if len(other) != len(self):
            return False
        try:
            given = np.asarray(other)
        except ValueError:  # nested sequences of different lengths
            return False
        if self.array.dtype.kind == "f" and given.dtype.kind in "iuf":
            given = given.astype(self.DTYPE)  # so that a float32 column of [0.1] equals [0.1]
        return bool(np.array_equal(self.array, given))

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).view, (self.array,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.array.tolist()})"

    def tobytes(self) -> bytes:
        """The values in memory order, little endian on every supported machine."""
        return self.array.tobytes()

    def find_not_finite(self) -> int | None:
        """Return the position of the first NaN or infinity; None if all values are finite."""
        is_finite = np.isfinite(self.array)
        return None if is_finite.all() else int(is_finite.argmin())


class IntColumn(_NumberColumn[int]):
    """Integers of 32 bits."""

    __slots__ = ()
    DTYPE = "int32"


class FloatColumn(_NumberColumn[float]):
    """Numbers of 32 bits. A log-prob that an engine computed in float32 is restored exactly."""

    __slots__ = ()
    DTYPE = "float32"


class DoubleColumn(_NumberColumn[float]):
    """Numbers of 64 bits, for values that Python's arithmetic uses afterwards."""

    __slots__ = ()
    DTYPE = "float64"


class RunColumn(Sequence[int]):
    """Integers, stored as pairs (value, count) of equal neighbours."""

    __slots__ = ("_length", "runs")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """``runs`` may contain empty runs and equal neighbours; they are removed."""
        merged: list[tuple[int, int]] = []
        for value, count in runs:
            if merged and merged[-1][0] == value:
                merged[-1] = (value, merged[-1][1] + count)
            elif count:
                merged.append((value, count))
        self.runs = tuple(merged)
        self._length = sum(count for _, count in merged)

    @classmethod
    def of(cls, values: Iterable[int] | np.ndarray) -> RunColumn:
        """Encode single values, an array or any iterable; a RunColumn is returned as it is."""
        if isinstance(values, cls):
            return values
        if isinstance(values, np.ndarray):
            ends = [*np.flatnonzero(np.diff(values)) + 1, len(values)] if len(values) else []
            starts = [0, *ends[:-1]]
            return cls(
                (int(values[start]), int(end - start))
                for start, end in zip(starts, ends, strict=False)
            )
        return cls((int(value), len(list(equal))) for value, equal in itertools.groupby(values))

    @property
    def array(self) -> np.ndarray:
        """All values, as an int8 array or, if one does not fit, as int32."""
        values = [value for value, _ in self.runs]
        small = all(-128 <= value <= 127 for value in values)
        counts = [count for _, count in self.runs]
        return np.repeat(np.array(values, dtype=np.int8 if small else np.int32), counts)

    def total(self) -> int:
        return sum(value * count for value, count in self.runs)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> RunColumn: ...
    def __getitem__(self, index: int | slice) -> int | RunColumn:
        if isinstance(index, slice):
            return RunColumn.of(self.array[index])
        return int(self.array[index])

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(
            itertools.repeat(value, count) for value, count in self.runs
        )

    def __add__(self, other: Iterable[int]) -> RunColumn:
        return RunColumn((*self.runs, *RunColumn.of(other).runs))

    def __radd__(self, other: Iterable[int]) -> RunColumn:
        return RunColumn((*RunColumn.of(other).runs, *self.runs))

    def __array__(self, dtype: object = None, copy: bool | None = None) -> object:
        return np.asarray(self.array, dtype=dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RunColumn):
            return self.runs == other.runs
        if isinstance(other, Sequence):
            return len(other) == len(self) and RunColumn.of(other).runs == self.runs
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.runs)

    def __reduce__(self) -> tuple[object, ...]:
        return RunColumn, (self.runs,)

    def __repr__(self) -> str:
        return f"RunColumn({list(self.runs)})"


class RouteColumn:
    """The experts chosen for each token: [tokens, layers, k].

    ``layers`` counts MoE layers only, first to last, over all pipeline stages. Expert numbers are
    global. A token whose routes are unknown holds the largest value of the type in every place, and
    the trainer routes it itself; the type is uint8 if every expert fits.
    """

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        """Wrap an array [tokens, layers, k] of uint8 or uint16, without a copy."""
        assert array.dtype in (np.uint8, np.uint16), array.dtype
        assert array.ndim == 3, array.shape
        self.array = array.view()
        self.array.setflags(write=False)

    @staticmethod
    def dtype(num_experts: int) -> np.dtype:
        """The type that holds ``num_experts`` numbers and the mark of an unknown route."""
        return np.dtype(np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16)

    @classmethod
    def joined(cls, columns: Iterable[RouteColumn]) -> RouteColumn:
        """Concatenate along the tokens; at least one column."""
        return cls(np.concatenate([column.array for column in columns]))

    @property
    def known(self) -> np.ndarray:
        """[tokens] bool: whether the routes of a token are known."""
        # An unknown route holds the largest value in every place, so the first one suffices.
        return self.array[:, 0, 0] != np.iinfo(self.array.dtype).max

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, tokens: slice) -> RouteColumn:
        return RouteColumn(self.array[tokens])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RouteColumn):
            return NotImplemented
        return self.array.dtype == other.array.dtype and bool(
            np.array_equal(self.array, other.array)
        )

    def __hash__(self) -> int:
        return hash((self.array.shape, self.array.tobytes()))

    def __reduce__(self) -> tuple[object, ...]:
        return RouteColumn, (np.ascontiguousarray(self.array),)

    def __repr__(self) -> str:
        return f"RouteColumn({self.array.shape}, {self.array.dtype})"


class TokenSetColumn(Sequence[tuple[int, ...]]):
    """A set of token ids for each token of a response, as sizes and the ids one after the other.

    The set of a sampled token holds the ids that its sampler could choose. An empty set stands for
    the whole vocabulary.
    """

    __slots__ = ("sizes", "token_ids")

    def __init__(self, sizes: IntColumn, token_ids: IntColumn) -> None:
        """Wrap the number of ids in each set, and all ids in order."""
        assert int(sizes.array.sum()) == len(token_ids), (sizes, len(token_ids))
        self.sizes, self.token_ids = sizes, token_ids

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> TokenSetColumn:
        """Build from sequences of ids; a TokenSetColumn is returned as it is."""
        if isinstance(sets, cls):
            return sets
        sizes = IntColumn([len(each) for each in sets])
        return cls(sizes, IntColumn(itertools.chain.from_iterable(sets)))

    @classmethod
    def whole(cls, length: int) -> TokenSetColumn:
        """Return ``length`` sets that stand for the whole vocabulary."""
        return cls(IntColumn.zeros(length), IntColumn())

    @classmethod
    def joined(cls, columns: Iterable[TokenSetColumn]) -> TokenSetColumn:
        """Concatenate columns."""
        parts = list(columns)
        return cls(
            IntColumn.joined(part.sizes for part in parts),
            IntColumn.joined(part.token_ids for part in parts),
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        # ``__getitem__`` adds up all sizes, which is quadratic here.
        ids = iter(self.token_ids)
        return (tuple(itertools.islice(ids, size)) for size in self.sizes)

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> TokenSetColumn: ...
    def __getitem__(self, index: int | slice) -> tuple[int, ...] | TokenSetColumn:
        ends = np.concatenate([[0], np.cumsum(self.sizes.array)])
        if not isinstance(index, slice):
            at = range(len(self))[index]
            return tuple(self.token_ids[int(ends[at]) : int(ends[at + 1])])
        start, stop, step = index.indices(len(self))
        assert step == 1, step
        stop = max(start, stop)
        return TokenSetColumn(
            self.sizes[start:stop], self.token_ids[int(ends[start]) : int(ends[stop])]
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenSetColumn):
            return NotImplemented
        return self.sizes == other.sizes and self.token_ids == other.token_ids

    def __hash__(self) -> int:
        return hash((self.sizes, self.token_ids))

    def __reduce__(self) -> tuple[object, ...]:
        return TokenSetColumn, (self.sizes, self.token_ids)

    def __repr__(self) -> str:
        return f"TokenSetColumn({[list(each) for each in self]})"
