"""What an SM and the links of a GPU reach: calls choose their SMs by it, and share work between them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tokenloom.errors import ImplausibleRates

WITHIN = 4
"""Rates of a machine are at least this part of those below, and at most so many times them."""


@dataclass(frozen=True)
class Rates:
    """Rates of one machine: GB/s are 1e9 bytes a second, and of one SM where nothing else is said.

    The defaults were measured on H200 (microbench/notebook/calls.md, "Blocks with one role").

    Attributes:
        send_gbytes_per_s, send_us: what is sent of rows as they are, and what each row takes besides: ids, weights,
            places and a flag.
        quantize_gbytes_per_s: of bfloat16, what is read, made FP8 of, and stored.
        store_gbytes_per_s: what is stored in the own memory where a row goes to several places.
        push_gbytes_per_s: loads and stores together, where rows or sums are sent home.
        add_gbytes_per_s: the same, where rows are added at home.
        link_gbytes_per_s: the most that all links of one GPU carry in one direction.

    Raises:
        ImplausibleRates: a rate is far from the default, or no number.
    """

    send_gbytes_per_s: float = 67.0
    send_us: float = 0.14
    quantize_gbytes_per_s: float = 18.0
    store_gbytes_per_s: float = 55.0
    push_gbytes_per_s: float = 81.0
    add_gbytes_per_s: float = 81.0
    link_gbytes_per_s: float = 372.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, default = getattr(self, each.name), getattr(Rates, each.name)
            if not (isinstance(value, int | float) and default / WITHIN <= value <= default * WITHIN):
                raise ImplausibleRates(each.name, value, default / WITHIN, default * WITHIN)

    def __str__(self) -> str:
        return (
            f"links {self.link_gbytes_per_s:g} GB/s; an SM sends {self.send_gbytes_per_s:g} GB/s and takes "
            f"{self.send_us:g} us more for each row, quantises {self.quantize_gbytes_per_s:g}, stores "
            f"{self.store_gbytes_per_s:g}, pushes {self.push_gbytes_per_s:g} and adds {self.add_gbytes_per_s:g} GB/s"
        )


H200 = Rates()
"""What holds where nothing was measured."""
