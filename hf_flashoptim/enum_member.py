"""Add a member to a string enumeration of another library, which has no other way in."""

import enum
from typing import Any


def add_str_enum_member(enumeration: type[enum.Enum], name: str, value: str) -> Any:
    """Add `name` with `value` to an enumeration that derives from `str`, or return the member that is there.

    The member can be looked up by value, name and attribute, is iterated over, copied, hashed as its value, and
    pickled so that unpickling imports this package first.
    """
    if name in enumeration.__members__:
        return enumeration.__members__[name]
    member = str.__new__(enumeration, value)
    member._name_, member._value_ = name, value
    member.__objclass__ = enumeration
    member._sort_order_ = len(enumeration._member_names_)
    enumeration._member_names_.append(name)
    enumeration._member_map_[name] = member
    enumeration._value2member_map_[value] = member
    type.__setattr__(enumeration, name, member)
    member.__reduce_ex__ = lambda protocol: (_restore, (enumeration, value))
    return member


def _restore(enumeration: type[enum.Enum], value: str) -> Any:
    return enumeration(value)
