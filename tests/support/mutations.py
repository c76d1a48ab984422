"""Random changes of a JSON value with a fixed seed: other types, hostile texts, missing and unknown names."""

from __future__ import annotations

import copy
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        -0.0,
        1e308,
        10**30,
        10**400,
        "",
        "x",
        "a\nb",
        "\ud800",
        "\U0001f4a5",
        "\x00",
        "../x",
    ),
    *(
        "@all",
        "<b>",
        "https://x",
        "not run: ",
        "passed",
        "A" * 5000,
        [],
        {},
        [None],
        {"": None},
        [[]],
        {"x": {"y": []}},
    ),
)


def changed(value: Any, seed: int) -> Any:
    """A copy with one to three changes at random places."""
    chance = random.Random(seed)
    whole = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        whole = _change(whole, chance)
    return whole


def _change(value: Any, chance: random.Random) -> Any:
    inner = isinstance(value, (dict, list)) and value
    if not inner or chance.random() < 0.05:
        return copy.deepcopy(chance.choice(VALUES))
    if isinstance(value, list):
        place = chance.randrange(len(value))
        value[place] = _change(value[place], chance)
        return value
    name, how = chance.choice(sorted(value)), chance.random()
    if how < 0.1:
        del value[name]
    elif how < 0.2:
        value[chance.choice(("more", "", "\ud800", "ok"))] = chance.choice(VALUES)
    else:
        value[name] = _change(value[name], chance)
    return value
