"""Covering arrays: few cases in which every pair of choices occurs at least once.

Source: Cohen, Dalal, Fredman, Patton 1997, "The AETG System", section 3 (greedy construction).
Deviation: the legal combinations are few enough to check all of them for each next case.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def covering_array(
    factors: Mapping[str, Sequence[Any]], is_legal: Callable[..., bool]
) -> list[dict[str, Any]]:
    """Return legal combinations that contain every pair of values allowed together.

    Args:
       factors: name -> its values.
       is_legal: called with one value of each factor, by name.

    Returns:
       Cases, those that cover most pairs first; the same at every call.
    """
    combinations = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    pairs = [
        (case, set(itertools.combinations(case.items(), 2)))
        for case in combinations
        if is_legal(**case)
    ]
    missing = set().union(*(held for _, held in pairs))
    chosen = []
    while missing:
        case, held = max(pairs, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(case)
        missing -= held
    return chosen
