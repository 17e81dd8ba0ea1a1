"""Values: dataclasses that nobody changes once they are made, and that cost next to nothing to make.

``dataclass(frozen=True)`` sets every field through ``object.__setattr__``, which makes a record of twenty fields five
times as dear, and a delivery makes a dozen values. So the type checker alone forbids to write to one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dataclasses import replace

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[T], T]:
        """For the type checker."""
        return lambda decorator: decorator


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make the class a dataclass with slots, compared and hashed by its fields; write to it nowhere."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


if not TYPE_CHECKING:
    _READERS: dict[type, tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]] = {}

    def replace(old: T, /, **changes: Any) -> T:
        """Like ``dataclasses.replace``, for values, in a third of the time."""
        cls = type(old)
        names, read = _READERS.get(cls) or _READERS.setdefault(cls, _reader(cls))
        return cls(**{**dict(zip(names, read(old), strict=True)), **changes})

    def _reader(cls: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
        names = tuple(each.name for each in dataclasses.fields(cls))
        return names, attrgetter(*names)


__all__ = ["field", "frozen", "replace"]
