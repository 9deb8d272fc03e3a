"""A number on the command line. `nan` and `inf` are floats to Python, pass every range and make wrong sums."""

from __future__ import annotations

from typing import Any

import click

_MOST = 1e9


class Amount(click.FloatRange):
    """A number that is not negative, and finite with whatever it is multiplied by."""

    def __init__(self) -> None:
        super().__init__(0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not number <= _MOST:  # nan is not
            self.fail(f"{value} is not a number from 0 to {_MOST:,.0f}.", param, ctx)
        return number
