"""Records of ShareGPT: a conversation of turns, each with who speaks (from) and what (value)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from titanlite.data import DataError
from titanlite.data.records import Columns, are_turns, cut, refuse_surrogates

#: Who speaks → the role that chat templates know.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


class ShareGPT(NamedTuple):
    """The form of such records. A field `system` goes before the conversation."""

    name: str = "sharegpt"
    own: tuple[str, ...] = ()
    optional: tuple[str, ...] = ("system",)

    def strings(self, record: Mapping[str, Any], columns: Columns, where: str) -> list[Any]:
        """Return the rendered conversation of a record.

        Raises DataError where it is missing, a turn has another form, or its speaker is not known.
        """
        field = columns.text
        if field not in record:
            there = ", ".join(map(repr, record)) or "none"
            raise DataError(
                f"{where}: the key {field!r} is missing (keys: {there}); {columns.remedy(field)}"
            )
        turns = record[field]
        if not are_turns(turns, ("from",)) or not all(_has_text(turn) for turn in turns):
            raise DataError(
                f"{where}: the key {field!r} is no list of turns, each with from and value: "
                f"{cut(turns)}; {columns.remedy(field)}"
            )
        refuse_surrogates(turns, field, where)
        messages: list[dict[str, str]] = []
        for turn in turns:
            role = self._role(turn, field, where)
            messages.append({"role": role, "content": turn["value"]})
        system = record.get("system")
        if system:
            if not isinstance(system, str) or any(one["role"] == "system" for one in messages):
                raise DataError(
                    f"{where}: the key 'system' must be a string, and {field!r} have no turn from "
                    f"system, found {cut(system)}; leave one out"
                )
            refuse_surrogates(system, "system", where)
            messages.insert(0, {"role": "system", "content": system})
        assert columns.chat is not None
        return [columns.chat.render(messages, where), None]

    def _role(self, turn: Mapping[str, Any], field: str, where: str) -> str:
        role = ROLES.get(turn["from"])
        if role is None:
            raise DataError(
                f"{where}: the key {field!r} has a turn from {cut(turn['from'])}: {cut(turn)}; "
                f"known are {', '.join(ROLES)}: rename the speaker"
            )
        return role


def _has_text(turn: Mapping[str, Any]) -> bool:
    return isinstance(turn["from"], str) and isinstance(turn.get("value"), str)
